"""Tasks, rewards and waits for tests of collectors."""

from __future__ import annotations

import threading
from typing import Any

from torchrl_sglang import AsyncLLMCollector

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


def begin(collector: AsyncLLMCollector) -> None:
    """Begins to collect, as the first batch does that is asked for."""
    collector._collection.start()
