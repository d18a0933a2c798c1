"""When a failed request is sent again: pure.

A request is sent again where the connection broke or the server answered 5xx, and
nowhere else: a 4xx is the request's own fault, a used-up budget is the caller's word,
and an abort was somebody's will.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torchrl_sglang.errors import ServerUnavailableError

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often and how soon a request is sent again."""

    attempts: int = 5
    """How often a request is sent at the most."""
    first_delay: float = 0.1
    """Longest wait before the second attempt, in seconds; each further one doubles."""
    longest_delay: float = 5.0
    """Longest wait before any attempt, in seconds."""

    def delay(self, error: BaseException, attempt: int) -> float | None:
        """Returns how long to wait before the next attempt, or None for no other.

        The wait is random up to its limit, so that requests which failed together do
        not come back together.

        Args:
            error: why the attempt failed.
            attempt: which one it was, from 1.
        """
        if attempt >= self.attempts:
            return None
        if not (isinstance(error, ServerUnavailableError) and error.transient):
            return None
        limit = min(self.first_delay * 2.0 ** (attempt - 1), self.longest_delay)
        return random.uniform(limit / 2, limit)
