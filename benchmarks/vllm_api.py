r"""Throughput of vLLM's protocol in front of SGLang, as a ratio of SGLang's own route.

A client in another process sends the same prompts, many at once, to ``/generate`` of
the server and to ``/inference/v1/generate`` in front of it, one after the other.
*Processor* is the time of the gateway's process for a request.

    python benchmarks/vllm_api.py [tiny | 0.5b | FOLDER] [--device cuda]
        [--requests 1024] [--at-once 256] [--new-tokens 128] [--repeats 5]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import aiohttp

from script import print_row, read_options
from torchrl_sglang.cli.bench.models import start_engine
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.vllm.dialect import VLLM
from torchrl_sglang.support.garbage import old_objects_frozen

CLIENT = "client"
"""The argument of the process that the client is in."""
PROMPT_TOKENS = 64


def body_of(route: str, number: int, new_tokens: int) -> dict[str, Any]:
    """Returns a request of a route."""
    ids = [(5 + number + 7 * position) % 90 for position in range(PROMPT_TOKENS)]
    if route == "/generate":
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
        more = {"return_logprob": True, "extra_key": route}
        return {"input_ids": ids, "sampling_params": sampling, **more}
    sampling = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1}
    return {"token_ids": ids, "sampling_params": sampling}


async def run_client(
    url: str, route: str, requests: int, at_once: int, new_tokens: int
) -> float:
    """Sends requests; returns the seconds until the last answer."""
    connector, turn = aiohttp.TCPConnector(limit=at_once), asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number: int) -> None:
            body = body_of(route, number, new_tokens)
            async with turn, session.post(url + route, json=body) as response:
                response.raise_for_status()
                await response.read()

        begun = time.perf_counter()
        await asyncio.gather(*map(ask, range(requests)))
        return time.perf_counter() - begun


def serve_jobs() -> None:
    """Runs the client for each line of the standard input; prints its seconds."""
    for line in sys.stdin:
        print(asyncio.run(run_client(*json.loads(line))), flush=True)


def measure(client: Any, url: str, route: str, arguments: Any) -> float:
    """Returns the requests per second of a client in another process."""
    job = [url, route, arguments.requests, arguments.at_once, arguments.new_tokens]
    print(json.dumps(job), file=client.stdin, flush=True)
    return arguments.requests / float(client.stdout.readline())


def main() -> None:
    arguments = read_options(
        __doc__,
        model="tiny",
        device="cpu|cuda",
        requests=1024,
        at_once=256,
        new_tokens=128,
        repeats=5,
    )
    ratios = []
    with (
        start_engine(arguments.model, device=arguments.device) as engine,
        Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway,
        # As in the process of `serve`.
        old_objects_frozen(),
        subprocess.Popen(
            [sys.executable, __file__, CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        print_row("requests/s", "SGLang", "vLLM's", "ratio", "ms processor")
        for number in range(arguments.repeats + 1):
            own = measure(client, engine.server_url, "/generate", arguments)
            before = time.process_time()
            api = measure(client, gateway.url, "/inference/v1/generate", arguments)
            spent = 1e3 * (time.process_time() - before) / arguments.requests
            print_row("warm-up" if not number else "", own, api, api / own, spent)
            ratios.append(api / own)
        assert client.stdin is not None
        client.stdin.close()
    print_row("median ratio", statistics.median(ratios[1:]))


if __name__ == "__main__":
    if sys.argv[1:2] == [CLIENT]:
        serve_jobs()
    else:
        main()
