r"""Tokens per second of AsyncSGLang and SGLangWrapper over the best raw client's.

The raw client is the fastest form that SGLang's HTTP interface has: the whole batch in
one request, sent with requests, read with orjson, and nothing made of the answer. All
do the same work on the same server, in turns, in the same run.

    python benchmarks/rollout_throughput.py [--prompts 64] [--new-tokens 64]
    python benchmarks/rollout_throughput.py --shapes 0.5b --prompts 256 \
        --prompt-tokens 128 --new-tokens 256      # on a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator

import orjson
import requests
import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.modules.llm.policies import Tokens

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.cli.bench.shapes import SHAPES, save_shapes
from torchrl_sglang.testing.gpu import server_arguments
from torchrl_sglang.testing.tiny_model import save_tiny_model


@contextlib.contextmanager
def make_engine(shapes: str) -> Iterator[AsyncSGLang]:
    with tempfile.TemporaryDirectory() as folder:
        if shapes == "tiny":
            model = save_tiny_model(folder)
            engine = AsyncSGLang.from_pretrained(model, device="cpu")
        else:
            model = save_shapes(shapes, folder)
            engine = AsyncSGLang.from_pretrained(
                model, device="cuda", load_format="dummy", **server_arguments()
            )
        with engine:
            yield engine


def raw(engine: AsyncSGLang, prompts: list[list[int]], new_tokens: int) -> int:
    """Returns the number of generated tokens."""
    answer = requests.post(
        f"{engine.server_url}/generate",
        data=orjson.dumps(
            {
                "input_ids": prompts,
                "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True},
                "return_logprob": True,
            }
        ),
        headers={"Content-Type": "application/json"},
        timeout=600,
    )
    answer.raise_for_status()
    return sum(len(item["output_ids"]) for item in orjson.loads(answer.content))


def through_engine(
    engine: AsyncSGLang, prompts: list[list[int]], new_tokens: int
) -> int:
    """Returns the number of generated tokens."""
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprobs=True,
    )
    return sum(len(answer.token_ids) for answer in answers)


def wrapped(policy: SGLangWrapper, prompts: list[list[int]]) -> int:
    """Returns the number of generated tokens."""
    td = lazy_stack(
        [TensorDict(tokens=Tokens(prompt=torch.tensor(p))) for p in prompts]
    )
    out = policy(td)
    return sum(row.numel() for row in out.get(("tokens", "response"), as_list=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", choices=["tiny", *SHAPES], default="tiny")
    arguments = parser.parse_args()
    set_list_to_stack(True).set()
    generator = torch.Generator().manual_seed(0)
    with make_engine(arguments.shapes) as engine:
        vocabulary = engine.capabilities.vocab_size
        policy = SGLangWrapper(
            engine,
            input_mode="tokens",
            generate_kwargs={
                "max_new_tokens": arguments.new_tokens,
                "ignore_eos": True,
            },
        )
        speeds: dict[str, list[float]] = {"raw": [], "engine": [], "wrapper": []}
        for repeat in range(arguments.repeats + 1):
            for name, values in speeds.items():
                # New prompts every time, so that no prefix is cached for either.
                shape = (arguments.prompts, arguments.prompt_tokens)
                prompts = torch.randint(5, vocabulary, shape, generator=generator)
                start = time.perf_counter()
                if name == "raw":
                    tokens = raw(engine, prompts.tolist(), arguments.new_tokens)
                elif name == "engine":
                    tokens = through_engine(
                        engine, prompts.tolist(), arguments.new_tokens
                    )
                else:
                    tokens = wrapped(policy, prompts.tolist())
                if repeat > 0:
                    values.append(tokens / (time.perf_counter() - start))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        print(
            f"{arguments.prompts} prompts of {arguments.prompt_tokens} tokens, "
            f"{arguments.new_tokens} new tokens each, with log-probs, "
            f"SGLang {engine.capabilities.version}, median of {arguments.repeats}:"
        )
        for name, speed in medians.items():
            ratio = speed / medians["raw"]
            print(f"{name:8} {speed:9.0f} tokens/s, {ratio:.3f} of the raw client")


if __name__ == "__main__":
    main()
