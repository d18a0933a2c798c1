"""Statistics of a collector, and its bottleneck. Pure, apart from the clock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SMALL = 0.05
"""Share of the time below which a trainer's wait is not worth a word."""

LARGE = 0.2
"""Share of the time above which it is a loss that both sides wait for each other."""


@dataclass(kw_only=True)
class Meter:
    """A number that goes up and down, with its mean and the share of time at zero.

    Examples:
        >>> seconds = iter([0.0, 1.0, 3.0, 4.0])
        >>> meter = Meter(clock=lambda: next(seconds))
        >>> meter.add(2)
        >>> meter.add(-2)
        >>> meter.mean_and_idle()
        (1.0, 0.5)
    """

    clock: Callable[[], float] = time.monotonic
    value: int = 0
    _began: float = field(init=False)
    _last: float = field(init=False)
    _sum: float = 0.0
    _idle: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._began = self._last = self.clock()

    def restart(self) -> None:
        """Measures from now on."""
        self._began = self._last = self.clock()
        self._sum = self._idle = 0.0

    @property
    def seconds(self) -> float:
        """Time that is measured."""
        return self._last - self._began

    def add(self, change: int) -> None:
        """Changes the number."""
        with self._lock:
            self._advance()
            self.value += change

    def mean_and_idle(self) -> tuple[float, float]:
        """Returns the mean of the number over time, and the share of time at zero."""
        with self._lock:
            self._advance()
            total = self._last - self._began
            if total <= 0:
                return float(self.value), float(self.value == 0)
            return self._sum / total, self._idle / total

    def totals(self) -> tuple[float, float, float]:
        """Returns the time, the number summed over time, and the time at zero."""
        with self._lock:
            self._advance()
            return self._last, self._sum, self._idle

    def _advance(self) -> None:
        now = self.clock()
        passed = now - self._last
        self._sum += passed * self.value
        self._idle += passed if self.value == 0 else 0.0
        self._last = now


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Totals of a collection at some time; two of them give the rates between."""

    tokens: int
    """Response tokens of complete groups."""
    taken: int
    """Response tokens of groups that were taken for batches."""
    ages: int
    """Sum of their ages."""
    running: tuple[float, float, float]
    """Totals of the conversations that run."""
    generating: tuple[float, float, float]
    """Totals of the conversations that wait for the engine."""


def compare(before: Mark, after: Mark, trainer_waits: float) -> dict[str, float]:
    """Returns the rates between two marks, for a logger.

    Examples:
        >>> before = Mark(
        ...     tokens=0, taken=0, ages=0, running=(0.0, 0, 0), generating=(0.0, 0, 0)
        ... )
        >>> after = Mark(
        ...     tokens=80, taken=8, ages=4, running=(4.0, 8, 0), generating=(4.0, 4, 1)
        ... )
        >>> compare(before, after, 0.25)["tokens_per_second"]
        20.0
    """
    seconds = after.running[0] - before.running[0]
    span, tokens_taken = max(seconds, 1e-9), after.taken - before.taken
    running, generating = (
        [(new - old) / span for new, old in zip(*pair, strict=True)]
        for pair in (
            (after.running, before.running),
            (after.generating, before.generating),
        )
    )
    return {
        "seconds": seconds,
        "tokens_per_second": (after.tokens - before.tokens) / span,
        "trainer_waits": trainer_waits,
        "idle": running[2],
        "engine_idle": generating[2],
        "conversations": running[1],
        "conversations_in_flight": generating[1],
        "age": (after.ages - before.ages) / tokens_taken if tokens_taken else 0.0,
    }


def find_bottleneck(
    lately: Mapping[str, float], max_staleness: int, down: str = ""
) -> str:
    """Returns a sentence on the bottleneck of the run.

    A trainer that waits loses time that a faster engine would save, and an engine that
    idles loses what a faster trainer would. Where both lose much, neither would help,
    but to overlap them more.
    """
    waits, idle = lately["trainer_waits"], lately["idle"]
    if down and waits > SMALL:
        return f"Servers that do not serve bound the run: {down}"
    both = min(waits, idle)
    if waits > SMALL and both >= LARGE and both > max(waits, idle) / 2:
        return (
            f"The bound on staleness bounds the run: with max_staleness="
            f"{max_staleness} the engine idles while the trainer trains, and the "
            f"trainer waits while the engine generates."
        )
    if waits <= max(SMALL, idle):
        return "Training bounds the run: batches are complete before it asks for them."
    if lately["conversations_in_flight"] < lately["conversations"] / 2:
        return (
            "The environment bounds the run: most conversations wait for steps, tools "
            "or rewards."
        )
    return "Generation bounds the run: the trainer waits for the engine's responses."


def beyond_graphs(requests: float, graphs_up_to: int | None) -> str:
    """Returns a sentence on servers that compute without CUDA graphs, or nothing."""
    if graphs_up_to is None or requests <= graphs_up_to:
        return ""
    return (
        f" About {requests:.0f} requests run at once, and SGLang has CUDA graphs for "
        f"{graphs_up_to}; a server computes more of them without. Raise its "
        f"cuda_graph_max_bs_decode, or lower max_in_flight."
    )


@dataclass(kw_only=True)
class Ages:
    """Ages of the tokens that were taken, in weight updates."""

    in_flight: Counter[int] = field(default_factory=Counter)
    """Number of tokens by their age at the end of the group."""
    in_queue: Counter[int] = field(default_factory=Counter)
    """Age that was added until their group was taken -> number of tokens."""
    total: Counter[int] = field(default_factory=Counter)
    """Age when they were taken -> number of tokens."""

    def add(self, token_version: int, complete: int, taken: int, count: int) -> None:
        """Counts tokens of one version, in a group of which the other two are known."""
        self.in_flight[max(complete - token_version, 0)] += count
        self.in_queue[taken - complete] += count
        self.total[max(taken - token_version, 0)] += count
