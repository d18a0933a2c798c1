"""The bottleneck of a run and its remedy, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrl_sglang.recording.lines import number
from torchrl_sglang.viewer.run import Bar, RunData
from torchrl_sglang.viewer.timeline import TRAINER

LATELY = 0.5
"""Share of the run, its last part, for the sentences: a minute at least, ten at
most."""

SMALL, LARGE = 0.1, 0.25
"""Shares of the time: negligible, and a loss."""

LEAST_ANSWERS = 20
"""Least number of server samples for a share of generation: each is of a moment, and
steps may be as long as the interval between two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Recent shares of the time, from 0 to 1."""

    waiting: float
    """The trainer waits for a batch."""
    training: float
    """It trains."""
    sending: float
    """It sends weights."""
    saving: float
    """It writes checkpoints, or evaluates."""
    idle: float | None
    """Servers have nothing to do, or are paused; ``None``: unknown."""
    queued: float
    """Queued requests on servers, per running request."""
    environment: bool
    """Most conversations wait for steps, tools or rewards."""
    down: str = ""
    """Servers out of service."""
    max_staleness: int | None = None
    """Bound of the collector; ``None``: unknown."""
    servers: int = 1
    """Number of servers."""


def figures_of(run: RunData, lanes: Mapping[str, Sequence[Bar]]) -> Figures | None:
    """Returns the shares of the last part of a run; ``None`` if it is too short."""
    servers = [bars for name, bars in lanes.items() if name != TRAINER]
    trainer = lanes.get(TRAINER, ())
    if not trainer or run.ended <= run.began:
        return None
    seconds = (run.ended - run.began) * LATELY
    since = run.ended - min(max(seconds, 60.0), 600.0)
    since = max(since, trainer[0].began, run.resumed)
    span = max(run.ended - since, 1e-9)

    def share(found: Sequence[Bar], *names: str) -> float:
        parts = (
            bar.ended - max(bar.began, since)
            for bar in found
            if bar.name in names and bar.ended > since
        )
        return min(sum(parts) / span, 1.0)

    idle = [share(lane, "idle", "paused", "updating", "sleeping") for lane in servers]
    answers = sum(event["time"] >= since for event in run.engine)
    latest = run.engine[-1]["servers"] if run.engine else []
    running = sum(number(server.get("running")) or 0.0 for server in latest)
    waiting = sum(number(server.get("queued")) or 0.0 for server in latest)
    collector = run.collector[-1] if run.collector else {}
    lately = collector.get("lately", {})
    conversations = number(lately.get("conversations")) or 0.0
    generating = number(lately.get("conversations_in_flight")) or 0.0
    bound = collector.get("max_staleness")
    return Figures(
        waiting=share(trainer, "waiting"),
        training=share(trainer, "training"),
        sending=share(trainer, "sending"),
        saving=share(trainer, "saving", "evaluating"),
        idle=sum(idle) / len(idle) if idle and answers >= LEAST_ANSWERS else None,
        queued=waiting / running if running else 0.0,
        environment=conversations > 0 and generating < conversations / 2,
        down=", ".join(
            str(server["url"])
            for server in latest
            if server.get("state") != "serving"
            and not str(server.get("state")).startswith("asleep")
        ),
        max_staleness=bound if isinstance(bound, int) else None,
        servers=len(servers),
    )


def advise(found: Figures | None) -> str:
    """Returns a run's bottleneck and its remedy."""
    if found is None:
        return (
            "What bounds the run is not known yet: no phase of the trainer was "
            "recorded. Iterate over a collector with recorder=, and put training into "
            "with recorder.phase('train')."
        )
    shares = (
        f"the trainer trains {found.training:.0%} of the time and waits "
        f"{found.waiting:.0%}"
    )
    if found.down and found.waiting > SMALL:
        return (
            f"Servers that do not serve bound the run ({found.down}): {shares}. Read "
            f"their logs; the others generate meanwhile."
        )
    if found.waiting > SMALL and found.environment:
        return (
            f"The environment bounds the run: {shares}, and most conversations wait "
            f"for steps, tools or rewards. Make these faster or coroutines, or raise "
            f"num_threads or max_in_flight."
        )
    return _of_phases(found, shares)


def _of_phases(found: Figures, shares: str) -> str:
    """Returns a sentence on the trainer's largest phase, if any."""
    largest = max(
        ("training", "waiting", "sending", "saving"),
        key=lambda name: getattr(found, name),
    )
    named = found.training + found.waiting + found.sending + found.saving
    if 1 - named > getattr(found, largest):
        return (
            f"What bounds the run is not known: {1 - named:.0%} of the time is in no "
            f"phase that has a name here, while {shares}. Put training into with "
            f"recorder.phase('train'), and the rest into 'evaluate' and 'save'."
        )
    if largest == "saving":
        return (
            f"Evaluation and checkpoints bound the run, {found.saving:.0%} of the "
            f"time. Raise eval_every or checkpoint_every."
        )
    if largest == "sending":
        return (
            f"Weight updates bound the run, {found.sending:.0%} of the time: {shares}. "
            f"Look at the phases of updates below; a faster transport, FP8, an adapter "
            f"or larger batches (groups_per_batch) help."
        )
    return _of_both(found, shares)


def _of_both(found: Figures, shares: str) -> str:
    idle = (
        "" if found.idle is None else f", and servers do not generate {found.idle:.0%}"
    )
    spare = found.idle is not None and found.servers > 1
    fewer = "; fewer servers would do" if spare else ""
    both = found.idle is not None and min(found.waiting, found.idle) >= LARGE
    if both and found.max_staleness == 0:
        return (
            f"Generation and training take turns: {shares}{idle}. Let them overlap "
            f"with max_staleness=1."
        )
    if both:
        return (
            f"The bound on staleness bounds the run: {shares}{idle}. Raise "
            f"max_staleness, or make batches smaller (groups_per_batch)."
        )
    if found.waiting <= max(SMALL, found.idle or 0.0):
        return (
            f"Training bounds the run: {shares}{idle}. Give the trainer more GPUs or "
            f"larger passes (max_tokens_per_pass){fewer}."
        )
    if found.queued > 1 / 2:
        return (
            f"Generation bounds the run: {shares}, and servers have queues. Add "
            f"servers (num_replicas), or memory for their KV cache."
        )
    return (
        f"Generation bounds the run: {shares}. Servers have no queues, so that more "
        f"conversations at once (max_in_flight, groups_per_batch, max_staleness) use "
        f"them better; or add servers."
    )
