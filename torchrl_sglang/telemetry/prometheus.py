"""Families of Prometheus' client, made of statistics at each scrape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.telemetry.parts import STATS_SECONDS, make_readers, read_all
from torchrl_sglang.telemetry.rows import (
    PREFIX,
    ROWS,
    MetricRow,
    Stats,
    Values,
)
from torchrl_sglang.types import Distribution

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

UP = f"{PREFIX}_up"
"""Whether the statistics of a part are readable."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

_TAKEN = {
    "part",
    "le",
    *(name for rows in ROWS.values() for row in rows.values() for name in row.labels),
}
"""Labels of the metrics themselves."""


def check_installed() -> None:
    """Raises :class:`.ConfigurationError` if Prometheus' client is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "Metrics need the package prometheus_client: pip install prometheus-client."
        ) from error


class StatsFamilies:
    """A collector for Prometheus' client, which reads statistics at each scrape.

    Register it with your own registry to combine it with other metrics::

        prometheus_client.REGISTRY.register(StatsFamilies(engine=engine))

    It does not keep the parts alive; ``torchrl_sglang_up`` is 0 for parts gone, shut
    down or too slow.

    Keyword Args:
        engine: an :class:`.AsyncSGLang`.
        collector: an :class:`.AsyncLLMCollector`, here or in a Ray actor.
        gateway: a :class:`.Gateway`.
        scheme: an :class:`.SGLangWeightSyncScheme`, or its sender.
        labels: of all metrics, such as ``{"run": "sums"}``.
        timeout: timeout of the statistics of all parts, in seconds.

    Raises:
        ConfigurationError: if there is no part, or a part has no statistics.
    """

    def __init__(
        self,
        *,
        engine: Any = None,
        collector: Any = None,
        gateway: Any = None,
        scheme: Any = None,
        labels: Mapping[str, str] | None = None,
        timeout: float = STATS_SECONDS,
    ) -> None:
        check_installed()
        self._readers = make_readers(
            engine=engine, collector=collector, gateway=gateway, weights=scheme
        )
        self._labels = check_labels(labels)
        self._timeout = timeout

    def describe(self) -> Sequence[Metric]:
        """Returns nothing: a registry does not read statistics to check names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields the families of all parts."""
        from prometheus_client.core import GaugeMetricFamily

        stats = read_all(self._readers.values(), self._timeout)
        text = "1 if the statistics of a part could be read, and 0 otherwise."
        up = GaugeMetricFamily(UP, text, labels=[*self._labels, "part"])
        families = {
            name: self._readers[name].attempt(partial(self._of_part, name, part_stats))
            for name, part_stats in stats.items()
            if part_stats is not None
        }
        for name in stats:
            is_up = families.get(name) is not None
            up.add_metric([*self._labels.values(), name], float(is_up))
        yield up
        for rows in families.values():
            yield from rows or ()

    def _of_part(self, part: str, stats: Stats) -> list[Metric]:
        return [
            _family(f"{PREFIX}_{part}_{name}", row, values, self._labels)
            for name, row in ROWS[part].items()
            if (values := row.read(stats)) is not None
        ]


def _family(
    name: str, row: MetricRow, values: Values, labels: Mapping[str, str]
) -> Metric:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    names, values_of_labels = [*labels, *row.labels], list(labels.values())
    if isinstance(values, Distribution):
        histogram = HistogramMetricFamily(name, row.help, labels=names)
        histogram.add_metric(values_of_labels, _buckets(values), values.total)
        return histogram
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family = kind(name, row.help, labels=names)
    by_labels = values if isinstance(values, Mapping) else {(): values}
    for key, value in by_labels.items():
        if value is not None:
            family.add_metric([*values_of_labels, *key], float(value))
    return family


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    """Returns the cumulative counts up to each bound, in Prometheus' form."""
    bounds = [*map(str, values.bounds), "+Inf"]
    seen, buckets = 0, []
    for bound, count in zip(bounds, values.counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets


def check_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the labels of all metrics, if their names are valid and free."""
    checked = dict(labels or {})
    for name, value in checked.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _TAKEN:
            raise ConfigurationError(
                f"labels={checked!r}: a name of a label has letters, digits and '_', "
                f"does not begin with two of these, and is none of "
                f"{', '.join(sorted(_TAKEN))}; got {name!r}."
            )
        if not isinstance(value, str):
            raise ConfigurationError(
                f"labels={checked!r}: the value of {name!r} must be a text."
            )
    return checked


def write_text(families: StatsFamilies, accept: str) -> tuple[str, bytes]:
    """Returns the content type and the text of a scrape, as a client accepts it."""
    from prometheus_client.exposition import choose_encoder

    encode, kind = choose_encoder(accept)
    return kind, encode(make_registry(families))


def make_registry(families: StatsFamilies) -> CollectorRegistry:
    """Returns a registry with only these families."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return registry
