"""`renderers`' client of vLLM, alone or in the ``TrainClient`` of `verifiers`.

``python verifiers_train.py JOB``: a JSON text with ``kind``, ``base_url``, ``key``,
``model`` (a folder), ``requests``, ``at_once`` and ``tokens``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate
from renderers.configs import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

KEY = "VLLM_TEST_KEY"


def messages(number):
    return [{"role": "user", "content": f"{number}+1="}]


def renderers_client(job):
    """Returns a call of ``renderers.client.generate``."""
    config = DefaultRendererConfig()
    renderer = create_renderer(load_tokenizer(job["model"]), config)
    client = AsyncOpenAI(base_url=job["base_url"], api_key=job["key"], max_retries=0)

    async def call(number):
        answer = await generate(
            client=client,
            renderer=renderer,
            messages=messages(number),
            model=job["model"],
            sampling_params={"max_tokens": job["tokens"], "temperature": 1.0},
            cache_salt="1",
        )
        return [answer[f"{part}_ids"] for part in ("prompt", "completion")], answer[
            "completion_logprobs"
        ]

    return call


def train_client(job):
    """Returns a call of ``TrainClient.get_response``."""
    os.environ[KEY] = job["key"]
    client = TrainClient(
        TrainClientConfig(
            base_url=job["base_url"],
            api_key_var=KEY,
            renderer=DefaultRendererConfig(),
            renderer_model_name=job["model"],
        )
    )
    sampling = SamplingConfig(max_tokens=job["tokens"], temperature=1.0)

    async def call(number):
        body = {"model": job["model"], "messages": messages(number)}
        response = await client.get_response(ChatDialect(), body, sampling, "a-session")
        tokens = response.tokens
        return [tokens.prompt_ids, tokens.completion_ids], tokens.completion_logprobs

    return call


async def main():
    job = json.loads(sys.argv[1])
    call = {"renderers": renderers_client, "verifiers": train_client}[job["kind"]](job)
    turn = asyncio.Semaphore(job["at_once"])

    async def one(number):
        async with turn:
            return await call(number)

    answers = await asyncio.gather(*map(one, range(job["requests"])))
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
