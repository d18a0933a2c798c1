"""Specifications of Vega-Lite for curves and timelines.

Colours, fonts and sizes for light or dark are in ``static/page.js``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.viewer.curves import Curve
from torchrl_sglang.viewer.run import Bar, RunData
from torchrl_sglang.viewer.timeline import STATES, in_flight

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"

LANE_PIXELS = 26
"""Height of a lane."""

CURVE_PIXELS = 190
"""Height of a curve."""


def timeline_spec(
    run: RunData, lanes: Mapping[str, Sequence[Bar]]
) -> dict[str, Any] | None:
    """Returns the specification of a run's lanes; ``None`` if it recorded none."""
    bars = [
        {
            "lane": lane,
            "state": bar.name,
            "from": round(bar.began - run.began, 4),
            "to": round(bar.ended - run.began, 4),
            "seconds": round(bar.ended - bar.began, 4),
            "about": bar.about,
        }
        for lane, bars_of_lane in lanes.items()
        for bar in bars_of_lane
    ]
    if not bars:
        return None
    names = list(dict.fromkeys(str(bar["lane"]) for bar in bars))
    return {
        "$schema": SCHEMA,
        "description": f"Lanes of {', '.join(names)} over time.",
        "width": "container",
        "height": LANE_PIXELS * len(names),
        "data": {"values": bars},
        "mark": {"type": "bar", "height": {"band": 0.86}},
        "encoding": {
            "x": _time_axis("from", run),
            "x2": {"field": "to"},
            "y": {
                "field": "lane",
                "type": "nominal",
                "sort": names,
                "title": None,
                "axis": {"minExtent": 60, "maxExtent": 60},
            },
            "color": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": [s for s in STATES if _has(bars, s)]},
                "legend": {"title": None, "orient": "bottom", "columns": 0},
            },
            "tooltip": [
                {"field": "lane", "title": "lane"},
                {"field": "state", "title": "state"},
                {"field": "from", "title": "from, s", "format": ",.3f"},
                {"field": "seconds", "title": "seconds", "format": ",.3f"},
                {"field": "about", "title": "about"},
            ],
        },
    }


def _has(bars: Sequence[dict[str, Any]], state: str) -> bool:
    return any(bar["state"] == state for bar in bars)


def _time_axis(field: str, run: RunData) -> dict[str, Any]:
    return {
        "field": field,
        "type": "quantitative",
        "title": "seconds since the start",
        "scale": {"domain": [0, max(run.ended - run.began, 1e-3)], "nice": False},
        "axis": {"tickCount": 8},
    }


def in_flight_spec(run: RunData) -> dict[str, Any] | None:
    """Returns the specification of groups in flight; ``None`` if none are recorded."""
    points = [
        {"time": round(time - run.began, 4), "groups": count}
        for time, count in in_flight(run)
    ]
    if not points:
        return None
    return {
        "$schema": SCHEMA,
        "description": "Groups in flight over time.",
        "title": {"text": "groups in flight", "anchor": "start", "frame": "group"},
        "width": "container",
        "height": 90,
        "data": {"values": points},
        "mark": {
            "type": "area",
            "interpolate": "step-after",
            "line": True,
            "opacity": 0.5,
            "tooltip": True,
        },
        "encoding": {
            "x": _time_axis("time", run),
            "y": {
                "field": "groups",
                "type": "quantitative",
                "title": None,
                "stack": None,
                # As wide as the names of lanes: both have the same times.
                "axis": {"minExtent": 60, "tickCount": 4, "tickMinStep": 1},
            },
        },
    }


def _format(values: Sequence[float]) -> str:
    """Returns a format to distinguish the ticks between values.

    Examples:
        >>> _format([0.1, 0.5]), _format([0.99985, 1.0]), _format([0, 20_000])
        ('.3~g', '.6~g', '~s')
    """
    largest = max(map(abs, values), default=0.0)
    if largest >= 1000:
        return "~s"
    spread = max(values, default=0.0) - min(values, default=0.0)
    digits = math.ceil(math.log10(largest / spread)) + 2 if spread else 3
    return f".{min(max(digits, 3), 9)}~g"


def curve_spec(curve: Curve) -> dict[str, Any]:
    """Returns the specification of a curve; dashes distinguish runs."""
    runs = list(dict.fromkeys(point["run"] for point in curve.points))
    values = list(curve.points)
    if curve.beside and len(runs) > 1:
        values = [{**p, "line": f"{p['run']}, {p['line']}"} for p in values]
    kind = ".1~%" if curve.percent else _format([p["y"] for p in curve.points])
    y: dict[str, Any] = {
        "field": "y",
        "type": "quantitative",
        "title": curve.y or None,
        "axis": {"format": kind, "tickCount": 5},
        "scale": {"zero": curve.stacked},
    }
    if curve.percent:
        y["scale"] = {"domainMin": 0, "zero": True}
    encoding: dict[str, Any] = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": curve.x,
            "axis": {"tickCount": 6, "tickMinStep": 1},
            "scale": {"zero": False, "nice": False},
        },
        "y": y,
        "color": {
            "field": "line",
            "type": "nominal",
            "sort": None,
            "legend": {"title": None, "orient": "bottom", "columns": 2},
        },
        "tooltip": [
            {"field": "line", "title": "line"},
            {"field": "x", "title": curve.x, "format": ",.6~g"},
            {"field": "y", "title": curve.y or "value", "format": ",.6~g"},
        ],
    }
    if len(runs) > 1:
        encoding["strokeDash"] = {
            "field": "run",
            "type": "nominal",
            "sort": runs,
            "legend": {"title": None, "orient": "bottom"},
        }
        encoding["tooltip"].insert(0, {"field": "run", "title": "run"})
    spec: dict[str, Any] = {
        "$schema": SCHEMA,
        "description": f"{curve.title}. {curve.about}",
        "width": "container",
        "height": CURVE_PIXELS,
        "data": {"values": values},
        "encoding": encoding,
    }
    if curve.stacked or curve.beside:
        encoding["x"] |= {
            "type": "ordinal",
            "axis": {"labelOverlap": True, "labelAngle": 0},
        }
        del encoding["x"]["scale"]
        encoding.pop("strokeDash", None)
        if curve.beside:
            encoding["xOffset"] = {"field": "line", "sort": None}
        elif len(runs) > 1:
            encoding["xOffset"] = {"field": "run"}
        return {**spec, "mark": {"type": "bar"}}
    many = len(curve.points) > 60
    return {**spec, "mark": {"type": "line", "point": not many, "tooltip": True}}
