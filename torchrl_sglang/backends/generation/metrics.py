"""Counters of one engine's requests and tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.types import Completion

__all__ = ["Counters"]

RATE_SECONDS = 10.0
"""Window of the reported token rate."""


@dataclass(kw_only=True)
class Counters:
    """Running totals of one engine object."""

    in_flight: int = 0
    """Requests that were sent and are not answered."""
    completed: int = 0
    """Finished responses."""
    retries: int = 0
    """Requests that were sent again."""
    prompt_tokens: int = 0
    """Prompt tokens of finished responses."""
    cached_tokens: int = 0
    """How many of them came from the prefix cache."""
    response_tokens: int = 0
    """Tokens of finished responses."""
    _recent: deque[tuple[float, int]] = field(default_factory=deque, repr=False)

    def count(self, completion: Completion, prompt_tokens: int) -> None:
        """Counts a completion."""
        self._count(prompt_tokens, completion.cached_tokens, len(completion.token_ids))

    def count_usage(self, usage: Mapping[str, Any]) -> None:
        """Counts a response of OpenAI's protocol."""
        details = usage.get("prompt_tokens_details") or {}
        self._count(
            int(usage.get("prompt_tokens") or 0),
            int(details.get("cached_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )

    def _count(self, prompt: int, cached: int, response: int) -> None:
        self.completed += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.response_tokens += response
        now = time.monotonic()
        self._recent.append((now, response))
        self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second over the last ten seconds."""
        self._drop_old(time.monotonic())
        return sum(count for _, count in self._recent) / RATE_SECONDS

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
