"""Decides when a failed request is sent again. Pure.

Only broken connections and answers 5xx are retried: a 4xx is the request's own fault, a
timeout is the caller's limit, and an abort was intended.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from torchrl_sglang.errors import ServerUnavailableError

__all__ = ["RetryPolicy", "seconds_left"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Number of attempts and the delays between them."""

    attempts: int = 5
    """Most attempts of a request."""
    first_delay: float = 0.1
    """Longest delay before the second attempt, in seconds; doubles for each further."""
    longest_delay: float = 5.0
    """Longest delay before any attempt, in seconds."""

    def delay(self, error: BaseException, attempt: int) -> float | None:
        """Returns the delay after the ``attempt``-th attempt; ``None`` for no retry.

        It is random, so that requests which failed together do not return together.
        """
        if attempt >= self.attempts:
            return None
        if not (isinstance(error, ServerUnavailableError) and error.transient):
            return None
        limit = min(self.first_delay * 2.0 ** (attempt - 1), self.longest_delay)
        return random.uniform(limit / 2, limit)


def seconds_left(deadline: float) -> float:
    """Returns the timeout of a call that ends at ``deadline``; never 0."""
    return max(deadline - time.monotonic(), 1e-3)
