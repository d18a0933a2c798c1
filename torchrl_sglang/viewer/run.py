"""A recorded run: its groups, phases, weight updates, servers and metrics."""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchrl_sglang.recording.format import HELD_OUT
from torchrl_sglang.recording.lines import GroupLine, number
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.support.garbage import collect_garbage_afterwards
from torchrl_sglang.viewer.writers import Writers, in_order, time_of

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a malformed line, such as after an edit."""


class Group(msgspec.Struct, kw_only=True, gc=False, eq=False):
    """A group of responses to a prompt."""

    id: str
    """Number of the group, with its writer unless that is the first."""
    line: GroupLine
    """Its line in the recording."""
    status: str
    """``"complete"``, ``"trained"``, ``"filtered"``, ``"stale"`` or ``"held-out"``."""
    batch: int | None = None
    """Number of its batch, over all writers; of a held-out group, of the latest one."""
    age: int | None = None
    """Weight updates between its oldest token and its batch."""
    advantages: dict[str, float] = {}
    """Key of a row -> its advantage."""
    gaps: dict[str, float] = {}
    """Key of a row -> largest difference between trainer's and engine's log-probs."""
    scores: dict[str, Any] = {}
    """Key of a row -> position of the trainer's log-probs."""


class Bar(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An interval; a long run has a hundred thousand."""

    name: str
    began: float
    """Seconds since the epoch."""
    ended: float
    about: str = ""
    """Description for a reader."""


@dataclass(kw_only=True)
class RunData:
    """A recorded run."""

    name: str
    folder: str
    began: float = math.inf
    ended: float = -math.inf
    """Time of the last line."""
    resumed: float = -math.inf
    """Time of the last resumption, after everything before had ended."""
    groups: list[Group] = field(default_factory=list)
    phases: list[Bar] = field(default_factory=list)
    """Of the trainer; ``"wait"``: it waits for a batch."""
    updates: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of weight updates; ``time`` is the time of their end."""
    engine: list[Mapping[str, Any]] = field(default_factory=list)
    """Samples of the engine."""
    collector: list[Mapping[str, Any]] = field(default_factory=list)
    """Samples of the collector."""
    batches: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of batches."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """Changes of the number of running groups: time and difference."""
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    """Name -> step -> value."""
    step_times: dict[int, float] = field(default_factory=dict)
    """Step -> time of its metrics."""
    settings: dict[str, str] = field(default_factory=dict)
    """Name of a setting -> its value, and earlier ones of a resumed run."""
    failures: list[str] = field(default_factory=list)
    """Errors of groups."""
    notes: list[str] = field(default_factory=list)
    """Sentences on missing or unreadable parts of the recording."""

    def is_live(self, now: float) -> bool:
        """Returns whether the run seems to be live."""
        return now - self.ended < 15.0


def read_run(recording: Recording, name: str) -> RunData:
    """Returns the run of a recording."""
    run = RunData(name=name, folder=str(recording.folder))
    with collect_garbage_afterwards():
        _Assembly(run).add_all(recording)
    run.notes += _notes(recording)
    return run


def _notes(recording: Recording) -> list[str]:
    notes = list(recording.left_out)
    if recording.damage.count:
        notes.append(
            f"{recording.damage.count} lines could not be read; the first one: "
            f"{recording.damage.first[0]}."
        )
    if recording.unfinished:
        names = ", ".join(sorted(recording.unfinished))
        notes.append(f"The last line of {names} is cut off, and not shown.")
    parts = ("prompts", "responses")
    absent = [part for part in parts if recording.manifest.get(part) is False]
    if absent:
        notes.append(f"The run was recorded without its {' and '.join(absent)}.")
    sample = number(recording.manifest.get("sample"))
    if sample is not None and sample < 1:
        notes.append(f"The conversations of {sample:.0%} of the groups were recorded.")
    return notes


class _Assembly:
    """Puts the lines of a recording together."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._writers: Writers | None = None
        self._known: dict[tuple[str, int | str], Group] = {}
        self._by_key: dict[str, Group] = {}
        self._again: dict[str, list[Group]] = {}
        self._lost = 0
        self._dropped = 0
        self._batch = 0

    def add_all(self, recording: Recording) -> None:
        """Adds all lines, except malformed lines."""
        malformed = recording.malformed
        if len(recording.writers) > 1:
            names = sorted({line.writer for line in recording.groups})
            self._writers = Writers(names)
        for line in recording.groups:
            if math.isfinite(line.began) and math.isfinite(line.ended):
                self._group(line)
            else:
                malformed += 1
        groups = self._run.groups
        groups.sort(key=lambda group: group.line.ended)
        for group in (*groups[:1], *groups[-1:]):
            self._see(group.line.ended)
        events = recording.events
        for event in events if self._writers is None else in_order(events):
            try:
                self._event(event)
            except MALFORMED:
                malformed += 1
        self._place_held_out()
        if self._writers is not None:
            self._run.running += self._writers.unfinished()
            self._run.resumed = self._writers.resumed()
        self._say(malformed)

    def _place_held_out(self) -> None:
        batches = self._run.batches
        for group in self._run.groups:
            if group.status == HELD_OUT:
                group.batch = bisect(batches, group.line.ended, key=time_of)

    def _say(self, malformed: int) -> None:
        run = self._run
        if malformed:
            run.notes.append(f"{malformed} lines are not as they should be.")
        if self._lost:
            run.notes.append(f"{self._lost} records could not be written.")
        if self._dropped:
            run.notes.append(
                f"{self._dropped} files made room for newer ones: the recording has "
                f"reached its bound."
            )

    def _group(self, line: GroupLine) -> None:
        writers = self._writers
        id_ = writers.name(line.writer, line.id) if writers else str(line.id)
        group = Group(id=id_, line=line, status=line.status)
        self._run.groups.append(group)
        self._known[line.writer, line.id] = group
        by_key = self._by_key
        for key in line.keys:
            first = by_key.setdefault(key, group)
            if first is not group:
                self._again.setdefault(key, [first]).append(group)
        self._count(line.ended, -1, line.writer)

    def _count(self, time: float, change: int, writer: str) -> None:
        self._run.running.append((time, change))
        if self._writers is not None:
            self._writers.see(writer, time, change)

    def _see(self, time: float) -> None:
        run = self._run
        run.began = min(run.began, time)
        run.ended = max(run.ended, time)

    def _event(self, event: Mapping[str, Any]) -> None:
        kind, time = event["kind"], time_of(event)
        if not time:
            raise ValueError("It has no time.")
        if kind != "start":
            # Before a run does something, servers are started, which takes minutes.
            self._see(time)
            if self._writers is not None:
                self._writers.see(event["writer"], time)
        if handle := getattr(self, f"_on_{kind}", None):
            handle(event, time)

    def _on_began(self, event: Mapping[str, Any], time: float) -> None:
        self._count(time, 1, event["writer"])

    def _on_failed(self, event: Mapping[str, Any], time: float) -> None:
        self._count(time, -1, event["writer"])
        self._run.failures.append(str(event["error"]))

    def _on_stale(self, event: Mapping[str, Any], time: float) -> None:
        group = self._known.get((event["writer"], event["id"]))
        if group is not None:
            group.status = "stale"

    def _on_batch(self, event: Mapping[str, Any], time: float) -> None:
        # Each collector numbers its batches from 1.
        number = self._batch = max(int(event["number"]), self._batch + 1)
        self._run.batches.append({**event, "number": number})
        for number_of_group in event["ids"]:
            group = self._known.get((event["writer"], number_of_group))
            if group is None:
                continue
            group.batch, group.status = number, "taken"
            if group.line.oldest is not None:
                group.age = max(int(event["version"]) - group.line.oldest, 0)

    def _on_trained(self, event: Mapping[str, Any], time: float) -> None:
        for row in event["rows"]:
            advantage = number(row.get("advantage"))
            for group in self._newest(row["key"], time):
                group.status = "trained"
                if advantage is not None:
                    group.advantages[row["key"]] = advantage

    def _on_scored(self, event: Mapping[str, Any], time: float) -> None:
        for row in event["rows"]:
            gap = number(row.get("gap"))
            for group in self._newest(row["key"], time):
                if gap is not None:
                    group.gaps[row["key"]] = gap
                    group.scores[row["key"]] = event.get("scores")

    def _newest(self, key: str, time: float) -> Sequence[Group]:
        """Returns the newest group with a complete row at a time.

        Groups of a batch may have the same prompt and tokens; then all are returned.
        """
        if key in self._again:
            groups = [group for group in self._again[key] if group.line.ended <= time]
            batch = max([group.batch or 0 for group in groups], default=0)
            # Groups without a batch do not count.
            return [group for group in groups if group.batch == batch] or groups[-1:]
        group = self._by_key.get(key)
        return [] if group is None else [group]

    def _on_phase(self, event: Mapping[str, Any], time: float) -> None:
        start, end = map(number, event["span"])
        if start is None or end is None:
            raise ValueError("It has no times.")
        self._see(start)
        name = str(event["name"])
        self._run.phases.append(Bar(name=name, began=start, ended=end))

    def _on_update(self, event: Mapping[str, Any], time: float) -> None:
        phases = event.get("phases") or {}
        fields = {
            "version": int(event["version"]),
            "seconds": float(event.get("seconds", 0.0)),
            "bytes": int(event.get("bytes") or 0),
            "transport": str(event.get("transport", "")),
            "phases": {name: float(seconds) for name, seconds in phases.items()},
        }
        self._run.updates.append({**event, **fields, "time": time})

    def _on_engine(self, event: Mapping[str, Any], time: float) -> None:
        _ = [server["url"] for server in event["servers"]]
        self._run.engine.append(event)

    def _on_collector(self, event: Mapping[str, Any], time: float) -> None:
        _ = event["lately"]["trainer_waits"]
        self._run.collector.append(event)

    def _on_metrics(self, event: Mapping[str, Any], time: float) -> None:
        if event.get("step") is not None:
            self._run.step_times[int(event["step"])] = time
        for name, value in event["values"].items():
            of_steps = self._run.metrics.setdefault(str(name), {})
            step, amount = event.get("step"), number(value)
            if amount is not None:
                of_steps[len(of_steps) if step is None else int(step)] = amount

    def _on_step(self, event: Mapping[str, Any], time: float) -> None:
        """Records a resumption: steps of a killed run after this step are repeated."""
        if self._run.batches:
            self._run.notes.append(
                f"The run went on after step {int(event['step'])}: batches that it "
                f"had taken later are shown, too."
            )
        for of_steps in self._run.metrics.values():
            for later in [step for step in of_steps if step > event["step"]]:
                del of_steps[later]

    def _on_start(self, event: Mapping[str, Any], time: float) -> None:
        self._add_settings(event.get("settings", {}))

    def _on_settings(self, event: Mapping[str, Any], time: float) -> None:
        self._add_settings(event["values"])

    def _add_settings(self, values: Mapping[str, Any], prefix: str = "") -> None:
        settings = self._run.settings
        for name, value in values.items():
            if isinstance(value, Mapping):
                self._add_settings(value, f"{prefix}{name}.")
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            earlier = settings.setdefault(f"{prefix}{name}", text)
            if earlier.rpartition(", then ")[2] != text:
                settings[f"{prefix}{name}"] = f"{earlier}, then {text}"

    def _on_lost(self, event: Mapping[str, Any], time: float) -> None:
        self._lost += int(event["records"])

    def _on_dropped(self, event: Mapping[str, Any], time: float) -> None:
        self._dropped += len(event["files"])


def find_group(groups: Iterable[Group], id_: str) -> Group | None:
    """Returns a group by its number."""
    return next((group for group in groups if group.id == id_), None)
