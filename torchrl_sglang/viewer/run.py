"""A recorded run: its groups, phases, weight updates, servers and metrics. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.recording.reading import Recording

LIVE_SECONDS = 15.0
"""A run that has recorded nothing for so long has ended, or was killed."""

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What a line raises that is not as it should be: somebody has changed it."""


@dataclass(kw_only=True, slots=True)
class Group:
    """A group of responses to a prompt."""

    id: str
    """Number of the group."""
    line: Mapping[str, Any]
    """Its line in the recording."""
    status: str
    """``"complete"``, ``"trained"``, ``"filtered"`` or ``"stale"``."""
    batch: int | None = None
    """Number of the batch that took it."""
    age: int | None = None
    """Weight updates between its oldest token and that batch."""
    advantages: dict[str, float] = field(default_factory=dict)
    """Key of a row -> its advantage."""
    mismatch: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Key of a row -> how far the trainer's log-probs are from the engine's."""
    scores: dict[str, Any] = field(default_factory=dict)
    """Key of a row -> where the trainer's log-probs are."""

    rewards: list[float] = field(init=False)
    """Returns of its responses, where they have one."""

    def __post_init__(self) -> None:
        found = [number(each.get("reward")) for each in self.responses]
        self.rewards = [each for each in found if each is not None]

    @property
    def responses(self) -> Sequence[Mapping[str, Any]]:
        """Lines of its responses."""
        responses: Sequence[Mapping[str, Any]] = self.line["responses"]
        return responses


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Something that lasted."""

    name: str
    began: float
    """Seconds since the epoch."""
    ended: float
    about: str = ""
    """What a reader is told of it."""


@dataclass(kw_only=True)
class RunData:
    """A recorded run."""

    name: str
    folder: str
    began: float = math.inf
    ended: float = -math.inf
    """Time of the last line."""
    groups: list[Group] = field(default_factory=list)
    phases: list[Bar] = field(default_factory=list)
    """Of the trainer; ``"wait"``: it waits for a batch."""
    updates: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of weight updates; ``time`` is that of their end."""
    engine: list[Mapping[str, Any]] = field(default_factory=list)
    """Answers of the engine."""
    collector: list[Mapping[str, Any]] = field(default_factory=list)
    """Answers of the collector."""
    batches: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of batches that were taken."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """Changes of the number of groups that run: time and difference."""
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    """Name -> step -> value."""
    failures: list[str] = field(default_factory=list)
    """Errors of groups."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what is not in the recording, or could not be read."""

    def is_live(self, now: float) -> bool:
        """Returns whether the run seems to go on."""
        return now - self.ended < LIVE_SECONDS


def number(value: Any) -> float | None:
    """Returns a finite number; ``None`` for anything else."""
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    return None


def read_run(recording: Recording, name: str) -> RunData:
    """Returns the run of a recording."""
    run = RunData(name=name, folder=str(recording.folder))
    _Assembly(run).add_all(recording)
    run.notes += _notes(recording)
    return run


def _notes(recording: Recording) -> list[str]:
    notes = list(recording.left_out)
    if recording.damaged:
        notes.append(
            f"{len(recording.damaged)} lines could not be read; the first one: "
            f"{recording.damaged[0]}."
        )
    if recording.unfinished:
        names = ", ".join(sorted(recording.unfinished))
        notes.append(f"The last line of {names} is cut off, and not shown.")
    shown = [
        text
        for text, told in (("prompts", "prompts"), ("responses", "responses"))
        if recording.manifest.get(told) is False
    ]
    if shown:
        notes.append(f"The run was recorded without its {' and '.join(shown)}.")
    sample = number(recording.manifest.get("sample"))
    if sample is not None and sample < 1:
        notes.append(f"The conversations of {sample:.0%} of the groups were recorded.")
    return notes


