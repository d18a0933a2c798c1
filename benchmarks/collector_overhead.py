"""Python time of AsyncLLMCollector for a turn, with an engine that responds at once.

Everything between a task and a batch in TorchRL's layout: templates, tokenization,
event loop, rewards, containers. ``functions`` are plain functions, ``environments`` a
``ChatEnv`` with a reward; ``LLMCollector`` is TorchRL's, with the same environment.
Full garbage collections visit every object of the process: they are shown as they are,
and after ``gc.freeze()``, which exempts the objects of the program's start.

    python benchmarks/collector_overhead.py [--groups 32] [--repeats 9]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from transformers import AutoTokenizer

from torchrl_sglang import AsyncLLMCollector, SGLangWrapper
from torchrl_sglang.testing.tiny_model import save_tiny_model
from wrapper_overhead import InstantEngine

GROUP_SIZE = 8
RESPONSE_TOKENS = 256
PROMPT_CHARACTERS = 96


class Reward(Transform):
    """Rewards every response alike."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        shape = (*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", torch.ones(shape))


async def reward(conversation: Any, task: Any) -> float:
    return 1.0


async def step(conversation: Any, task: Any) -> str | None:
    return "Go on." if len(conversation.turns) < task["turns"] else None


def add_transforms(env: Any, turns: int) -> Any:
    # The first call makes another environment of a bare one.
    return env.append_transform(StepCounter(max_steps=turns)).append_transform(Reward())


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
        start = time.process_time()
        size = next(batches).numel()
        times.append(1e3 * (time.process_time() - start) / size)
        turns += size
    gc.callbacks.remove(garbage)
    return (
        statistics.median(times),
        statistics.mean(times),
        1e3 * garbage.seconds / turns,
        1e3 * garbage.full / turns,
    )


def collectors(
    policy: SGLangWrapper, turns: int, groups: int
) -> dict[str, Callable[[], Any]]:
    """Returns a function that makes each kind of collector."""
    tokenizer = policy.tokenizer
    tasks = [
        {"query": "x" * (PROMPT_CHARACTERS - number % 32), "turns": turns}
        for number in range(groups)
    ]
    size = groups * GROUP_SIZE
    common = {
        "policy": policy,
        "prompts": tasks,
        "group_size": GROUP_SIZE,
        "groups_per_batch": groups,
        "max_staleness": 0,
    }

    def make_env() -> Any:
        return add_transforms(ChatEnv(batch_size=(1,), tokenizer=tokenizer), turns)

    def make_torchrl() -> Any:
        loader = [{"query": [task["query"] for task in tasks]}]
        env = ChatEnv.from_dataloader(
            loader, tokenizer=tokenizer, batch_size=(size,), repeats=GROUP_SIZE
        )
        return LLMCollector(
            add_transforms(env, turns),
            policy=policy,
            dialog_turns_per_batch=size * turns,
            yield_completed_trajectories=True,
        )

    return {
        "functions": lambda: AsyncLLMCollector(rewards=reward, step=step, **common),
        "environments": lambda: AsyncLLMCollector(make_env, **common),
        "LLMCollector": make_torchrl,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_model(folder))
        tokenizer = AutoTokenizer.from_pretrained(path)
    policy = SGLangWrapper(
        InstantEngine(path, tokenizer, RESPONSE_TOKENS), tokenizer=tokenizer
    )
    print("milliseconds of processor time for each turn")
    names = ("turns", "gc", "median", "mean", "of it gc", "full/1000")
    print(f"{'collector':14}", *(f"{name:>10}" for name in names))
    for kind in collectors(policy, 1, 1):
        for turns, frozen in ((1, False), (1, True), (3, False)):
            if frozen:
                gc.collect()
                gc.freeze()
            collector = collectors(policy, turns, arguments.groups)[kind]()
            row = measure(iter(collector), arguments.repeats)
            collector.shutdown()
            gc.unfreeze()
            about = f"{turns:>10} {'frozen' if frozen else 'usual':>10}"
            print(
                f"{kind:14} {about}", *(f"{value:10.3f}" for value in row), flush=True
            )


if __name__ == "__main__":
    main()
