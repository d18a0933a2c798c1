"""The gateway under hundreds of long sessions, such as those of coding agents.

Each session speaks Anthropic's dialect and begins with the same system prompt and tools
of 117 kB; each turn brings 1,500 characters more, and 300 tokens of the model, which an
engine returns after half to one and a half of ``--engine-seconds``, as responses of
different lengths do. The tokenizer is byte-level BPE, trained on Python's own library,
and the template is Qwen3's. As the reference recommends, ``gc.freeze()`` keeps what was
imported out of garbage collections.

*Latency* is what a client waits beyond the engine's time. All sessions begin at once:
the first turns are a row of their own. *Agents* is how late the agents' own process is
when it wakes from a sleep of 10 ms: waits for a processor, of which the gateway and the
engine have as many. *Thread* is the processor time of the gateway's
event loop for a turn, and *process* that of all its process, engine's part included.
Memory is that of the process, with what its imports need.

    python benchmarks/gateway_size.py
        [--sessions 200] [--turns 50] [--engine-seconds 2] [--kilobytes 117]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from script import memory, print_row, read_options
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.types import Completion
from wrapper_overhead import InstantEngine

AGENTS = "agents"
"""The argument of the process that the agents are in."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = Path(__file__).parents[1] / "test/llm/chat/templates/qwen3.jinja"
TOOLS, USER_CHARACTERS, RESPONSE_TOKENS = 24, 1_500, 300
THREAD = "torchrl_sglang-gateway"
WATCH_SECONDS = 0.01


def library() -> str:
    """Returns a megabyte of English and Python."""
    sources = [argparse, asyncio.base_events, inspect, logging, statistics, tempfile]
    sources += [subprocess, threading, json.decoder, json.encoder, asyncio.tasks]
    return "".join(inspect.getsource(each) for each in sources)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 16,000 tokens at most."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL,
    )
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


class SlowEngine(InstantEngine):
    """An engine whose responses take as long as they are said to."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seconds: float) -> None:
        super().__init__(RESPONSE_TOKENS)
        self.capabilities = replace(
            self.capabilities,
            vocab_size=len(tokenizer),
            max_context=1 << 20,
            max_prompt=(1 << 20) - 1,
        )
        self._seconds, self._next = seconds, 0
        self._random = np.random.default_rng(0)
        self._known = [_response(tokenizer, self._random) for _ in range(64)]
        self.spent: defaultdict[str, list[float]] = defaultdict(list)
        """Name of a session -> seconds that its turns took here."""

    async def agenerate_requests(self, requests: Any, **options: Any) -> Any:
        """Returns responses of random tokens."""
        (request,) = requests
        start = time.perf_counter()
        await asyncio.sleep(self._seconds * self._random.uniform(0.5, 1.5))
        self.spent[request.session_id].append(time.perf_counter() - start)
        self._next += 1
        ids, values = self._known[self._next % len(self._known)]
        # A server's response is decoded each time.
        ids, values = json.loads(json.dumps([ids, values]))
        done = Completion(token_ids=ids, log_probs=values, finish_reason="stop")
        return [done for _ in requests]


def _response(tokenizer: PreTrainedTokenizerFast, random: Any) -> Any:
    ids = random.integers(3, len(tokenizer), RESPONSE_TOKENS).tolist()
    # A character that is incomplete would be told as another one.
    text = tokenizer.decode(ids).encode("ascii", "ignore").decode()
    ids = tokenizer.encode(text)[: RESPONSE_TOKENS - 1]
    values = random.normal(size=len(ids) + 1).tolist()
    return [*ids, tokenizer.eos_token_id], values


def first_request(text: str, kilobytes: int) -> dict[str, Any]:
    """Returns the system prompt and the tools of an agent."""
    size = kilobytes * 1000 // (2 * TOOLS)
    tools = [
        {
            "name": f"tool_{number}",
            "description": text[number * size : (number + 1) * size],
            "input_schema": {
                "type": "object",
                "properties": {
                    f"field_{i}": {"type": "string", "description": "What it is."}
                    for i in range(8)
                },
            },
        }
        for number in range(TOOLS)
    ]
    left = kilobytes * 1000 - len(json.dumps(tools))
    return {"system": text[-left:], "tools": tools}


async def talk(
    client: aiohttp.ClientSession, load: dict[str, Any], number: int
) -> list[float]:
    """Holds one conversation, and returns the seconds that each turn took."""
    url, head = load["urls"][number], load["head"]
    texts: list[str] = []
    found = []
    for turn in range(load["turns"]):
        place = (number * 7_919 + turn * 104_729) % (
            len(load["text"]) - USER_CHARACTERS
        )
        said = f"{number}/{turn}: {load['text'][place : place + USER_CHARACTERS]}"
        texts.append(json.dumps({"role": "user", "content": said}))
        body = f'{head}, "messages": [{", ".join(texts)}]}}'.encode()
        start = time.perf_counter()
        async with client.post(url, data=body, headers=load["headers"]) as answer:
            answer.raise_for_status()
            content = await answer.read()
        found.append(time.perf_counter() - start)
        reply = {"role": "assistant", "content": json.loads(content)["content"]}
        texts.append(json.dumps(reply))
    return found


async def watch(late: list[float]) -> None:
    """Notes how late this process wakes, until it is cancelled."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(WATCH_SECONDS)
        late.append(time.perf_counter() - start - WATCH_SECONDS)


