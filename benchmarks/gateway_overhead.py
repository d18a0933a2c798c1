"""Throughput through a gateway beside the engine's alone, and the gateway's own time.

The same conversations, all at once: agents in another process talk to a gateway, and
then the engine alone is sent the very prompts that the gateway has recorded, turn by
turn. *Processor* is the time of the gateway's thread for a turn, of which *rendering*
is the chat template and the tokenizer, measured afterwards by themselves. With the
model ``instant`` the engine responds at once: that shows the processor's time, and the
ratio means nothing.

    python benchmarks/gateway_overhead.py [instant | tiny | 0.5b | FOLDER]
        [--url URL] [--device cuda] [--sessions 256] [--turns 4] [--new-tokens 128]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

from script import read_options
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.cli.bench.measure import exact_length, start_engine
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.requests.request import GenerateRequest
from wrapper_overhead import InstantEngine

AGENTS = "agents"
"""The argument of the process that the agents are in."""

USER_CHARACTERS = 96
THREAD = "torchrl_sglang-gateway"


async def talk(client: aiohttp.ClientSession, url: str, load: dict[str, Any]) -> None:
    """Holds one conversation."""
    user = {"role": "user", "content": load["text"]}
    messages: list[Any] = [user]
    options = {"max_tokens": load["new_tokens"], "ignore_eos": True}
    for _ in range(load["turns"]):
        async with client.post(url, json={"messages": messages, **options}) as answer:
            answer.raise_for_status()
            said = (await answer.json())["choices"][0]["message"]
        messages += [said, user]


async def talk_all(load: dict[str, Any]) -> float:
    """Returns the seconds that all conversations of agents took."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        start = time.perf_counter()
        await asyncio.gather(*(talk(client, url, load) for url in load["urls"]))
        return time.perf_counter() - start


def thread_seconds() -> float:
    """Returns the processor time of the gateway's thread."""
    (thread,) = (each for each in threading.enumerate() if each.name == THREAD)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def through_gateway(
    gateway: Gateway, arguments: argparse.Namespace
) -> tuple[float, float, list[Session]]:
    """Returns seconds, seconds of the gateway's thread, and the sessions."""
    sessions = [gateway.session() for _ in range(arguments.sessions)]
    load = {
        "urls": [f"{session.base_url}/chat/completions" for session in sessions],
        "turns": arguments.turns,
        "new_tokens": arguments.new_tokens,
        "text": "x" * USER_CHARACTERS,
    }
    before = thread_seconds()
    run = subprocess.run(
        [sys.executable, __file__, AGENTS],
        input=json.dumps(load),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(run.stdout), thread_seconds() - before, sessions


async def engine_alone(engine: AsyncSGLang, sessions: list[Session]) -> float:
    """Returns the seconds that the same turns take without the gateway."""

    async def talk(session: Session) -> None:
        for turn in session.turns:
            length = len(turn.completion.token_ids)
            request = GenerateRequest(
                input_ids=turn.prompt.token_ids,
                sampling_params=exact_length(length),
                return_logprobs=True,
            )
            await engine.agenerate_requests([request], timeout=600)

    start = time.perf_counter()
    await asyncio.gather(*(talk(session) for session in sessions))
    return time.perf_counter() - start


def rendering_seconds(tokenizer: Any, sessions: list[Session]) -> float:
    """Returns the seconds of rendering and tokenizing each turn's new text once."""
    template = ChatTemplate(tokenizer)
    seconds = 0.0
    for session in sessions:
        for turn in session.turns:
            known = 0
            if turn.prompt.parent is not None:
                known = len(session.turns[turn.prompt.parent].token_ids)
            text = template.decode(turn.prompt.token_ids[known:])
            start = time.thread_time()
            template.render(turn.prompt.messages, turn.prompt.setting)
            template.encode(text)
            seconds += time.thread_time() - start
    return seconds


@contextlib.contextmanager
def make_engine(arguments: argparse.Namespace) -> Iterator[AsyncSGLang]:
    """Yields the engine that is measured."""
    if arguments.url:
        with AsyncSGLang.connect(arguments.url) as engine:
            yield engine
    elif arguments.model == "instant":
        yield InstantEngine(arguments.new_tokens)
    else:
        with start_engine(arguments.model, device=arguments.device) as engine:
            yield engine


def main() -> None:
    arguments = read_options(
        __doc__,
        model="instant",
        url=str,
        device="cpu|cuda",
        sessions=256,
        turns=4,
        new_tokens=128,
        repeats=3,
    )
    ratios = []
    with make_engine(arguments) as engine, Gateway(engine) as gateway:
        tokenizer = engine.get_tokenizer()
        print("turns/s   of the engine's   ms a turn: processor   of which rendering")
        for _ in range(arguments.repeats + 1):
            seconds, processor, sessions = through_gateway(gateway, arguments)
            turns = sum(len(session.turns) for session in sessions)
            alone = asyncio.run(engine_alone(engine, sessions))
            rendering = rendering_seconds(tokenizer, sessions)
            ratios.append(alone / seconds)
            print(
                f"{turns / seconds:7.1f} {ratios[-1]:17.3f} "
                f"{1e3 * processor / turns:22.3f} {1e3 * rendering / turns:20.3f}"
            )
            for session in sessions:
                gateway.drop(session)
    if arguments.url or arguments.model != "instant":
        # The first run warms up.
        print(f"median of the engine's: {statistics.median(ratios[1:]):.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == [AGENTS]:
        print(asyncio.run(talk_all(json.load(sys.stdin))))
    else:
        main()
