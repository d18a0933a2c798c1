r"""Throughput of vLLM's protocol in front of SGLang, as a ratio of SGLang's own route.

A client in another process sends the same prompts, many at once, to ``/generate`` of
the server and to ``/inference/v1/generate`` in front of it, one after the other.
*Processor* is the time of the gateway's process for a request.

Responses have different lengths, as in rollouts: from half of ``--new-tokens`` to one
and a half. With ``--same-length``, those that begin at once also end at once, and all
wait for the gateway, which answers one after the other.

    python benchmarks/vllm_api.py [tiny | 0.5b | FOLDER] [--device cuda]
        [--requests 1024] [--at-once 256] [--new-tokens 128] [--same-length]
        [--repeats 5]
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
from torchrl_sglang.support.garbage import collect_rarely_from_now_on

CLIENT = "client"
"""The argument of the process that the client is in."""
PROMPT_TOKENS = 64


def lengths_of(arguments: Any) -> list[int]:
    """Returns the new tokens of each request, in an order without neighbours."""
    new_tokens, numbers = arguments.new_tokens, range(arguments.requests)
    if arguments.same_length:
        return [new_tokens for _ in numbers]
    return [new_tokens // 2 + number * 7919 % (new_tokens + 1) for number in numbers]


def body_of(route: str, number: int, new_tokens: int) -> dict[str, Any]:
    """Returns a request of a route."""
    ids = [(5 + number + 7 * position) % 90 for position in range(PROMPT_TOKENS)]
    if route == "/generate":
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
        more = {"return_logprob": True, "extra_key": route}
        return {"input_ids": ids, "sampling_params": sampling, **more}
    sampling = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1}
    return {"token_ids": ids, "sampling_params": sampling}


async def run_client(url: str, route: str, at_once: int, lengths: list[int]) -> float:
    """Sends requests; returns the seconds until the last answer."""
    connector, turn = aiohttp.TCPConnector(limit=at_once), asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number: int) -> None:
            body = body_of(route, number, lengths[number])
            async with turn, session.post(url + route, json=body) as response:
                response.raise_for_status()
                await response.read()

        begun = time.perf_counter()
        await asyncio.gather(*map(ask, range(len(lengths))))
        return time.perf_counter() - begun


def serve_jobs() -> None:
    """Runs the client for each line of the standard input; prints its seconds."""
    for line in sys.stdin:
        print(asyncio.run(run_client(*json.loads(line))), flush=True)


def measure(client: Any, url: str, route: str, arguments: Any) -> float:
    """Returns the requests per second of a client in another process."""
    job = [url, route, arguments.at_once, lengths_of(arguments)]
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
        same_length=False,
        repeats=5,
    )
    ratios = []
    with (
        start_engine(arguments.model, device=arguments.device) as engine,
        Gateway(engine, dialects=[VLLM(engine)], sessionless=True) as gateway,
        subprocess.Popen(
            [sys.executable, __file__, CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        # As in the process of `serve`.
        collect_rarely_from_now_on()
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
    lengths = "same length" if arguments.same_length else "mixed lengths"
    print_row("median ratio", statistics.median(ratios[1:]), lengths, width=14)


if __name__ == "__main__":
    if sys.argv[1:2] == [CLIENT]:
        serve_jobs()
    else:
        main()
