"""Lanes of a timeline: what servers and trainer did, and when. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torchrl_sglang.viewer.run import Bar, RunData

MOST_BARS = 1_500
"""Bars of a lane; more are put together."""

GAP = 5.0
"""An answer of a server holds for so many intervals, if no other follows."""

SAME = 1e-6
"""Bars that are not further apart, in seconds, follow each other."""

PAUSING = ("pause", "flush", "resume")
"""Phases of a weight update in which servers wait; they load in the others."""

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
"""What lanes show, in the order of the legend."""

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
    found: dict[str, list[Bar]] = {}
    for name, bars in server_spans(run).items():
        found[name] = thin(override(bars, updates))
    sent = [
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
    if trainer or sent:
        trainer.sort(key=lambda bar: bar.began)
        found[TRAINER] = thin(override(trainer, sent))
    return found


def about_update(event: Any) -> str:
    """Returns what a reader is told of a weight update."""
    parts = ", ".join(
        f"{name} {seconds:.3f} s" for name, seconds in event.get("phases", {}).items()
    )
    size = f"{event['bytes'] / 1e9:.3f} GB" if event.get("bytes") else ""
    words = [f"version {event.get('version')}", size, event.get("transport", ""), parts]
    return "; ".join(word for word in words if word)


def update_spans(run: RunData) -> list[Bar]:
    """Returns what each weight update did to servers, phase after phase."""
    found = []
    for event in run.updates:
        phases = event.get("phases") or {}
        began = event["time"] - event.get("seconds", 0.0)
        if not phases:
            phases = {"send": event.get("seconds", 0.0)}
        if event.get("transport") == "lora":
            # Beside the served weights, while servers generate.
            continue
        for name, seconds in phases.items():
            state = "paused" if name in PAUSING else "updating"
            ended = began + seconds
            about = f"{name} of version {event.get('version')}"
            found.append(Bar(name=state, began=began, ended=ended, about=about))
            began = ended
    return found


def server_spans(run: RunData) -> dict[str, list[Bar]]:
    """Returns what each server said that it does, until the next answer.

    Equal answers that follow each other are one bar.
    """
    times = [event["time"] for event in run.engine]
    steps = sorted(after - before for before, after in pairwise(times))
    usual = steps[len(steps) // 2] if steps else 1.0
    found: dict[str, list[Bar]] = defaultdict(list)
    # Of each server: state, words, beginning and end of the bar that goes on.
    last: dict[int, tuple[str, str, float, float]] = {}
    for event, following in zip(run.engine, [*times[1:], run.ended], strict=False):
        began = event["time"]
        ended = max(min(following, began + GAP * usual), began)
        for rank, server in enumerate(event["servers"]):
            state, about = state_of(server), about_server(server)
            known = last.get(rank)
            if known is not None:
                if known[:2] == (state, about) and began <= known[3] + SAME:
                    last[rank] = (state, about, known[2], max(known[3], ended))
                    continue
                found[f"server {rank}"].append(_bar(*known))
            last[rank] = (state, about, began, ended)
    for rank, known in last.items():
        found[f"server {rank}"].append(_bar(*known))
    return dict(found)


def _bar(name: str, about: str, began: float, ended: float) -> Bar:
    return Bar(name=name, began=began, ended=ended, about=about)


def state_of(server: Any) -> str:
    """Returns the state of a server, as it answered."""
    state = str(server.get("state", ""))
    if state.startswith("asleep"):
        return "sleeping"
    if state != "serving":
        return "down"
    return "generating" if server.get("running") or server.get("queued") else "idle"


def about_server(server: Any) -> str:
    """Returns what a reader is told of a server."""
    state = str(server.get("state", ""))
    shown = "" if state == "serving" else f" ({state})"
    return f"{server['url']}{shown}"


def join(bars: Iterable[Bar]) -> list[Bar]:
    """Puts bars of the same state together that follow each other."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.name, last.about) == (bar.name, bar.about)
            and bar.began <= last.ended + SAME
        ):
            ended = max(last.ended, bar.ended)
            found[-1] = Bar(
                name=bar.name, began=last.began, ended=ended, about=bar.about
            )
        else:
            found.append(bar)
    return found


def override(bars: Sequence[Bar], others: Sequence[Bar]) -> list[Bar]:
    """Returns bars with others in their place, where there are some.

    Both are in the order of time, and those of one kind do not overlap.
    """
    found: list[Bar] = []
    others = sorted(others, key=lambda bar: bar.began)
    first = 0
    for bar in bars:
        began = bar.began
        while first < len(others) and others[first].ended <= began:
            first += 1
        place = first
        while place < len(others) and (other := others[place]).began < bar.ended:
            place += 1
            if other.began > began:
                found.append(_part(bar, began, other.began))
            began = max(began, other.ended)
        if began < bar.ended:
            found.append(_part(bar, began, bar.ended))
    return sorted([*found, *others], key=lambda bar: bar.began)


def _part(bar: Bar, began: float, ended: float) -> Bar:
    return Bar(name=bar.name, began=began, ended=ended, about=bar.about)


def thin(bars: Sequence[Bar], most: int = MOST_BARS) -> list[Bar]:
    """Returns at most so many bars: each time has the state that it had the longest.

    Examples:
        >>> bars = [Bar(name="ab"[n % 2], began=n, ended=n + 1) for n in range(100)]
        >>> len(thin(bars, 10)) <= 10
        True
    """
    if len(bars) <= most or not bars:
        return list(bars)
    start, end = bars[0].began, max(bar.ended for bar in bars)
    width = (end - start) / most or 1.0
    shares: list[dict[str, float]] = [{} for _ in range(most)]
    for bar in bars:
        place = min(int((bar.began - start) / width), most - 1)
        last = min(int((bar.ended - start) / width), most - 1)
        if place == last:
            share = shares[place]
            share[bar.name] = share.get(bar.name, 0.0) + bar.ended - bar.began
            continue
        for each in range(place, last + 1):
            low, high = start + each * width, start + (each + 1) * width
            seconds = min(bar.ended, high) - max(bar.began, low)
            shares[each][bar.name] = shares[each].get(bar.name, 0.0) + max(seconds, 0.0)
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
    """Returns times and the number of groups that run.

    Of many, those of parts: the largest number of each, and the one at its end.
    """
    total, found = 0, dict[float, int]()
    for time, change in sorted(run.running):
        total = max(total + change, 0)
        # What was before at the same time lasted no time.
        found[time] = total
    points = list(found.items())
    if len(points) <= most:
        return points
    count = most // 2
    size = len(points) / count
    parts = [points[int(n * size) : int((n + 1) * size)] for n in range(count)]
    chosen = {(max(part, key=lambda point: point[1]), part[-1]) for part in parts}
    return sorted({point for pair in chosen for point in pair})