async def talk_all(load: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of all turns, and how late this process was."""
    late: list[float] = []
    watching = asyncio.create_task(watch(late))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        talks = (talk(client, load, number) for number in range(len(load["urls"])))
        turns = await asyncio.gather(*talks)
    watching.cancel()
    return {"turns": turns, "late": late}


def thread_seconds() -> float:
    """Returns the processor time of the gateway's thread."""
    (thread,) = (each for each in threading.enumerate() if each.name == THREAD)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def run(
    gateway: Gateway, engine: SlowEngine, text: str, arguments: argparse.Namespace
) -> None:
    """Measures all sessions, and prints the rows."""
    sessions = [gateway.session() for _ in range(arguments.sessions)]
    head = {
        "model": "policy",
        "max_tokens": RESPONSE_TOKENS,
        **first_request(text, arguments.kilobytes),
    }
    load = {
        "urls": [f"{session.url}/v1/messages" for session in sessions],
        "headers": {"content-type": "application/json"},
        "head": json.dumps(head)[:-1],
        "turns": arguments.turns,
        "text": text,
    }
    before, thread, process = memory(), thread_seconds(), time.process_time()
    agents = subprocess.run(
        [sys.executable, __file__, AGENTS],
        input=json.dumps(load),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(agents.stdout)
    spent = np.array([engine.spent[session.name] for session in sessions])
    latencies = 1e3 * (np.array(found["turns"]) - spent)
    late = 1e3 * np.array(found["late"])
    rows = {"first": latencies[:, 0], "later": latencies[:, 1:], "agents": late}
    print_row("ms", "p50", "p99", "most")
    for name, values in rows.items():
        if values.size:
            print_row(name, *(float(np.quantile(values, q)) for q in (0.5, 0.99, 1)))
    turns = sum(len(session.turns) for session in sessions)
    assert turns == latencies.size
    assert len(gateway.stats()["branches"]) == 1, gateway.stats()
    each = 1e3 / turns
    print_row("ms a turn", "thread", "process")
    used = thread_seconds() - thread, time.process_time() - process
    print_row("", *(each * seconds for seconds in used))
    print_row("MB", "before", "after", "a session")
    after = memory()
    print_row("", before, after, (after - before) / len(sessions))
    longest = max(session.turns[-1].num_tokens for session in sessions)
    print(f"{turns} turns, up to {longest} tokens")


def main() -> None:
    arguments = read_options(
        __doc__, sessions=200, turns=50, engine_seconds=2.0, kilobytes=117
    )
    text = library()
    tokenizer = make_tokenizer(text)
    engine = SlowEngine(tokenizer, arguments.engine_seconds)
    with engine, Gateway(engine, tokenizer=tokenizer) as gateway:
        gc.collect()
        gc.freeze()
        run(gateway, engine, text, arguments)


if __name__ == "__main__":
    if sys.argv[1:] == [AGENTS]:
        print(json.dumps(asyncio.run(talk_all(json.load(sys.stdin)))))
    else:
        main()
