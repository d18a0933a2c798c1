"""Lanes of a timeline: states of servers and trainer over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from torchrl_sglang.viewer.run import Bar, RunData

MOST_BARS = 1_500
"""Most bars of a lane; shorter bars are merged."""

GAP = 5.0
"""Number of intervals of validity of a server's sample without a successor."""

SAME = 1e-6
"""Gap in seconds up to which bars are consecutive."""

PAUSING = ("pause", "flush", "resume")
"""Phases of a weight update in which servers wait; in the others they load."""

STATES = (
    "generating",
    "idle",
    "paused",
    "updating",
    "sleeping",
    "down",
    "waiting",
    "training",
    "sending",
    "evaluating",
    "saving",
    "other",
)
"""States of lanes, in the order of the legend."""

OF_PHASE = {
    "wait": "waiting",
    "train": "training",
    "sleep": "sleeping",
    "evaluate": "evaluating",
    "save": "saving",
}
"""Phase of the trainer -> state."""

TRAINER = "trainer"


def lanes(run: RunData) -> dict[str, list[Bar]]:
    """Returns the bars of each lane: servers first, then the trainer."""
    updates = update_spans(run)
    lanes_by_name: dict[str, list[Bar]] = {}
    for name, bars in server_spans(run).items():
        lanes_by_name[name] = thin(override(bars, updates))
    sends = [
        Bar(
            name="sending",
            began=event["time"] - event.get("seconds", 0.0),
            ended=event["time"],
            about=about_update(event),
        )
        for event in run.updates
    ]
    trainer = [
        Bar(
            name=OF_PHASE.get(phase.name, "other"),
            began=phase.began,
            ended=phase.ended,
            about="" if phase.name in OF_PHASE else phase.name,
        )
        for phase in run.phases
    ]
    if trainer or sends:
        trainer.sort(key=lambda bar: bar.began)
        lanes_by_name[TRAINER] = thin(override(trainer, sends))
    return lanes_by_name


def about_update(event: Any) -> str:
    """Returns the description of a weight update."""
    parts = ", ".join(
        f"{name} {seconds:.3f} s" for name, seconds in event.get("phases", {}).items()
    )
    size = f"{event['bytes'] / 1e9:.3f} GB" if event.get("bytes") else ""
    words = [f"version {event.get('version')}", size, event.get("transport", ""), parts]
    return "; ".join(word for word in words if word)


def update_spans(run: RunData) -> list[Bar]:
    """Returns the states of servers during weight updates, by phase."""
    bars = []
    for event in run.updates:
        phases = event.get("phases") or {}
        start = event["time"] - event.get("seconds", 0.0)
        if not phases:
            phases = {"send": event.get("seconds", 0.0)}
        if event.get("transport") == "lora":
            # Loaded beside the served weights, while servers generate.
            continue
        for name, seconds in phases.items():
            state = "paused" if name in PAUSING else "updating"
            end = start + seconds
            about = f"{name} of version {event.get('version')}"
            bars.append(Bar(name=state, began=start, ended=end, about=about))
            start = end
    return bars


def server_spans(run: RunData) -> dict[str, list[Bar]]:
    """Returns the states of each server, from sample to sample.

    Equal consecutive samples form a single bar.
    """
    times = [event["time"] for event in run.engine]
    steps = sorted(later - earlier for earlier, later in pairwise(times))
    usual = steps[len(steps) // 2] if steps else 1.0
    bars: dict[str, list[Bar]] = defaultdict(list)
    for event, following in zip(run.engine, [*times[1:], run.ended], strict=False):
        start = event["time"]
        end = max(min(following, start + GAP * usual), start)
        for rank, server in enumerate(event["servers"]):
            state, about = state_of(server), about_server(server)
            bar = Bar(name=state, began=start, ended=end, about=about)
            bars[f"server {rank}"].append(bar)
    return {name: join(bars_of_server) for name, bars_of_server in bars.items()}


def state_of(server: Any) -> str:
    """Returns the state of a server in a sample."""
    state = str(server.get("state", ""))
    if state.startswith("asleep"):
        return "sleeping"
    if state != "serving":
        return "down"
    return "generating" if server.get("running") or server.get("queued") else "idle"


def about_server(server: Any) -> str:
    """Returns the description of a server."""
    state = str(server.get("state", ""))
    shown = "" if state == "serving" else f" ({state})"
    return f"{server['url']}{shown}"


def join(bars: Iterable[Bar]) -> list[Bar]:
    """Merges consecutive bars of the same state."""
    joined: list[Bar] = []
    for bar in bars:
        previous = joined[-1] if joined else None
        if (
            previous is not None
            and (previous.name, previous.about) == (bar.name, bar.about)
            and bar.began <= previous.ended + SAME
        ):
            joined[-1] = replace(previous, ended=max(previous.ended, bar.ended))
        else:
            joined.append(bar)
    return joined


def override(bars: Sequence[Bar], updates: Sequence[Bar]) -> list[Bar]:
    """Returns bars with updates in their place, if any.

    Both are in the order of time, without overlaps within a kind.
    """
    parts: list[Bar] = []
    updates = sorted(updates, key=lambda bar: bar.began)
    first = 0
    for bar in bars:
        start = bar.began
        while first < len(updates) and updates[first].ended <= start:
            first += 1
        place = first
        while place < len(updates) and (new := updates[place]).began < bar.ended:
            place += 1
            if new.began > start:
                parts.append(replace(bar, began=start, ended=new.began))
            start = max(start, new.ended)
        if start < bar.ended:
            parts.append(replace(bar, began=start))
    return sorted([*parts, *updates], key=lambda bar: bar.began)


def thin(bars: Sequence[Bar], most: int = MOST_BARS) -> list[Bar]:
    """Returns at most ``most`` bars: each time has its longest state."""
    if len(bars) <= most or not bars:
        return list(bars)
    start, end = bars[0].began, max(bar.ended for bar in bars)
    width = (end - start) / most or 1.0
    shares: list[dict[str, float]] = [{} for _ in range(most)]
    for bar in bars:
        place = min(int((bar.began - start) / width), most - 1)
        final = min(int((bar.ended - start) / width), most - 1)
        if place == final:
            share = shares[place]
            share[bar.name] = share.get(bar.name, 0.0) + bar.ended - bar.began
            continue
        for index in range(place, final + 1):
            low, high = start + index * width, start + (index + 1) * width
            seconds = min(bar.ended, high) - max(bar.began, low)
            shares[index][bar.name] = shares[index].get(bar.name, 0.0) + max(
                seconds, 0.0
            )
    return join(
        Bar(
            name=max(share, key=lambda name: share[name]),
            began=start + place * width,
            ended=start + (place + 1) * width,
        )
        for place, share in enumerate(shares)
        if share
    )


def in_flight(run: RunData, most: int = 600) -> list[tuple[float, int]]:
    """Returns times and the number of running groups.

    A long run is reduced to the maximum and the end of intervals.
    """
    total, by_time = 0, dict[float, int]()
    for time, change in sorted(run.running):
        total = max(total + change, 0)
        # Earlier changes at the same time have no duration.
        by_time[time] = total
    points = list(by_time.items())
    if len(points) <= most:
        return points
    count = most // 2
    size = len(points) / count
    parts = [points[int(n * size) : int((n + 1) * size)] for n in range(count)]
    chosen = {(max(part, key=lambda point: point[1]), part[-1]) for part in parts}
    return sorted({point for pair in chosen for point in pair})
