"""The table of metrics: name, kind, labels, and the statistic of a part.

Names and units follow Prometheus' conventions: base units, ``_total`` for counters.
Each has the prefix ``torchrl_sglang_`` and its part's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torchrl_sglang.types import Distribution, EngineStats, UpdateStats

PREFIX = "torchrl_sglang"

Kind = Literal["counter", "gauge", "histogram"]

AGE_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Bounds of the age of tokens, in weight updates."""

SERVER_STATES = (
    *("serving", "stale", "leaving", "down", "unreachable", "lost", "asleep"),
)
"""States of a server; see :class:`.ServerStats`."""

Values: TypeAlias = float | Distribution | Mapping[tuple[str, ...], float | None] | None
"""A number, a distribution, or a number for each combination of labels' values.
``None`` is unknown, and is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """A metric."""

    name: str
    """Name after the prefix and the part, with its unit; without ``_total``."""
    kind: Kind
    """Kind of the metric in Prometheus."""
    help: str
    """Description for readers."""
    read: Callable[[Any], Values]
    """Returns the values in the statistics of the part."""
    labels: tuple[str, ...] = ()
    """Names of the labels."""


def exported_name(part: str, row: MetricRow) -> str:
    """Returns the name of a metric in Prometheus.

    Examples:
        >>> exported_name("engine", ROWS["engine"][0])
        'torchrl_sglang_engine_requests_in_flight'
    """
    end = "_total" if row.kind == "counter" else ""
    return f"{PREFIX}_{part}_{row.name}{end}"


def _number(version: str) -> float | None:
    """Returns a weight version as a number; ``None`` for other versions."""
    return float(version) if version.isdecimal() else None


def _of_servers(name: str) -> Callable[[EngineStats], Values]:
    return lambda stats: {(s.url,): getattr(s, name) for s in stats.servers}


def _server_states(stats: EngineStats) -> Values:
    return {
        (server.url, state): float(server.state.partition(":")[0] == state)
        for server in stats.servers
        for state in SERVER_STATES
    }


def as_distribution(ages: Mapping[int, int]) -> Distribution:
    """Returns the ages of tokens as a distribution.

    Examples:
        >>> as_distribution({0: 5, 5: 2}).counts
        (5, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0)
    """
    counts = [0] * (len(AGE_BOUNDS) + 1)
    for age, count in ages.items():
        place = sum(bound < age for bound in AGE_BOUNDS)
        counts[place] += count
    total = float(sum(age * count for age, count in ages.items()))
    return Distribution(bounds=AGE_BOUNDS, counts=tuple(counts), total=total)


_ENGINE = (
    MetricRow(
        name="requests_in_flight",
        kind="gauge",
        help="Requests of this engine object that were sent and are not answered.",
        read=lambda stats: stats.in_flight,
    ),
    MetricRow(
        name="requests_queued",
        kind="gauge",
        help="Requests of this engine object that wait to be sent.",
        read=lambda stats: stats.queued,
    ),
    MetricRow(
        name="responses",
        kind="counter",
        help="Finished responses.",
        read=lambda stats: stats.completed,
    ),
    MetricRow(
        name="retries",
        kind="counter",
        help="Requests that were sent again after a failure.",
        read=lambda stats: stats.retries,
    ),
    MetricRow(
        name="retractions",
        kind="counter",
        help="Requests that servers computed again.",
        read=lambda stats: stats.retractions,
    ),
    MetricRow(
        name="prompt_tokens",
        kind="counter",
        help="Tokens of the prompts of finished responses.",
        read=lambda stats: stats.prompt_tokens,
    ),
    MetricRow(
        name="cached_prompt_tokens",
        kind="counter",
        help="Prompt tokens that came from the prefix cache.",
        read=lambda stats: stats.cached_tokens,
    ),
    MetricRow(
        name="response_tokens",
        kind="counter",
        help="Generated tokens.",
        read=lambda stats: stats.response_tokens,
    ),
    MetricRow(
        name="weight_version",
        kind="gauge",
        help="Version of the weights, where it is a number.",
        read=lambda stats: _number(stats.weight_version),
    ),
    MetricRow(
        name="request_duration_seconds",
        kind="histogram",
        help="Time from sending a request to a server until its response was read.",
        read=lambda stats: stats.request_seconds,
    ),
    MetricRow(
        name="queue_duration_seconds",
        kind="histogram",
        help="Time in a server's queue, of servers with enable_metrics.",
        read=lambda stats: stats.queue_seconds,
    ),
    MetricRow(
        name="first_token_seconds",
        kind="histogram",
        help="Time until a server had the first token, if it has enable_metrics.",
        read=lambda stats: stats.first_token_seconds,
    ),
    MetricRow(
        name="response_length_tokens",
        kind="histogram",
        help="Tokens of a finished response.",
        read=lambda stats: stats.response_lengths,
    ),
    MetricRow(
        name="server_state",
        kind="gauge",
        help="1 for the state that a server is in, 0 for the others.",
        labels=("server", "state"),
        read=_server_states,
    ),
    MetricRow(
        name="server_running_requests",
        kind="gauge",
        help="Running requests of a server, of all its users.",
        labels=("server",),
        read=_of_servers("running"),
    ),
    MetricRow(
        name="server_queued_requests",
        kind="gauge",
        help="Requests in a server's queue, of all its users.",
        labels=("server",),
        read=_of_servers("queued"),
    ),
    MetricRow(
        name="server_kv_cache_usage_ratio",
        kind="gauge",
        help="Share of a server's KV cache that is in use.",
        labels=("server",),
        read=_of_servers("cache_usage"),
    ),
    MetricRow(
        name="server_restarts",
        kind="counter",
        help="Restarts of a server by this engine.",
        labels=("server",),
        read=_of_servers("restarts"),
    ),
)

_COLLECTOR = (
    MetricRow(
        name="batches",
        kind="counter",
        help="Batches that were taken.",
        read=lambda stats: stats["batches"],
    ),
    MetricRow(
        name="turns",
        kind="counter",
        help="Turns that were taken.",
        read=lambda stats: stats["frames"],
    ),
    MetricRow(
        name="tokens",
        kind="counter",
        help="Response tokens of complete groups.",
        read=lambda stats: stats["tokens"],
    ),
    MetricRow(
        name="policy_version",
        kind="gauge",
        help="Number of weight updates so far.",
        read=lambda stats: stats["policy_version"],
    ),
    MetricRow(
        name="groups",
        kind="gauge",
        help="Groups that run, and complete ones that wait to be taken.",
        labels=("state",),
        read=lambda stats: {
            ("running",): stats["groups_running"],
            ("ready",): stats["groups_ready"],
        },
    ),
    MetricRow(
        name="groups_dropped",
        kind="counter",
        help="Groups that were too old, given up, or not kept by keep_group.",
        labels=("reason",),
        read=lambda stats: {
            (reason,): stats[f"groups_{reason}"]
            for reason in ("stale", "failed", "filtered")
        },
    ),
    MetricRow(
        name="groups_retried",
        kind="counter",
        help="Groups that started again after an error.",
        read=lambda stats: stats["groups_retried"],
    ),
    MetricRow(
        name="conversations",
        kind="gauge",
        help="Conversations that wait for the engine, and all others.",
        labels=("state",),
        read=lambda stats: {
            ("generating",): stats["conversations_in_flight"],
            ("waiting",): stats["conversations_waiting"],
        },
    ),
    MetricRow(
        name="engine_idle_ratio",
        kind="gauge",
        help="Share of the recent time without a request in flight.",
        read=lambda stats: stats["lately"]["engine_idle"],
    ),
    MetricRow(
        name="trainer_waiting_ratio",
        kind="gauge",
        help="Share of the recent time in which a batch was waited for.",
        read=lambda stats: stats["lately"]["trainer_waits"],
    ),
    MetricRow(
        name="group_duration_seconds",
        kind="histogram",
        help="Time from a group's start to its end, rewards included.",
        read=lambda stats: stats["group_seconds"],
    ),
    MetricRow(
        name="token_age_updates",
        kind="histogram",
        help="Age of the tokens that were taken, in weight updates.",
        read=lambda stats: as_distribution(stats["age"]),
    ),
)

_GATEWAY = (
    MetricRow(
        name="sessions",
        kind="gauge",
        help="Sessions that there are.",
        read=lambda stats: stats["sessions"],
    ),
    MetricRow(
        name="responses_in_flight",
        kind="gauge",
        help="Responses under way.",
        read=lambda stats: stats["generating"],
    ),
    MetricRow(
        name="turns",
        kind="counter",
        help="Recorded turns, in dropped sessions too.",
        read=lambda stats: stats["turns"],
    ),
    MetricRow(
        name="tokens",
        kind="counter",
        help="Generated tokens of recorded turns.",
        read=lambda stats: stats["tokens"],
    ),
    MetricRow(
        name="branches",
        kind="counter",
        help="Requests that began a branch, by why they did not go on from a turn.",
        labels=("reason",),
        read=lambda stats: {
            (str(reason),): count for reason, count in stats["branches"].items()
        },
    ),
)

_WEIGHTS = (
    MetricRow(
        name="updates",
        kind="counter",
        help="Weight updates that succeeded.",
        labels=("transport",),
        read=lambda stats: {(name,): n for name, n in stats.updates.items()},
    ),
    MetricRow(
        name="update_failures",
        kind="counter",
        help="Weight updates that raised an error.",
        read=lambda stats: stats.failures,
    ),
    MetricRow(
        name="update_bytes",
        kind="counter",
        help="Bytes of weights that were sent.",
        read=lambda stats: stats.num_bytes,
    ),
    MetricRow(
        name="update_duration_seconds",
        kind="histogram",
        help="Duration of a weight update that succeeded.",
        read=lambda stats: stats.seconds,
    ),
    MetricRow(
        name="update_phase_seconds",
        kind="counter",
        help="Seconds in each phase of weight updates.",
        labels=("phase",),
        read=lambda stats: {(name,): s for name, s in stats.phase_seconds.items()},
    ),
)

ROWS: Mapping[str, tuple[MetricRow, ...]] = {
    "engine": _ENGINE,
    "collector": _COLLECTOR,
    "gateway": _GATEWAY,
    "weights": _WEIGHTS,
}
"""Part -> its metrics."""

Stats: TypeAlias = EngineStats | UpdateStats | Mapping[str, Any]
"""Statistics of a part."""


def read_rows(part: str, stats: Stats) -> Iterator[tuple[MetricRow, Values]]:
    """Yields each metric of a part with its values."""
    for row in ROWS[part]:
        values = row.read(stats)
        if values is not None:
            yield row, values
