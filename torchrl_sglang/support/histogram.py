"""Counts values between bounds, at the cost of a search in a few numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torchrl_sglang.types import Distribution

SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0),
)
"""Bounds of durations, from a cached prompt to an agent's afternoon."""

TOKENS = tuple(float(2**power) for power in range(4, 18))
"""Bounds of the length of a response, 16 to 131,072 tokens."""


class Histogram:
    """A count of values between bounds. Written by a single thread at a time.

    Examples:
        >>> histogram = Histogram([1.0, 2.0])
        >>> for value in (0.5, 2.0, 7.0):
        ...     histogram.add(value)
        >>> histogram.read().counts, histogram.read().total
        ((1, 1, 1), 9.5)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Distribution:
        """Returns the counts so far."""
        return Distribution(
            bounds=self._bounds, counts=tuple(self._counts), total=self._total
        )