class _Assembly:
    """Puts the lines of a recording together."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._known: dict[str, Group] = {}
        self._by_key: dict[str, list[Group]] = defaultdict(list)
        self._lost = 0
        self._dropped = 0

    def add_all(self, recording: Recording) -> None:
        """Adds all lines; those that are not as they should be are left out."""
        malformed = 0
        for line in recording.groups:
            try:
                self._group(line)
            except MALFORMED:
                malformed += 1
        self._run.groups.sort(key=lambda group: group.line["time"][1])
        events = sorted(recording.events, key=_time_of)
        for event in events:
            try:
                self._event(event)
            except MALFORMED:
                malformed += 1
        self._say(malformed)

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

    def _group(self, line: Mapping[str, Any]) -> None:
        ended = line["time"][1]
        group = Group(id=str(line["id"]), line=line, status=str(line["status"]))
        _ = [each["tokens"] for each in line["responses"]]
        self._see(float(ended))
        self._run.groups.append(group)
        self._known[group.id] = group
        for response in line["responses"]:
            for key in response["keys"]:
                self._by_key[key].append(group)
        self._run.running.append((float(ended), -1))

    def _see(self, time: float) -> None:
        self._run.began = min(self._run.began, time)
        self._run.ended = max(self._run.ended, time)

    def _event(self, event: Mapping[str, Any]) -> None:
        kind, time = event["kind"], float(event["time"])
        if kind != "start":
            # Before a run does something, servers are started, which takes minutes.
            self._see(time)
        handle = getattr(self, f"_on_{kind}", None)
        if handle is not None:
            handle(event, time)

    def _on_began(self, event: Mapping[str, Any], time: float) -> None:
        self._run.running.append((time, 1))

    def _on_failed(self, event: Mapping[str, Any], time: float) -> None:
        self._run.running.append((time, -1))
        self._run.failures.append(str(event["error"]))

    def _on_stale(self, event: Mapping[str, Any], time: float) -> None:
        group = self._known.get(str(event["id"]))
        if group is not None:
            group.status = "stale"

    def _on_batch(self, event: Mapping[str, Any], time: float) -> None:
        self._run.batches.append(event)
        for each in event["ids"]:
            group = self._known.get(str(each))
            if group is None:
                continue
            group.batch, group.status = int(event["number"]), "taken"
            oldest = [r["versions"][0] for r in group.responses if r.get("versions")]
            if oldest:
                group.age = max(int(event["version"]) - min(oldest), 0)

    def _on_trained(self, event: Mapping[str, Any], time: float) -> None:
        for row in event["rows"]:
            for group in self._newest(row["key"], time):
                group.status = "trained"
                advantage = number(row.get("advantage"))
                if advantage is not None:
                    group.advantages[row["key"]] = advantage
        self._on_scored(event, time)

    def _on_scored(self, event: Mapping[str, Any], time: float) -> None:
        for row in event["rows"]:
            if "gap" not in row:
                continue
            for group in self._newest(row["key"], time):
                group.mismatch[row["key"]] = row
                group.scores[row["key"]] = event.get("scores")

    def _newest(self, key: str, time: float) -> list[Group]:
        """Returns the newest group with a row that was complete at a time."""
        found = self._by_key.get(key, ())
        before = [group for group in found if group.line["time"][1] <= time]
        return before[-1:]

    def _on_phase(self, event: Mapping[str, Any], time: float) -> None:
        began, ended = event["span"]
        self._see(float(began))
        name = str(event["name"])
        self._run.phases.append(Bar(name=name, began=float(began), ended=float(ended)))

    def _on_update(self, event: Mapping[str, Any], time: float) -> None:
        float(event.get("seconds", 0.0))
        self._run.updates.append(event)

    def _on_engine(self, event: Mapping[str, Any], time: float) -> None:
        _ = [server["url"] for server in event["servers"]]
        self._run.engine.append(event)

    def _on_collector(self, event: Mapping[str, Any], time: float) -> None:
        _ = event["lately"]["trainer_waits"]
        self._run.collector.append(event)

    def _on_metrics(self, event: Mapping[str, Any], time: float) -> None:
        for name, value in event["values"].items():
            of_steps = self._run.metrics.setdefault(str(name), {})
            step, known = event.get("step"), number(value)
            if known is not None:
                of_steps[len(of_steps) if step is None else int(step)] = known

    def _on_step(self, event: Mapping[str, Any], time: float) -> None:
        """A run goes on after a step: what a killed one did later is done again."""
        for of_steps in self._run.metrics.values():
            for later in [each for each in of_steps if each > event["step"]]:
                del of_steps[later]

    def _on_lost(self, event: Mapping[str, Any], time: float) -> None:
        self._lost += int(event["records"])

    def _on_dropped(self, event: Mapping[str, Any], time: float) -> None:
        self._dropped += len(event["files"])


def _time_of(event: Mapping[str, Any]) -> float:
    return number(event.get("time")) or 0.0


def find_group(groups: Iterable[Group], id_: str) -> Group | None:
    """Returns a group by its number."""
    return next((each for each in groups if each.id == id_), None)
