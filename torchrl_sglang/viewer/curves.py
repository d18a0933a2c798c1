"""Curves of a run: points of figures over steps, batches or time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torchrl_sglang.recording.format import HELD_OUT
from torchrl_sglang.recording.lines import number
from torchrl_sglang.viewer.run import Group, RunData

MOST_POINTS = 400
"""Points of a line; longer lines are reduced to means of neighbours."""

MOST_BINS = 20
"""Most bins of a distribution, and one."""

MOST_OF_PART = 500
"""Most groups of a part of a run whose distribution is shown."""

MOST_OTHERS = 200
"""Most curves of other metrics."""

REPEATED = (
    "batch/reward",
    "batch/response_tokens",
    "batch/truncated",
    "batch/flat_groups",
)
"""Metrics of a run of ``GRPO`` that repeat curves of batch means."""

OF_PARTS = ("engine", "rollout", "staleness", "weights", "gateway", "time")
"""Last panels of metrics: activity of components per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Lines, or stacked bars, of a figure."""

    id: str
    title: str
    about: str
    """Description of the figure and its interpretation."""
    x: str
    """Name of the horizontal axis."""
    y: str
    """Name of the vertical axis, with its unit."""
    points: Sequence[Mapping[str, Any]]
    """Each with ``x``, ``y`` and ``line``, the name of its line."""
    beside: bool = False
    """Whether lines are bars beside each other."""
    stacked: bool = False
    """Whether lines add up, as bars."""
    percent: bool = False
    """Whether values are shares."""

    @property
    def is_metric(self) -> bool:
        """Whether it shows a metric without a curve of its own."""
        return self.id.startswith("metric-")

    @property
    def is_constant(self) -> bool:
        """Whether it shows such a metric with the same value in all steps."""
        if not self.is_metric or len({point["x"] for point in self.points}) < 2:
            return False
        values = [point["y"] for point in self.points]
        # Means of equal numbers differ in their last digit.
        return math.isclose(min(values), max(values), rel_tol=1e-9)


@dataclass(kw_only=True, slots=True)
class _BatchTotals:
    """Totals of a batch's groups, computed in a single pass for all curves."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0
    cut: int = 0
    """Truncated responses."""
    reward: float = 0.0
    """Sum of the returns."""
    rewarded: int = 0
    """Number of responses with a return."""
    right: int = 0
    """Responses with the best return of the run."""
    flat: int = 0
    """Groups in which all returns are equal."""
    named: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Name of a reward function -> sum and number of its values."""
    ages: Counter[int] = field(default_factory=Counter)
    """Age of the oldest token, in weight updates -> groups."""

    def add(self, group: Group, best: float | None) -> None:
        """Adds a group; ``best``: the run's best return."""
        line = group.line
        self.groups += 1
        self.responses += line.count
        self.tokens += line.tokens
        self.cut += line.cut
        self.reward += sum(line.rewards)
        self.rewarded += len(line.rewards)
        if line.best is not None and line.best == best:
            self.right += line.rewards.count(line.best)
        self.flat += line.best == line.worst
        for name, (amount, count) in line.named.items():
            total, number = self.named.get(name, (0.0, 0))
            self.named[name] = total + amount, number + count
        if group.age is not None:
            self.ages[group.age] += 1


def curves_of(run: RunData) -> list[Curve]:
    """Returns the curves of a run with points."""
    best, worst = extremes(run)
    batches = _batches(run, best)
    curves = [
        _rewards(run, batches),
        _accuracy(batches, differ=best != worst),
        _lengths(batches),
        *_distributions(run),
        _truncated(batches),
        _staleness(batches),
        _mismatch(run),
        _distillation(run),
        _missed(run),
        _sample_size(run),
        _speed(run),
        _updates(run),
        _requests(run),
        _cache(run),
        _memory(run),
    ]
    shown = {name for curve in curves for name in _names(curve)} | {"eval/reward"}
    return [curve for curve in [*curves, *_others(run, shown)] if curve.points]


def _names(curve: Curve) -> set[str]:
    return {str(point.get("metric", "")) for point in curve.points}


def _batches(run: RunData, best: float | None) -> dict[int, _BatchTotals]:
    totals: dict[int, _BatchTotals] = defaultdict(_BatchTotals)
    for group in run.groups:
        if group.batch is not None and group.status != HELD_OUT:
            totals[group.batch].add(group, best)
    return dict(sorted(totals.items()))


