"""Tasks, rewards and waits for tests of collectors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

OWN_THREADS = (
    "torchrl_sglang-collector",
    "torchrl_sglang-functions",
    "torchrl_sglang-layout",
    "torchrl_sglang-prompts",
    "torchrl_sglang-writer",
)


def length_reward(conversation: Any, task: Any) -> float:
    return float(len(conversation.response))


def tasks(count: int) -> list[dict[str, str]]:
    return [{"query": f"question {n}", "answer": str(n)} for n in range(count)]


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in OWN_THREADS]


def wait_until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
