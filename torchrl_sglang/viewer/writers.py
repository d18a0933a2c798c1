"""Several recorders of a folder: a resumed run, or several processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.recording.lines import number


class Writers:
    """Recorders of a folder: they number groups alike, and some were killed.

    ``names`` are in the order of their starts.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(names, 1)}
        self._spans: dict[str, tuple[float, float]] = {}
        self._running: Counter[str] = Counter()

    def name(self, writer: str, id_: int | str) -> str:
        """Returns the name of a group: ``"7"``, or ``"7.2"`` of another writer."""
        place = self._places.get(writer, 1)
        return str(id_) if place == 1 else f"{id_}.{place}"

    def see(self, writer: str, time: float, change: int = 0) -> None:
        """Records activity of a writer, and changes its number of running groups."""
        first, latest = self._spans.get(writer, (time, time))
        self._spans[writer] = (min(first, time), max(latest, time))
        self._running[writer] += change

    def unfinished(self) -> list[tuple[float, int]]:
        """Returns the end of groups running when their writer ended before others."""
        newest = max((latest for _, latest in self._spans.values()), default=0.0)
        return [
            (math.nextafter(latest, math.inf), -self._running[writer])
            for writer, (_, latest) in self._spans.items()
            if latest < newest and self._running[writer] > 0
        ]

    def resumed(self) -> float:
        """Returns the latest start of a writer after the end of all others."""
        latest_start = latest_end = -math.inf
        for first, end in sorted(self._spans.values()):
            if -math.inf < latest_end < first:
                latest_start = first
            latest_end = max(latest_end, end)
        return latest_start


def in_order(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns events in the order of time.

    A writer's lines stay in their order, also where its clock was set back.
    """
    latest: dict[str, float] = {}
    times = []
    for event in events:
        writer = event["writer"]
        latest[writer] = max(latest.get(writer, 0.0), time_of(event))
        times.append(latest[writer])
    return [events[place] for place in sorted(range(len(times)), key=times.__getitem__)]


def time_of(event: Mapping[str, Any]) -> float:
    """Returns the time of an event, which is 0 if it is malformed."""
    return number(event.get("time")) or 0.0