def down_sample(
    points: Sequence[tuple[float, float]], most: int = MOST_POINTS
) -> list[tuple[float, float]]:
    """Returns at most ``most`` points: the means of neighbours.

    Examples:
        >>> down_sample([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], 2)
        [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= most:
        return list(points)
    size = len(points) / most
    parts = (points[int(n * size) : int((n + 1) * size)] for n in range(most))
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part))
        for part in parts
        if part
    ]


def _line(
    name: str, points: Iterable[tuple[float, float]], metric: str = ""
) -> list[dict[str, Any]]:
    extra = {"metric": metric} if metric else {}
    return [
        {"x": x, "y": y, "line": name, **extra} for x, y in down_sample(list(points))
    ]


def _metric(run: RunData, name: str, line: str = "") -> list[dict[str, Any]]:
    points = sorted(run.metrics.get(name, {}).items())
    return _line(line or name, points, metric=name)


def _means(
    batches: Mapping[int, _BatchTotals],
    part: Callable[[_BatchTotals], tuple[float, int]],
) -> list[tuple[float, float]]:
    """Returns each batch's mean, from a sum and a count of values."""
    parts = [(batch, *part(totals)) for batch, totals in batches.items()]
    return [(float(batch), total / count) for batch, total, count in parts if count]


def _rewards(run: RunData, batches: Mapping[int, _BatchTotals]) -> Curve:
    points = _line("reward", _means(batches, lambda t: (t.reward, t.rewarded)))
    for name in dict.fromkeys(
        chain.from_iterable(totals.named for totals in batches.values())
    ):

        def values(batch: _BatchTotals, name: str = name) -> tuple[float, int]:
            return batch.named.get(name, (0.0, 0))

        points += _line(name, _means(batches, values))
    points += _metric(run, "eval/reward", "held-out reward")
    return Curve(
        id="reward",
        title="Reward by function",
        about="Mean over the responses of a batch; of held-out prompts, greedily.",
        x="batch",
        y="reward",
        points=points,
    )


def _accuracy(batches: Mapping[int, _BatchTotals], *, differ: bool) -> Curve:
    right = _means(batches, lambda each: (each.right, each.rewarded))
    flat = _means(batches, lambda each: (each.flat, each.groups))
    return Curve(
        id="accuracy",
        title="Best responses, and groups without a difference",
        about="Share of the responses with the run's best reward; and of the groups "
        "whose responses all have the same reward, which teach nothing.",
        x="batch",
        y="share",
        percent=True,
        points=[*_line("best reward", right), *_line("no difference", flat)]
        if differ
        else [],
    )


def extremes(run: RunData) -> tuple[float | None, float | None]:
    """Returns the best and the worst return of a response."""
    lines = [group.line for group in run.groups if group.status != HELD_OUT]
    best = [line.best for line in lines if line.best is not None]
    worst = [line.worst for line in lines if line.worst is not None]
    return max(best, default=None), min(worst, default=None)


def _lengths(batches: Mapping[int, _BatchTotals]) -> Curve:
    points = _means(batches, lambda each: (each.tokens, each.responses))
    return Curve(
        id="length",
        title="Response length",
        about="Mean number of tokens that a response has, over all of its turns.",
        x="batch",
        y="tokens",
        points=_line("tokens", points),
    )


def _distributions(run: RunData) -> list[Curve]:
    """Returns how rewards and lengths are spread, at first and in the end."""
    parts = _first_and_last(run)
    rewards = {
        name: [reward for group in groups for reward in group.line.rewards]
        for name, groups in parts.items()
        if any(group.line.rewards for group in groups)
    }
    lengths = {
        name: [float(r.tokens) for group in groups for r in group.line.responses]
        for name, groups in parts.items()
    }
    about = "Share of the responses, in the first and in the last tenth of the batches."
    return [
        Curve(
            id=f"{x}_distribution",
            title=f"Distribution of {title}",
            about=about,
            x=x,
            y="share",
            beside=True,
            percent=True,
            points=_histogram(values),
        )
        for x, title, values in (
            ("reward", "rewards", rewards),
            ("length", "response lengths", lengths),
        )
    ]


