"""Totals of a sender's weight updates, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torchrl_sglang.support.histogram import SECONDS, Histogram
from torchrl_sglang.types import SyncReport, UpdateStats


class UpdateTotals:
    """Counts updates, one at a time."""

    def __init__(self) -> None:
        self._updates: Counter[str] = Counter()
        self._phases: dict[str, float] = {}
        self._failures = self._num_bytes = 0
        self._seconds = Histogram(SECONDS)
        self._last: SyncReport | None = None

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Counts the block as an update that failed if it raises an error."""
        try:
            yield
        except Exception:
            self._failures += 1
            raise

    def add(self, report: SyncReport) -> None:
        """Counts an update that succeeded."""
        self._updates[report.transport] += 1
        for phase, seconds in report.phase_seconds.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        self._num_bytes += report.num_bytes
        self._seconds.add(report.seconds)
        self._last = report

    def read(self) -> UpdateStats:
        """Returns the totals so far."""
        return UpdateStats(
            updates=dict(self._updates),
            failures=self._failures,
            num_bytes=self._num_bytes,
            seconds=self._seconds.read(),
            phase_seconds=dict(self._phases),
            last=self._last,
        )
