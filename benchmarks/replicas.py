"""Replicas on a CPU: cache hits behind the router, and requests while servers die.

* ``cache``: prefix-cache hits of groups of samples through the router, over the ideal,
  in which each prompt is computed once, wherever its samples go: of ``G`` groups of
  ``S`` samples, all but the first of each group find their whole prompt cached.
* ``soak``: many requests through replicas that are killed again and again. Every one
  must get exactly one correct response, and afterwards nothing may be left: no process,
  no listening port, no socket. The client's memory is that of the first and of the last
  third of the run.

    python benchmarks/replicas.py cache [--groups 16] [--samples 8]
    python benchmarks/replicas.py soak [--requests 20000] [--kill-every 60]
    python benchmarks/replicas.py soak --requests 100000 --new-tokens 4 --kill-every 0
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from script import memory, read_options
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.ports import PORTS
from torchrl_sglang.backends.launch.watchdog import descendants
from torchrl_sglang.cli.bench.generation import exact_length
from torchrl_sglang.cli.bench.models import start_engine
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

BATCH = 200
"""Requests of one call: what is in flight at once."""

PROMPT_TOKENS = 12
LISTENS = "0A"
VOCABULARY = len(make_tiny_tokenizer())


def measure_cache(arguments: argparse.Namespace) -> None:
    """Prints the cache hits of groups."""
    groups, samples = arguments.groups, arguments.samples
    length, replicas = arguments.prompt_tokens, arguments.replicas
    # A server computes the last token of a prompt in any case.
    ideal = groups * (samples - 1) * (length - 1)
    ratios = []
    with start_engine("tiny", device="cpu", num_replicas=replicas) as engine:
        for _ in range(arguments.repeats):
            prompts = [random.choices(range(3, 99), k=length) for _ in range(groups)]
            batch = [prompt for prompt in prompts for _ in range(samples)]
            found = engine.generate(input_ids=batch, sampling_params=exact_length(16))
            # Each prompt is computed once before its samples, which is not their miss.
            hits = sum(completion.cached_tokens for completion in found)
            ratios.append((hits - groups * (length - 1)) / ideal)
    print(
        f"{groups} groups of {samples} samples, {length} prompt tokens, {replicas} "
        f"servers: {statistics.median(ratios):.3f} of the ideal hits (least "
        f"{min(ratios):.3f})"
    )


def measure_soak(arguments: argparse.Namespace) -> None:
    """Prints what happened to the requests; exits with 1 if anything was wrong."""
    # What this process has by itself: an event loop, and Python's own helper process.
    multiprocessing.Lock()
    run_sync(asyncio.sleep(0))
    before = look()
    options = {"num_replicas": arguments.replicas, "max_restarts": 1000}
    with start_engine("tiny", device="cpu", **options) as engine:
        report = soak(
            engine, arguments.requests, arguments.new_tokens, arguments.kill_every
        )
    after = look()
    report["left_over"] = {
        name: after[name] - before[name] for name in ("processes", "ports", "sockets")
    }
    for name, value in report.items():
        print(f"{name:>24}: {value}")
    wrong = report["wrong"] or report["errors"] or any(report["left_over"].values())
    sys.exit(bool(wrong))


def soak(
    engine: AsyncSGLang, requests: int, new_tokens: int, kill_every: float
) -> dict[str, object]:
    """Sends the requests, kills servers meanwhile, and returns what was seen."""
    prompts = make_prompts(requests)
    params = {**exact_length(new_tokens), "temperature": 0.0}
    # Greedy responses of an undisturbed engine: each prompt has one correct response.
    distinct = sorted(set(map(tuple, prompts)))
    answers = engine.generate(
        input_ids=[list(prompt) for prompt in distinct], sampling_params=params
    )
    right = {p: a.token_ids for p, a in zip(distinct, answers, strict=True)}
    done = threading.Event()
    kills: Counter[str] = Counter()
    killer = threading.Thread(target=kill, args=(engine, kill_every, done, kills))
    if kill_every:
        killer.start()
    start = time.monotonic()
    held = []
    count, wrong, errors = 0, 0, []
    for begin in range(0, requests, BATCH):
        batch = prompts[begin : begin + BATCH]
        try:
            found = engine.generate(input_ids=batch, sampling_params=params)
        except SGLangError as error:
            errors.append(f"{type(error).__name__}: {error}"[:500])
            continue
        count += len(found)
        wrong += sum(
            answer.token_ids != right[tuple(prompt)]
            for prompt, answer in zip(batch, found, strict=True)
        )
        held.append(memory())
    seconds = time.monotonic() - start
    done.set()
    if kill_every:
        killer.join()
    stats = engine.stats()
    third = max(len(held) // 3, 1)
    return {
        "requests": requests,
        "answered": count,
        "wrong": wrong,
        "errors": errors,
        "kills": dict(kills),
        "restarts": stats.restarts,
        "retries": stats.retries,
        "seconds": round(seconds, 1),
        "requests_per_second": round(count / seconds, 1),
        "client_megabytes": [round(min(held[:third])), round(min(held[-third:]))],
    }


def make_prompts(count: int) -> list[list[int]]:
    """Returns prompts of which a thousand are distinct."""
    random.seed(0)
    distinct = [
        [random.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for _ in range(1000)
    ]
    return [distinct[index % len(distinct)] for index in range(count)]


def kill(
    engine: AsyncSGLang, every: float, done: threading.Event, kills: Counter[str]
) -> None:
    """Kills a server that serves, every so many seconds."""
    while not done.wait(every):
        serving = [s.url for s in engine.stats().servers if s.state == "serving"]
        if len(serving) < 2:
            continue  # Nobody could take over its requests.
        victim = random.choice(engine.servers)
        if victim.url in serving:
            os.kill(victim.pid, signal.SIGKILL)
            kills[victim.url] += 1


def look() -> dict[str, int]:
    """Returns what this process has open, and what runs below it."""
    descriptors = Path("/proc/self/fd").iterdir()
    links = [os.readlink(each) for each in descriptors if each.is_symlink()]
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    ports = [int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS]
    return {
        "processes": len(descendants(os.getpid())),
        "ports": sum(port in PORTS for port in ports),
        "sockets": len({link for link in links if link.startswith("socket:")}),
    }


def main() -> None:
    arguments = read_options(
        __doc__,
        measurement="cache|soak",
        replicas=2,
        groups=16,
        samples=8,
        prompt_tokens=256,
        repeats=7,
        requests=20_000,
        kill_every=60.0,
        new_tokens=48,
    )
    {"cache": measure_cache, "soak": measure_soak}[arguments.measurement](arguments)


if __name__ == "__main__":
    main()
