"""The table of metrics: name, kind, labels, and the statistic of a part.

Names and units follow Prometheus' conventions: base units, ``_total`` for counters.
Each has the prefix ``torchrl_sglang_`` and its part's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
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


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric."""

    kind: Kind
    """Kind of the metric in Prometheus."""
    help: str
    """Description for readers."""
    read: Callable[[Any], Values]
    """Returns the values in the statistics of the part."""
    labels: tuple[str, ...] = ()
    """Names of the labels."""


def exported_name(part: str, name: str) -> str:
    """Returns the name of a metric in Prometheus."""
    end = "_total" if ROWS[part][name].kind == "counter" else ""
    return f"{PREFIX}_{part}_{name}{end}"


def _number(version: str) -> float | None:
    """Returns a weight version as a number; ``None`` for other versions."""
    return float(version) if version.isdecimal() else None


def _of_servers(name: str) -> tuple[Callable[[EngineStats], Values], tuple[str]]:
    """Returns the reader and the label of a statistic of each server."""

    def read(stats: EngineStats) -> Values:
        return {(server.url,): getattr(server, name) for server in stats.servers}

    return read, ("server",)


def _by_label(values: Mapping[Any, float]) -> Values:
    return {(str(label),): value for label, value in values.items()}


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


_counter = partial(MetricRow, "counter")
_gauge = partial(MetricRow, "gauge")
_histogram = partial(MetricRow, "histogram")

_ENGINE = {
    "requests_in_flight": _gauge(
        "Requests of this engine object that were sent and are not answered.",
        attrgetter("in_flight"),
    ),
    "requests_queued": _gauge(
        "Requests of this engine object that wait to be sent.", attrgetter("queued")
    ),
    "responses": _counter("Finished responses.", attrgetter("completed")),
    "retries": _counter(
        "Requests that were sent again after a failure.", attrgetter("retries")
    ),
    "retractions": _counter(
        "Requests that servers computed again.", attrgetter("retractions")
    ),
    "prompt_tokens": _counter(
        "Tokens of the prompts of finished responses.", attrgetter("prompt_tokens")
    ),
    "cached_prompt_tokens": _counter(
        "Prompt tokens that came from the prefix cache.", attrgetter("cached_tokens")
    ),
    "response_tokens": _counter("Generated tokens.", attrgetter("response_tokens")),
    "weight_version": _gauge(
        "Version of the weights, where it is a number.",
        lambda stats: _number(stats.weight_version),
    ),
    "request_duration_seconds": _histogram(
        "Time from sending a request to a server until its response was read.",
        attrgetter("request_seconds"),
    ),
    "queue_duration_seconds": _histogram(
        "Time in a server's queue, of servers with enable_metrics.",
        attrgetter("queue_seconds"),
    ),
    "first_token_seconds": _histogram(
        "Time until a server had the first token, if it has enable_metrics.",
        attrgetter("first_token_seconds"),
    ),
    "response_length_tokens": _histogram(
        "Tokens of a finished response.", attrgetter("response_lengths")
    ),
    "server_state": _gauge(
        "1 for the state that a server is in, 0 for the others.",
        _server_states,
        ("server", "state"),
    ),
    "server_running_requests": _gauge(
        "Running requests of a server, of all its users.", *_of_servers("running")
    ),
    "server_queued_requests": _gauge(
        "Requests in a server's queue, of all its users.", *_of_servers("queued")
    ),
    "server_kv_cache_usage_ratio": _gauge(
        "Share of a server's KV cache that is in use.", *_of_servers("cache_usage")
    ),
    "server_restarts": _counter(
        "Restarts of a server by this engine.", *_of_servers("restarts")
    ),
}

_COLLECTOR = {
    "batches": _counter("Batches that were taken.", itemgetter("batches")),
    "turns": _counter("Turns that were taken.", itemgetter("frames")),
    "tokens": _counter("Response tokens of complete groups.", itemgetter("tokens")),
    "policy_version": _gauge(
        "Number of weight updates so far.", itemgetter("policy_version")
    ),
    "groups": _gauge(
        "Groups that run, and complete ones that wait to be taken.",
        lambda stats: {
            ("running",): stats["groups_running"],
            ("ready",): stats["groups_ready"],
        },
        ("state",),
    ),
    "groups_dropped": _counter(
        "Groups that were too old, given up, or not kept by keep_group.",
        lambda stats: {
            (reason,): stats[f"groups_{reason}"]
            for reason in ("stale", "failed", "filtered")
        },
        ("reason",),
    ),
    "groups_retried": _counter(
        "Groups that started again after an error.", itemgetter("groups_retried")
    ),
    "conversations": _gauge(
        "Conversations that wait for the engine, and all others.",
        lambda stats: {
            ("generating",): stats["conversations_in_flight"],
            ("waiting",): stats["conversations_waiting"],
        },
        ("state",),
    ),
    "engine_idle_ratio": _gauge(
        "Share of the recent time without a request in flight.",
        lambda stats: stats["lately"]["engine_idle"],
    ),
    "trainer_waiting_ratio": _gauge(
        "Share of the recent time in which a batch was waited for.",
        lambda stats: stats["lately"]["trainer_waits"],
    ),
    "group_duration_seconds": _histogram(
        "Time from a group's start to its end, rewards included.",
        itemgetter("group_seconds"),
    ),
    "token_age_updates": _histogram(
        "Age of the tokens that were taken, in weight updates.",
        lambda stats: as_distribution(stats["age"]),
    ),
}

_GATEWAY = {
    "sessions": _gauge("Sessions that there are.", itemgetter("sessions")),
    "responses_in_flight": _gauge("Responses under way.", itemgetter("generating")),
    "turns": _counter("Recorded turns, in dropped sessions too.", itemgetter("turns")),
    "tokens": _counter("Generated tokens of recorded turns.", itemgetter("tokens")),
    "branches": _counter(
        "Requests that began a branch, by why they did not go on from a turn.",
        lambda stats: _by_label(stats["branches"]),
        ("reason",),
    ),
}

_WEIGHTS = {
    "updates": _counter(
        "Weight updates that succeeded.",
        lambda stats: _by_label(stats.updates),
        ("transport",),
    ),
    "update_failures": _counter(
        "Weight updates that raised an error.", attrgetter("failures")
    ),
    "update_bytes": _counter(
        "Bytes of weights that were sent.", attrgetter("num_bytes")
    ),
    "update_duration_seconds": _histogram(
        "Duration of a weight update that succeeded.", attrgetter("seconds")
    ),
    "update_phase_seconds": _counter(
        "Seconds in each phase of weight updates.",
        lambda stats: _by_label(stats.phase_seconds),
        ("phase",),
    ),
}

ROWS: Mapping[str, Mapping[str, MetricRow]] = {
    "engine": _ENGINE,
    "collector": _COLLECTOR,
    "gateway": _GATEWAY,
    "weights": _WEIGHTS,
}
"""Part -> name of a metric after the prefix and the part, without ``_total`` -> it."""

Stats: TypeAlias = EngineStats | UpdateStats | Mapping[str, Any]
"""Statistics of a part."""
