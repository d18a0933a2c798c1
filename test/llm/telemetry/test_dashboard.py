"""The Grafana dashboard asks for metrics that are exported, by their labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_sglang.telemetry.rows import PREFIX, ROWS, exported_name

promql_parser = pytest.importorskip("promql_parser")

DASHBOARD = Path(__file__).parents[3] / "docs/source/_static/grafana_dashboard.json"
PANELS = json.loads(DASHBOARD.read_text())["panels"]
TARGETS = [target for panel in PANELS for target in panel.get("targets", ())]

HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")

SGLANG = {"sglang:gen_throughput", "sglang:token_usage", "sglang:num_queue_reqs"}
"""Metrics of SGLang; ``test_metrics.py`` asks a server for them."""


def exported() -> dict[str, set[str]]:
    """Returns the series of the table, with the names of their labels."""
    found = {f"{PREFIX}_up": {"part"}}
    for part, rows in ROWS.items():
        for key, row in rows.items():
            name, labels = exported_name(part, key), set(row.labels)
            if row.kind == "histogram":
                found |= {name + end: labels for end in HISTOGRAM_PARTS}
                found[f"{name}_bucket"] = labels | {"le"}
            else:
                found[name] = labels
    return found


def selectors(expression: Any) -> Iterator[Any]:
    """Yields the selectors of an expression, as the parser of PromQL finds them."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("vector_selector", "expr", "lhs", "rhs", "args"):
        inner = getattr(expression, name, None)
        for each in inner if isinstance(inner, list) else [inner]:
            if each is not None:
                yield from selectors(each)


def grouped_by(expression: Any) -> set[str]:
    """Returns the labels that an aggregation keeps."""
    modifier = getattr(expression, "modifier", None)
    found = set(getattr(modifier, "labels", ()) or ())
    for name in ("expr", "lhs", "rhs", "args"):
        inner = getattr(expression, name, None)
        for each in inner if isinstance(inner, list) else [inner]:
            if each is not None:
                found |= grouped_by(each)
    return found


def test_every_expression_reads_exported_series_by_their_labels():
    series, offenders = exported(), []
    for target in TARGETS:
        parsed = promql_parser.parse(target["expr"])
        found = list(selectors(parsed))
        assert found, target
        shown = re.findall(r"{{(part|server|state)}}", target["legendFormat"])
        labels = {*shown} | grouped_by(parsed) - {"le"}
        for selector in found:
            needed = labels | {each.name for each in selector.matchers.matchers}
            known = series.get(selector.name, needed)
            if selector.name not in series.keys() | SGLANG or needed - known:
                offenders.append((target["expr"], selector.name, needed - known))
    assert offenders == []


def test_rates_are_of_counters_and_quantiles_of_buckets():
    offenders = []
    for expression in (target["expr"] for target in TARGETS):
        for selector in selectors(promql_parser.parse(expression)):
            is_total = selector.name.endswith(("_total", *HISTOGRAM_PARTS))
            is_rated = re.search(rf"(rate|increase)\({selector.name}", expression)
            # A total may be shown as it is; nothing else may be rated.
            if is_rated and not is_total:
                offenders.append(expression)
            is_bucket = selector.name.endswith("_bucket")
            if "histogram_quantile" in expression and not is_bucket:
                offenders.append(expression)
    assert offenders == []


def test_every_exported_metric_is_on_the_dashboard():
    shown = {
        selector.name
        for panel in PANELS
        for target in panel.get("targets", ())
        for selector in selectors(promql_parser.parse(target["expr"]))
    }
    annotations = json.loads(DASHBOARD.read_text())["annotations"]["list"]
    shown |= {
        selector.name
        for each in annotations
        for selector in selectors(promql_parser.parse(each["expr"]))
    }
    for part, rows in ROWS.items():
        for key in rows:
            name = exported_name(part, key)
            series = {name + end for end in ("", *HISTOGRAM_PARTS)}
            assert series & shown, name


def test_panels_do_not_overlap():
    taken = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
