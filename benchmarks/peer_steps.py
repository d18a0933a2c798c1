"""What the sides of `peers.py` share, which imports nothing of theirs."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torchrl_sglang", "sglang", "trl", "vllm", "torch", "transformers", "peft")
LR = 1e-6


def queries(options: argparse.Namespace) -> list[str]:
    """Returns prompts of equal length, new ones for each step."""
    count = options.groups * (options.steps + 1)
    return [f"Tell me a story about the number {number:06}." for number in range(count)]


def reward_of(token_ids: Any) -> float:
    """Differs within groups, and leaves the lengths of responses as they are."""
    return sum(map(int, token_ids)) % 8 / 8


def adapter(rank: int) -> dict[str, Any] | None:
    """Returns arguments of PEFT's LoraConfig."""
    names = ("q", "k", "v", "o", "gate", "up", "down")
    modules = [f"{name}_proj" for name in names]
    arguments = {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    return arguments if rank else None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class DeviceMemory(threading.Thread):
    """Finds the most memory in use on the device, by all processes."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self._most = 0
        if device == "cuda":
            # Here an error names the package that this needs.
            torch.cuda.device_memory_used(0)
            self.start()

    def run(self) -> None:
        while True:
            self._most = max(self._most, torch.cuda.device_memory_used(0))
            time.sleep(0.02)

    def take(self) -> float:
        """Returns the most since the last call, in GiB."""
        most, self._most = self._most, 0
        return most / 2**30


class Steps:
    """Figures of each step, which a file has as soon as they are there."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: list[dict[str, float]] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.begun = 0.0
        self._memory = DeviceMemory(options.device)
        self._within: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the block as a part of the step, without the parts in it."""
        synchronize()
        begun = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            synchronize()
            spent = time.perf_counter() - begun
            self.seconds[name] += spent - self._within.pop()
            if self._within:
                self._within[-1] += spent

    def timed(self, owner: Any, name: str, part: str, *, training: bool = True) -> None:
        """Counts calls of a method as a part; those of training only if asked."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not training:
                return method(*args, **kwargs)
            with self.part(part):
                return method(*args, **kwargs)

        setattr(owner, name, call)

    def end(self, tokens: float, **more: float) -> None:
        """Ends a step; seconds of no part are those of training."""
        synchronize()
        step, parts = time.perf_counter() - self.begun, dict(self.seconds)
        self.seconds.clear()
        parts.setdefault("train", step - sum(parts.values()))
        speeds = {"step_speed": tokens / step, "speed": tokens / parts["generate"]}
        figures = {"step": step, "tokens": tokens, **parts, **speeds, **more}
        self.found.append({**figures, "memory": self._memory.take()})
        print({name: round(value, 4) for name, value in self.found[-1].items()})
        self.write()
        self.begun = time.perf_counter()

    def write(self) -> None:
        if not self.options.json:
            return
        versions = {}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        on_gpu = self.options.device == "cuda"
        versions["device"] = torch.cuda.get_device_name() if on_gpu else "CPU"
        found = {"options": vars(self.options), "versions": versions}
        text = json.dumps({**found, "steps": self.found}, indent=1)
        Path(self.options.json).write_text(text)
