"""What an engine costs its own process, against the number of its servers.

One engine, connected to 1 to 1,024 simulated servers, which are coroutines of other
processes (``fleet_servers.py``). All that is measured is the package's own: the time of
a call, the processor time of this process, the HTTP requests, and the most connections
that the servers had at once.

    python benchmarks/fleet_scale.py [--servers 1 16 1024]
        [--only control generate abort update]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import pickle
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from fleet_servers import address
from script import memory, read_options
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.models import save_model
from torchrl_sglang.cli.bench.timing import Clock
from torchrl_sglang.support.event_loop import run_async, run_sync

SERVERS = (1, 4, 16, 64, 256, 1024)
PER_PROCESS = 512
"""Most servers of one process."""

PROMPT_TOKENS = 64
NEW_TOKENS = 64
REQUESTS = 4096
CONCURRENT = 512
REPEATS = 5
CANCELLED = 32
"""Requests that are cancelled in the middle."""

MEASUREMENTS = ("control", "generate", "abort", "update")


def main() -> None:
    arguments = read_options(
        __doc__,
        servers=SERVERS,
        requests=REQUESTS,
        only=MEASUREMENTS,
        measure=str,  # Of the process that measures: where servers are.
    )
    if arguments.measure:
        print(json.dumps(Measuring(arguments, **json.loads(arguments.measure)).run()))
        return
    for count in arguments.servers:
        with simulated(count) as place:
            results = in_own_process(place)
        print(f"\n{count} servers")
        for name, figures in results.items():
            shown = "  ".join(f"{key} {value:.6g}" for key, value in figures.items())
            print(f"  {name:<24} {shown}", flush=True)


@contextlib.contextmanager
def simulated(count: int) -> Iterator[dict[str, Any]]:
    """Starts simulated servers; yields where they and their figures are."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_model("tiny", folder)
        port, admins = free_port(), []
        for first in range(0, count, PER_PROCESS):
            last = min(first + PER_PROCESS, count)
            admins.append(free_port())
            program = Path(__file__).with_name("fleet_servers.py")
            command = [program, folder, first, last, port, admins[-1]]
            process = subprocess.Popen(
                [sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield {"folder": folder, "count": count, "port": port, "admins": admins}


def in_own_process(place: dict[str, Any]) -> dict[str, Any]:
    """Measures in a process of its own, so that memory and files are those of one N."""
    run = subprocess.run(
        [sys.executable, *sys.argv, "--measure", json.dumps(place)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


class Measuring:
    """The measurements for one number of servers."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        folder: str,
        count: int,
        port: int,
        admins: list[int],
    ) -> None:
        self._folder = folder
        self._admins = admins
        self._requests = arguments.requests
        self._only = arguments.only
        self._urls = [f"http://{address(index)}:{port}" for index in range(count)]
        self._results: dict[str, dict[str, float]] = {}
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))

    def run(self) -> dict[str, dict[str, float]]:
        """Returns name -> figures."""
        # What the first use of transformers costs has nothing to do with servers.
        AsyncSGLang.connect(self._urls[0]).shutdown()
        gc.collect()
        before = memory()
        with self._measured("connect"):
            engine = AsyncSGLang.connect(urls=self._urls)
        gc.collect()
        self._results["connect"]["megabytes"] = memory() - before
        copied = len(pickle.dumps(engine))
        self._results["a pickled copy"] = {"kilobytes": copied / 1e3}
        for name in self._only:
            print(name, file=sys.stderr, flush=True)
            getattr(self, f"_{name}")(engine)
        engine.shutdown()
        return self._results

    def _figures(self) -> tuple[int, int]:
        """Returns the requests since the last call and the most open connections."""
        requests = most = 0
        for admin in self._admins:
            url = f"http://127.0.0.1:{admin}/figures"
            with urllib.request.urlopen(url) as answer:
                content = json.load(answer)
            requests += sum(content["requests"].values())
            most += content["open"]
        return requests, most

    @contextlib.contextmanager
    def _measured(self, name: str, divisor: int = 1) -> Iterator[dict[str, float]]:
        """Measures a block."""
        self._figures()
        clock = Clock()
        results: dict[str, float] = {}
        yield results
        cost = clock.stop(divisor)
        requests, most = self._figures()
        results["ms"] = 1e3 * cost.seconds / divisor
        results["processor ms"] = 1e3 * cost.processor_seconds / divisor
        results["requests"] = requests / divisor
        results["connections"] = most
        self._results[name] = results

    def _repeated(self, name: str, call: Callable[[], object]) -> None:
        """Measures a call several times, and keeps the median of each figure."""
        rounds = []
        for _ in range(REPEATS):
            with self._measured(name) as results:
                call()
            rounds.append(results)
        self._results[name] = {
            key: statistics.median(each[key] for each in rounds) for key in rounds[0]
        }

    def _control(self, engine: Any) -> None:
        control = engine.control
        for name, call in {
            "pause": lambda: run_sync(control.pause("retract")),
            "flush": engine.flush_cache,
            "resume": lambda: run_sync(control.resume()),
            "stats": engine.stats,
        }.items():
            self._repeated(name, call)

    def _generate(self, engine: Any) -> None:
        prompts = [
            [5 + index % 50, *range(5, 4 + PROMPT_TOKENS)]
            for index in range(self._requests)
        ]
        generate(engine, prompts[:CONCURRENT])
        with self._measured("generate", len(prompts)):
            generate(engine, prompts)

    def _update(self, engine: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(self._folder)
        with tempfile.TemporaryDirectory() as folder:
            scheme = SGLangWeightSyncScheme(engine, transport="disk", directory=folder)
            sender = scheme.create_sender()
            sender.register_model(model)
            sender.update_weights()
            self._repeated("weight update", sender.update_weights)
            for phase, seconds in sender.last_report.phase_seconds.items():
                self._results["weight update"][f"{phase} ms"] = 1e3 * seconds
            sender.shutdown()

    def _abort(self, engine: Any) -> None:
        """Cancels callers, as a collector does that has enough responses."""
        seconds: list[float] = []

        async def any_aborts() -> bool:
            # Requests that were cancelled before this call begin their aborts first.
            await asyncio.sleep(0.05)
            return bool(engine._dispatcher.in_flight._aborting)

        async def work() -> None:
            tasks = [
                asyncio.ensure_future(
                    engine.agenerate(
                        input_ids=[list(range(5, 5 + PROMPT_TOKENS))],
                        sampling_params={"max_new_tokens": 1500},
                    )
                )
                for _ in range(CANCELLED)
            ]
            await asyncio.sleep(2)
            start = time.perf_counter()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while await run_async(any_aborts()):
                pass
            seconds.append(time.perf_counter() - start)

        with self._measured(f"{CANCELLED} cancelled") as results:
            asyncio.run(work())
        results["ms"] = 1e3 * seconds[0]


def generate(engine: Any, prompts: list[list[int]]) -> None:
    """Generates for each prompt in a call of its own, some at a time."""
    turns = asyncio.Semaphore(CONCURRENT)

    async def one(prompt: list[int]) -> None:
        async with turns:
            await engine.agenerate(
                input_ids=[prompt],
                sampling_params={"max_new_tokens": NEW_TOKENS},
                return_logprobs=True,
            )

    async def work() -> None:
        await asyncio.gather(*map(one, prompts))

    asyncio.run(work())


def free_port() -> int:
    """Returns a port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
