"""Costs of work: time, processor time, and medians of several rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of a client, and its time."""

    requests: int
    """Responses."""
    seconds: float
    """Duration."""
    processor_seconds: float
    """Processor time of this process."""
    tokens: int = 0
    """Received tokens."""
    updates: int = 0
    """Weight updates during the work."""
    stale: float = 0.0
    """Share of masked tokens, which are older than the bound."""


class Clock:
    """Measures time and processor time."""

    def __init__(self) -> None:
        self._start, self._spent = time.perf_counter(), time.process_time()

    def stop(self, requests: int, tokens: int = 0) -> Cost:
        """Returns both since the start, for this number of responses."""
        return Cost(
            requests=requests,
            seconds=time.perf_counter() - self._start,
            processor_seconds=time.process_time() - self._spent,
            tokens=tokens,
        )


def speed(costs: Sequence[Cost]) -> float:
    """Returns tokens per second, the median of all rounds."""
    return statistics.median(cost.tokens / cost.seconds for cost in costs)


def summarize(costs: Mapping[str, Sequence[Cost]]) -> dict[str, dict[str, float]]:
    """Returns medians of all rounds, and ratios to the best raw client."""
    best = max(speed(rounds) for n, rounds in costs.items() if n.startswith("raw"))
    return {
        name: {
            "tokens_per_second": speed(r),
            "ratio": speed(r) / best,
            "processor_ms": 1e3
            * statistics.median(cost.processor_seconds / cost.requests for cost in r),
        }
        for name, r in costs.items()
    }


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Returns the median duration of some calls, after a warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        clock = Clock()
        function()
        seconds.append(clock.stop(1).seconds)
    return statistics.median(seconds[1:])


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]