def _first_and_last(run: RunData) -> dict[str, list[Group]]:
    """Returns the groups of the first and of the last tenth of a run's batches."""
    of_batches: dict[int, list[Group]] = defaultdict(list)
    for group in run.groups:
        if group.batch is not None and group.status != HELD_OUT:
            of_batches[group.batch].append(group)
    numbers = sorted(of_batches)
    size = math.ceil(len(numbers) / 10)
    parts = {}
    for chosen in (numbers[:size], numbers[-size:]):
        groups = [group for number in chosen for group in of_batches[number]]
        if groups:
            name = (
                f"batches {chosen[0]} to {chosen[-1]}"
                if size > 1
                else f"batch {chosen[0]}"
            )
            parts[name] = groups[:: math.ceil(len(groups) / MOST_OF_PART)]
    return parts


def _histogram(parts: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Returns the share of each bin, named by its least value.

    Bins are 1, 2 or 5 times a power of ten wide, so that those of two runs are equal.

    Examples:
        >>> points = _histogram({"all": [0.0, 1.0, 1.0, 1.0]})
        >>> [(point["x"], point["y"]) for point in points if point["y"]]
        [(0.0, 0.25), (1.0, 0.75)]
    """
    values = list(chain.from_iterable(parts.values()))
    spread = (max(values) - min(values)) / MOST_BINS if values else 0.0
    power = 10 ** math.floor(math.log10(spread)) if spread else 1.0
    width = next(n * power for n in (1, 2, 5, 10) if n * power >= spread)
    points = []
    for name, of_part in parts.items():
        counts = Counter(math.floor(value / width + 1e-9) for value in of_part)
        numbers = [math.floor(value / width + 1e-9) for value in values]
        points += [
            {
                "x": float(f"{number * width:.6g}"),
                "y": counts[number] / len(of_part),
                "line": name,
            }
            for number in range(min(numbers), max(numbers) + 1)
        ]
    return points


def _truncated(batches: Mapping[int, _BatchTotals]) -> Curve:
    points = _means(batches, lambda each: (each.cut, each.responses))
    return Curve(
        id="truncated",
        title="Truncated responses",
        about="Share that the number of tokens, of turns or the context cut off.",
        x="batch",
        y="share",
        percent=True,
        points=_line("truncated", points),
    )


def _staleness(batches: Mapping[int, _BatchTotals]) -> Curve:
    points = []
    numbers = list(batches)
    size = max(len(numbers) / MOST_POINTS * 4, 1)
    ages: dict[int, Counter[int]] = defaultdict(Counter)
    for place, batch in enumerate(numbers):
        first = numbers[int(int(place / size) * size)]
        ages[first].update(batches[batch].ages)
    for batch, counts in ages.items():
        points += [
            {"x": batch, "y": count, "line": f"{age} updates"}
            for age, count in sorted(counts.items())
        ]
    return Curve(
        id="staleness",
        title="Staleness",
        about="Groups of a batch by the age of their oldest token, in weight updates.",
        x="batch",
        y="groups",
        points=points,
        stacked=True,
    )


def _mismatch(run: RunData) -> Curve:
    return Curve(
        id="mismatch",
        title="Mismatch KL",
        about="How far the trainer's policy is from the one that the engine sampled "
        "with. It should stay near zero; if it grows, so does the bias of training.",
        x="step",
        y="nats for each token",
        points=_metrics_named(run, "kl", "k3_kl", "kl_approx", "mismatch_kl"),
    )


def _distillation(run: RunData) -> Curve:
    return Curve(
        id="distillation",
        title="Divergence from the teacher",
        about="How far the policy is from its teacher, and an estimate of what the "
        "teacher's top tokens miss of it, which should be small beside it.",
        x="step",
        y="nats for each token",
        points=_metrics_named(run, "distillation", "distillation_missed_nats"),
    )


def _missed(run: RunData) -> Curve:
    return Curve(
        id="missed",
        title="Probability missed by the teacher's top tokens",
        about="The teacher's probability of all other tokens, which count as one "
        "outcome. With more than a few percent, a larger k tells more.",
        x="step",
        y="share",
        percent=True,
        points=_metrics_named(run, "distillation_missed"),
    )


def _sample_size(run: RunData) -> Curve:
    return Curve(
        id="ess",
        title="Effective sample size",
        about="Share of the responses that count, by their importance weights.",
        x="step",
        y="share",
        percent=True,
        points=_metrics_named(run, "ESS", "rollout_is_eff_sample_size"),
    )


def _metrics_named(run: RunData, *names: str) -> list[dict[str, Any]]:
    """Returns the points of all metrics with these names after their panel."""
    metrics = [name for name in run.metrics if name.rpartition("/")[2] in names]
    return [point for name in metrics for point in _metric(run, name)]


def _over_time(
    line: str, run: RunData, samples: Iterable[Mapping[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Returns a line of the known values of samples."""
    values = ((sample["time"] - run.began, sample.get(name)) for sample in samples)
    return _line(
        line, [(x, y) for x, value in values if (y := number(value)) is not None]
    )


def _speed(run: RunData) -> Curve:
    collector = [{**event["lately"], "time": event["time"]} for event in run.collector]
    return Curve(
        id="speed",
        title="Tokens a second",
        about="The engine's own, over the last ten seconds, and complete groups' over "
        "the last eight batches: the difference is running, or was lost.",
        x="seconds",
        y="tokens a second",
        points=[
            *_over_time("engine", run, run.engine, "tokens_per_second"),
            *_over_time("complete groups", run, collector, "tokens_per_second"),
        ],
    )


def _updates(run: RunData) -> Curve:
    events = run.updates[-MOST_POINTS // 4 :]
    points = [
        {"x": event.get("version"), "y": seconds, "line": name}
        for event in events
        for name, seconds in (
            event.get("phases") or {"update": event.get("seconds", 0.0)}
        ).items()
    ]
    return Curve(
        id="updates",
        title="Weight updates",
        about="Seconds of each phase of the last hundred updates.",
        x="version",
        y="seconds",
        points=points,
        stacked=True,
    )


def _requests(run: RunData) -> Curve:
    points = []
    for name in ("running", "queued"):
        totals = [{"time": e["time"], name: _sum(e, name)} for e in run.engine]
        points += _over_time(name, run, totals, name)
    return Curve(
        id="requests",
        title="Requests of the servers",
        about="Running and queued ones of all servers.",
        x="seconds",
        y="requests",
        points=points,
    )


def _sum(event: Mapping[str, Any], name: str) -> float:
    return sum([number(server.get(name)) or 0.0 for server in event["servers"]])


def _cache(run: RunData) -> Curve:
    points = _over_time("cache hits", run, run.engine, "cache_hit_rate")
    for rank in range(max((len(e["servers"]) for e in run.engine), default=0)):
        events = [event for event in run.engine if len(event["servers"]) > rank]
        samples = [{**e["servers"][rank], "time": e["time"]} for e in events]
        points += _over_time(f"KV cache of server {rank}", run, samples, "kv")
    return Curve(
        id="cache",
        title="Prefix cache and KV cache",
        about="Share of the prompt tokens that the prefix cache had, since the start; "
        "and of each server's KV cache that is in use. A full one retracts requests.",
        x="seconds",
        y="share",
        percent=True,
        points=points,
    )


def _memory(run: RunData) -> Curve:
    points = [
        {**point, "y": point["y"] / 1e9}
        for line in ("allocated", "reserved")
        for point in _over_time(line, run, run.engine, f"gpu_{line}")
    ]
    return Curve(
        id="memory",
        title="GPU memory of the trainer",
        about="Of this process, as PyTorch counts it.",
        x="seconds",
        y="GB",
        points=points,
    )


def _names_of_others(run: RunData, known: set[str]) -> list[str]:
    """Returns the metrics of no other curve, components' metrics last."""
    named = chain.from_iterable(group.line.named for group in run.groups)
    rewards = {f"reward/{name}" for name in set(named)}
    shown = known | rewards | set(REPEATED)
    names = [name for name in run.metrics if name not in shown]

    def place(name: str) -> tuple[bool, bool]:
        panel = name.partition("/")[0]
        return panel in OF_PARTS, panel != "train"

    return sorted(names, key=place)


def _others(run: RunData, known: set[str]) -> list[Curve]:
    names = _names_of_others(run, known)
    return [
        Curve(
            id=f"metric-{place}",
            title=name,
            about="",
            x="step",
            y="",
            points=_metric(run, name),
        )
        for place, name in enumerate(names[:MOST_OTHERS])
    ]
