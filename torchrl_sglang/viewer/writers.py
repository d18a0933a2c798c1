"""Several recorders of one folder: a run that went on, or several processes. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.recording.lines import number


class Writers:
    """Recorders of one folder: they number groups alike, and some were killed.

    Args:
        names: of those that wrote groups, in the order in which they began.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(names, 1)}
        self._spans: dict[str, tuple[float, float]] = {}
        self._running: Counter[str] = Counter()

    def name(self, writer: str, id_: int | str) -> str:
        """Returns what a group is called: ``"7"``, or ``"7.2"`` of another writer."""
        place = self._places.get(writer, 1)
        return str(id_) if place == 1 else f"{id_}.{place}"

    def see(self, writer: str, time: float, change: int = 0) -> None:
        """A writer wrote something, or more or fewer of its groups run."""
        first, last = self._spans.get(writer, (time, time))
        self._spans[writer] = (min(first, time), max(last, time))
        self._running[writer] += change

    def unfinished(self) -> list[tuple[float, int]]:
        """Returns the end of groups that ran when their writer ended before others."""
        newest = max((last for _, last in self._spans.values()), default=0.0)
        return [
            (math.nextafter(last, math.inf), -self._running[writer])
            for writer, (_, last) in self._spans.items()
            if last < newest and self._running[writer] > 0
        ]

    def resumed(self) -> float:
        """Returns when a writer last began after all others had ended."""
        found = ended = -math.inf
        for first, last in sorted(self._spans.values()):
            if -math.inf < ended < first:
                found = first
            ended = max(ended, last)
        return found


def in_order(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns events in the order of time.

    Those of a writer stay in their order, also where its clock was set back.
    """
    latest: dict[str, float] = {}
    times = []
    for event in events:
        writer = event["writer"]
        latest[writer] = max(latest.get(writer, 0.0), time_of(event))
        times.append(latest[writer])
    return [events[place] for place in sorted(range(len(times)), key=times.__getitem__)]


def time_of(event: Mapping[str, Any]) -> float:
    """Returns the time of an event, which is 0 if somebody has changed it."""
    return number(event.get("time")) or 0.0
