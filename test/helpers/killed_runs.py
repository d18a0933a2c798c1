"""A training program that is killed at arbitrary times and started again.

What it learns is the list of prompts that it was trained on. Run with the address of a
server, a folder for checkpoints and that of the served model; writes that list for each
kind of run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import AutoTokenizer

from helpers.collecting import tasks
from torchrl_sglang import AsyncLLMCollector, AsyncSGLang, SGLangWrapper

EPOCHS = 2
PROMPTS = 8
SIZE = 2
GROUP_SIZE = 2
KILLS = 2
"""Most times that a run is killed."""

LIMIT_SECONDS = 60.0
"""Longest time until a run has made the progress after which it is killed."""


TOKENIZERS: list[Any] = []
"""Loaded before a run is forked, because importing it takes the longest."""


def dataset() -> Any:
    return {"prompts": tasks(PROMPTS), "shuffle": True, "seed": 3}


def loader() -> Any:
    generator = torch.Generator().manual_seed(3)
    given = DataLoader(tasks(PROMPTS), batch_size=5, shuffle=True, generator=generator)
    return {"prompts": given}


def iterator() -> Any:
    return {"prompts": iter(tasks(PROMPTS) * EPOCHS)}


def make_collector(url: str, **kwargs: Any) -> AsyncLLMCollector:
    policy = SGLangWrapper(
        AsyncSGLang.connect(url),
        tokenizer=TOKENIZERS[0],
        generate_kwargs={"max_new_tokens": 4},
    )
    return AsyncLLMCollector(
        policy=policy,
        group_size=GROUP_SIZE,
        groups_per_batch=SIZE,
        on_stale="retry",
        total_groups=EPOCHS * PROMPTS,
        **kwargs,
    )


class Checkpoint:
    """What a run has learned, in one file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"trained": []}
        loaded: dict[str, Any] = torch.load(self._path, weights_only=False)
        return loaded

    def save(self, **state: Any) -> None:
        new = self._path.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._path)


def train(url: str, checkpoint: Checkpoint, prompts: Callable[[], Any]) -> None:
    """Iterates over the collector."""
    state = checkpoint.load()
    trained = state["trained"]
    collector = make_collector(url, max_staleness=2, **prompts())
    if "collector" in state:
        collector.load_state_dict(state["collector"])
    for batch in collector:
        trained += [int(answer) for answer in batch["answer"]]
        checkpoint.save(trained=trained, collector=collector.state_dict())


def train_in_background(
    url: str, checkpoint: Checkpoint, prompts: Callable[[], Any]
) -> None:
    """Reads what the collector writes to a buffer meanwhile."""
    state = checkpoint.load()
    trained = state["trained"]
    buffer = ReplayBuffer(storage=LazyStackStorage(10 * PROMPTS), batch_size=1)
    # It runs ahead as far as it can, because no weights are sent.
    collector = make_collector(
        url, max_staleness=EPOCHS * PROMPTS, replay_buffer=buffer, **prompts()
    )
    if "collector" in state:
        collector.load_state_dict(state["collector"])
        buffer.extend(state["rows"])
    collector.start()
    rows = SIZE * GROUP_SIZE
    while len(trained) < EPOCHS * PROMPTS * GROUP_SIZE:
        while len(buffer) < len(trained) + rows:
            time.sleep(0.001)
        batch = buffer[len(trained) : len(trained) + rows]
        trained += [int(row["answer"]) for row in batch.unbind(0)]
        with collector.pause():
            checkpoint.save(
                trained=trained,
                collector=collector.state_dict(),
                # TensorDict has no state dict of conversations.
                rows=buffer[:],
            )


def run_and_kill(run: Callable[[], None], checkpoint: Checkpoint, seed: int) -> int:
    """Forks runs until one comes to its end; returns how many were killed."""
    rng = random.Random(seed)
    kills = 0
    while True:
        child = os.fork()
        if not child:
            run()
            os._exit(0)
        steps = rng.randint(1, 2) if kills < KILLS else EPOCHS * PROMPTS
        ended = wait_for_progress(child, checkpoint, steps)
        if ended is not None:
            assert ended == 0, ended
            return kills
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1


def wait_for_progress(child: int, checkpoint: Checkpoint, steps: int) -> int | None:
    """Waits for steps of training; returns the child's status if it ended before."""
    begun = len(checkpoint.load()["trained"])
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(checkpoint.load()["trained"]) < begun + steps * SIZE * GROUP_SIZE:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return None


RUNS: dict[str, tuple[Callable[..., None], Callable[[], Any]]] = {
    "dataset": (train, dataset),
    "iterator": (train, iterator),
    "loader": (train_in_background, loader),
}


def main(url: str, folder: str, model: str) -> None:
    TOKENIZERS.append(AutoTokenizer.from_pretrained(model))
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    found = {}
    for seed, (name, (run, prompts)) in enumerate(RUNS.items()):
        checkpoint = Checkpoint(Path(folder) / name)
        kills = run_and_kill(partial(run, url, checkpoint, prompts), checkpoint, seed)
        found[name] = {"kills": kills, "trained": checkpoint.load()["trained"]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
