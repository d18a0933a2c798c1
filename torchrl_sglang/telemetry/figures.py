"""Figures of a step for a logger: activity of parts since the last step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torchrl_sglang.telemetry.parts import make_readers, read_all
from torchrl_sglang.types import Distribution, EngineStats, UpdateStats


class StepFigures:
    """Reads the figures of a step, for a call of a logger's ``log_metrics``.

    Names are grouped in panels: ``engine/``, ``rollout/``, ``staleness/``, ``weights/``
    and ``gateway/``. Totals are counted since the last call. Each call queries the
    servers once; a dead or slow part is left out, and nothing is raised.

    Keyword Args:
        engine: an :class:`.AsyncSGLang`.
        collector: an :class:`.AsyncLLMCollector`, here or in a Ray actor.
        gateway: a :class:`.Gateway`.
        scheme: an :class:`.SGLangWeightSyncScheme`, or its sender.
        timeout: timeout of all statistics, in seconds. Defaults to 2.

    Raises:
        ConfigurationError: if there is no part, or a part has no statistics.

    Examples:
        >>> figures = StepFigures(engine=engine)
        >>> step = figures.read()
        >>> "engine/tokens_per_second" in step, "engine/servers_serving" in step
        (True, True)
    """

    def __init__(
        self,
        *,
        engine: Any = None,
        collector: Any = None,
        gateway: Any = None,
        scheme: Any = None,
        timeout: float = 2.0,
    ) -> None:
        self._readers = make_readers(
            engine=engine, collector=collector, gateway=gateway, weights=scheme
        )
        self._timeout = timeout
        # Part -> monotonic time and statistics of the last reading.
        self._before: dict[str, tuple[float, Any]] = {}
        # Earlier activity does not count.
        self.read()

    def read(self) -> dict[str, float]:
        """Returns the figures since the last call, or since the construction.

        A part's figures need two readings: after a failed first reading, such as of a
        slow part, there are none.
        """
        figures: dict[str, float] = {}
        stats = read_all(self._readers.values(), self._timeout)
        for name, now in stats.items():
            if now is None:
                continue
            time_now, reading = time.monotonic(), self._before.get(name)
            self._before[name] = time_now, now
            if reading is None:
                continue
            seconds = max(time_now - reading[0], 1e-9)
            compute = partial(_known, name, now, reading[1], seconds)
            figures |= self._readers[name].attempt(compute) or {}
        return figures


Figures = Iterator[tuple[str, float | None]]


def _known(part: str, now: Any, before: Any, seconds: float) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in _FIGURES[part](now, before, seconds)
        if value is not None and math.isfinite(value)
    }


def engine_figures(
    now: EngineStats, before: EngineStats | None, seconds: float
) -> Figures:
    """Yields the figures of an engine between two readings.

    Without an earlier reading, they count from its start.
    """

    def more(name: str) -> float:
        return float(getattr(now, name) - (getattr(before, name) if before else 0))

    yield "engine/tokens_per_second", more("response_tokens") / seconds
    yield "engine/responses", more("completed")
    prompts = more("prompt_tokens")
    yield "engine/cache_hit_rate", more("cached_tokens") / prompts if prompts else None
    for name in ("retries", "retractions", "restarts"):
        yield f"engine/{name}", more(name)
    for name in ("request_seconds", "queue_seconds", "first_token_seconds"):
        earlier = getattr(before, name) if before else None
        yield from _of_distribution(f"engine/{name}", getattr(now, name), earlier)
    yield "engine/in_flight", now.in_flight
    states = [server.state for server in now.servers]
    yield "engine/servers", len(states)
    yield "engine/servers_serving", states.count("serving")
    for name, combine in (("running", sum), ("queued", sum), ("cache_usage", max)):
        values = [getattr(server, name) for server in now.servers]
        present = [value for value in values if value is not None]
        yield f"engine/{name}", combine(present) if present else None


def collector_figures(
    now: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float
) -> Figures:
    """Yields the figures of a collector; see :func:`engine_figures`."""
    earlier = before or {}
    lately = now["lately"]
    new_tokens = now["tokens"] - earlier.get("tokens", 0)
    yield "rollout/tokens_per_second", new_tokens / seconds
    for name in ("trainer_waits", "engine_idle"):
        yield f"rollout/{name}", lately[name]
    for name in ("conversations", "conversations_in_flight"):
        yield f"rollout/{name}", lately[name]
    for name in ("groups_running", "groups_ready"):
        yield f"rollout/{name}", now[name]
    for name in ("groups_stale", "groups_retried", "groups_failed", "groups_filtered"):
        yield f"rollout/{name}", now[name] - earlier.get(name, 0)
    yield from _of_distribution(
        "rollout/group_seconds", now["group_seconds"], earlier.get("group_seconds")
    )
    for name, key in (
        ("tokens", "age"),
        ("in_flight", "age_in_flight"),
        ("in_queue", "age_in_queue"),
    ):
        old = earlier.get(key, {})
        ages = {age: n - old.get(age, 0) for age, n in now[key].items()}
        count = sum(ages.values())
        if count:
            mean = sum(age * n for age, n in ages.items()) / count
            yield f"staleness/{name}_mean", mean
            yield f"staleness/{name}_max", max(age for age, n in ages.items() if n)


def gateway_figures(
    now: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float
) -> Figures:
    """Yields the figures of a gateway; see :func:`engine_figures`."""
    earlier = before or {}
    yield "gateway/sessions", now["sessions"]
    yield "gateway/in_flight", now["generating"]
    turns = now["turns"] - earlier.get("turns", 0)
    tokens = now["tokens"] - earlier.get("tokens", 0)
    yield "gateway/turns", turns
    yield "gateway/tokens_per_turn", tokens / turns if turns else None
    old = earlier.get("branches", {})
    for reason, count in now["branches"].items():
        yield f"gateway/branches_{reason}", count - old.get(reason, 0)


def weights_figures(
    now: UpdateStats, before: UpdateStats | None, seconds: float
) -> Figures:
    """Yields the figures of a sender; see :func:`engine_figures`.

    Seconds and bytes are of the last update, if there was any in between.
    """
    done = sum(now.updates.values())
    updates = done - (sum(before.updates.values()) if before else 0)
    yield "weights/updates", updates
    yield "weights/failures", now.failures - (before.failures if before else 0)
    if not updates or now.last is None:
        return
    yield "weights/seconds", now.last.seconds
    for phase, phase_seconds in now.last.phase_seconds.items():
        yield f"weights/{phase}_seconds", phase_seconds
    yield "weights/bytes", now.last.num_bytes
    yield "weights/gb_per_second", now.last.gb_per_second
    version = now.last.version
    yield "weights/version", float(version) if version.isdecimal() else None


def _of_distribution(
    name: str, now: Distribution, before: Distribution | None
) -> Figures:
    new = now.since(before)
    yield f"{name}_mean", new.mean
    yield f"{name}_p90", new.quantile(0.9)


_FIGURES: Mapping[str, Callable[[Any, Any, float], Figures]] = {
    "engine": engine_figures,
    "collector": collector_figures,
    "gateway": gateway_figures,
    "weights": weights_figures,
}
"""Part -> its figures between two readings."""
