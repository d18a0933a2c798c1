"""Python time of AsyncLLMCollector for a turn, with an engine that responds at once.

Everything between a task and a batch in TorchRL's layout: templates, tokenization,
event loop, rewards, containers. ``functions`` are plain functions, ``environments`` a
``ChatEnv`` with a reward; ``recorded`` are functions with a ``RunRecorder``, whose
thread is counted, too; ``LLMCollector`` is TorchRL's, with the same environment.
Full garbage collections visit every object of the process: they are shown as they are,
and after ``gc.freeze()``, which exempts the objects of the program's start.

    python benchmarks/collector_overhead.py [--groups 32] [--repeats 9]
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm import ChatEnv

from script import print_row, read_options
from torchrl_sglang import AsyncLLMCollector, RunRecorder, SGLangWrapper
from torchrl_sglang.cli.bench.measure import GROUP_SIZE, Clock, make_env, reward
from wrapper_overhead import PROMPT_CHARACTERS, InstantEngine

RESPONSE_TOKENS = 256
KINDS = ("functions", "recorded", "environments", "LLMCollector")


async def step(conversation: Any, task: Any) -> str | None:
    return "Go on." if len(conversation.turns) < task["turns"] else None


class Garbage:
    """Counts the time of garbage collections, and the full ones."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.full = 0
        self._start = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Is called by the interpreter."""
        if phase == "start":
            self._start = time.thread_time()
            return
        self.seconds += time.thread_time() - self._start
        self.full += info["generation"] == 2


def measure(batches: Iterator[Any], repeats: int) -> tuple[float, ...]:
    """Returns milliseconds of processor time for each turn, and full collections.

    These are the median and the mean of all batches, the mean of garbage collections,
    and the number of full ones in a thousand turns.
    """
    next(batches)
    garbage, turns, times = Garbage(), 0, []
    gc.callbacks.append(garbage)
    for _ in range(repeats):
        clock = Clock()
        cost = clock.stop(next(batches).numel())
        times.append(1e3 * cost.processor_seconds / cost.requests)
        turns += cost.requests
    gc.callbacks.remove(garbage)
    collected = (1e3 * garbage.seconds / turns, 1e3 * garbage.full / turns)
    return statistics.median(times), statistics.mean(times), *collected


def make_collector(kind: str, policy: SGLangWrapper, turns: int, groups: int) -> Any:
    tokenizer, size = policy.tokenizer, groups * GROUP_SIZE
    queries = ["x" * (PROMPT_CHARACTERS - number % 32) for number in range(groups)]
    common = {
        "policy": policy,
        "prompts": [{"query": query, "turns": turns} for query in queries],
        "group_size": GROUP_SIZE,
        "groups_per_batch": groups,
        "max_staleness": 0,
    }
    if kind == "recorded":
        recorder = RunRecorder(tempfile.mkdtemp(prefix="recorded-"))
        return AsyncLLMCollector(rewards=reward, step=step, recorder=recorder, **common)
    if kind == "functions":
        return AsyncLLMCollector(rewards=reward, step=step, **common)
    if kind == "environments":
        return AsyncLLMCollector(lambda: make_env(tokenizer, turns), **common)
    env = ChatEnv.from_dataloader(
        [{"query": queries}],
        tokenizer=tokenizer,
        batch_size=(size,),
        repeats=GROUP_SIZE,
    )
    return LLMCollector(
        make_env(turns=turns, env=env),
        policy=policy,
        dialog_turns_per_batch=size * turns,
        yield_completed_trajectories=True,
    )


def main() -> None:
    arguments = read_options(__doc__, groups=32, repeats=9)
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    policy = SGLangWrapper(InstantEngine(RESPONSE_TOKENS))
    print("milliseconds of processor time for each turn")
    names = ("turns", "gc", "median", "mean", "of it gc", "full/1000")
    print_row("collector", *names)
    for kind in KINDS:
        for turns, frozen in ((1, False), (1, True), (3, False)):
            if frozen:
                gc.collect()
                gc.freeze()
            collector = make_collector(kind, policy, turns, arguments.groups)
            row = measure(iter(collector), arguments.repeats)
            collector.shutdown()
            gc.unfreeze()
            print_row(kind, turns, "frozen" if frozen else "usual", *row)


if __name__ == "__main__":
    main()
