"""Page of a run or two, as data and as a self-contained HTML file."""

from __future__ import annotations

import html
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import accumulate
from typing import Any

import msgspec

from torchrl_sglang.recording.format import HELD_OUT
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.support.garbage import collect_garbage_afterwards
from torchrl_sglang.viewer.advice import advise, figures_of
from torchrl_sglang.viewer.charts import curve_spec, in_flight_spec, timeline_spec
from torchrl_sglang.viewer.curves import MOST_OTHERS, Curve, curves_of, down_sample
from torchrl_sglang.viewer.groups import (
    FILTERS,
    choose,
    conversations_of,
    counts_of,
    table_of,
)
from torchrl_sglang.viewer.library import library
from torchrl_sglang.viewer.run import RunData, read_run
from torchrl_sglang.viewer.timeline import lanes

MOST_BYTES = 8_000_000
"""Size of all runs' conversations in a file, in bytes of the page."""

TABLE_ROWS = 200
"""Most rows of the table of numbers under a chart, the last rows."""


def names_of(recordings: Sequence[Recording]) -> list[str]:
    """Returns a unique name for each run."""
    names = [recording.folder.name for recording in recordings]
    if "record" in names:
        names = [
            recording.folder.parent.name if name == "record" else name
            for recording, name in zip(recordings, names, strict=True)
        ]
    if len(set(names)) < len(names):
        names = [str(recording.folder) for recording in recordings]
    # A folder's name may have bytes other than text.
    return [os.fsencode(name).decode("utf-8", "replace") for name in names]


def read_runs(recordings: Sequence[Recording]) -> list[RunData]:
    """Returns the runs of recordings under unique names."""
    names = names_of(recordings)
    return [read_run(r, n) for r, n in zip(recordings, names, strict=True)]


def page_data(runs: Sequence[RunData], *, now: float) -> dict[str, Any]:
    """Returns the content of a page, without the conversations of groups."""
    with collect_garbage_afterwards():
        merged = merge(runs)
        constant = [curve for curve in merged if curve.is_constant]
        return {
            "title": " and ".join(run.name for run in runs),
            "filters": [[name, *words] for name, words in FILTERS.items()],
            "runs": [_run(run, now) for run in runs],
            "curves": [_curve(curve) for curve in merged if not curve.is_constant],
            "differences": _differences(runs),
            "constants": [[curve.title, curve.points[-1]["y"]] for curve in constant],
        }


def _run(run: RunData, now: float) -> dict[str, Any]:
    table, bars = table_of(run), lanes(run)
    return {
        "name": run.name,
        "folder": run.folder,
        "live": run.is_live(now),
        "facts": _facts(run, table),
        "sentence": advise(figures_of(run, bars)),
        "notes": [*run.notes, *_left_out(run)],
        "settings": sorted(run.settings.items()),
        "progress": _progress(run),
        "failures": run.failures[-20:],
        "timeline": timeline_spec(run, bars),
        "in_flight": in_flight_spec(run),
        "groups": {**table, "counts": counts_of(table)},
    }


def _differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Returns the settings that runs do not share: name, and each run's value."""
    names = sorted({name for run in runs for name in run.settings})
    rows = [[name, *(run.settings.get(name, "") for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _progress(run: RunData) -> dict[str, list[tuple[float, float]]]:
    """Returns seconds of batches and of steps, and tokens of seconds, for axes."""
    counts: Counter[int] = Counter()
    for group in run.groups:
        if group.batch is not None and group.status != HELD_OUT:
            counts[group.batch] += group.line.tokens
    batches = {int(b["number"]): b["time"] - run.began for b in run.batches}
    totals = accumulate(counts[number] for number in batches)
    steps = {step: time - run.began for step, time in sorted(run.step_times.items())}
    lines = {
        "batch": list(batches.items()),
        "step": list(steps.items()),
        "tokens": list(zip(batches.values(), totals, strict=True)),
    }
    return {name: down_sample(points) for name, points in lines.items()}


def _left_out(run: RunData) -> list[str]:
    count = len(run.metrics)
    if count <= MOST_OTHERS:
        return []
    return [f"Of {count} metrics, at most {MOST_OTHERS} have curves of their own."]


def _facts(run: RunData, table: dict[str, Any]) -> list[list[str]]:
    tokens = sum(group.line.tokens for group in run.groups)
    seconds = max(run.ended - run.began, 0.0) if math.isfinite(run.began) else 0.0
    batches = len(run.batches)
    facts = {
        "time": _duration(seconds),
        "batches": f"{batches:,}",
        "groups": f"{table['total']:,}",
        "responses": f"{table['responses']:,}",
        "response tokens": f"{tokens:,}",
        "weight updates": f"{len(run.updates):,}",
        "failed groups": f"{len(run.failures):,}",
    }
    return [[name, value] for name, value in facts.items()]


def _duration(seconds: float) -> str:
    """Returns a duration in words.

    Examples:
        >>> _duration(3_725)
        '1 h 2 min'
    """
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def merge(runs: Sequence[RunData]) -> list[Curve]:
    """Returns the curves of all runs, a curve per figure."""
    curves: dict[tuple[str, str], Curve] = {}
    for run in runs:
        for curve in curves_of(run):
            is_metric = curve.is_metric
            # Numbers of metrics differ between runs, and names are arbitrary.
            key = ("metric", curve.title) if is_metric else ("", curve.id)
            points = [{**point, "run": run.name} for point in curve.points]
            merged = curves.get(key)
            if merged is not None:
                points = [*map(dict, merged.points), *points]
            elif is_metric:
                merged = replace(curve, id=f"metric-{len(curves)}")
            curves[key] = replace(merged or curve, points=points)
    return list(curves.values())


def _curve(curve: Curve) -> dict[str, Any]:
    runs = list(dict.fromkeys(point["run"] for point in curve.points))
    names = ["run"] if len(runs) > 1 else []
    names += ["line", "x", "y"]
    titles = {"x": curve.x, "y": curve.y or "value"}
    rows = [[point[name] for name in names] for point in curve.points[-TABLE_ROWS:]]
    return {
        "id": curve.id,
        "title": curve.title,
        "about": curve.about,
        "spec": curve_spec(curve),
        "columns": [titles.get(name, name) for name in names],
        "rows": rows,
        "points": len(curve.points),
    }


def page_html(title: str, data: str) -> str:
    """Returns the page; ``data``, its content as a script, is empty for a server's."""
    parts = {
        "title": html.escape(title),
        "style": _static("page.css"),
        "library": library(),
        "script": _static("page.js"),
        "data": data,
    }
    page = _static("page.html")
    for name, text in parts.items():
        head, mark, tail = page.partition(f"<!--{name}-->")
        assert mark, name
        page = f"{head}{text}{tail}"
    return page


def self_contained(recordings: Sequence[Recording], *, now: float) -> str:
    """Returns a page that needs no server, with the conversations of some groups."""
    runs = read_runs(recordings)
    conversations: dict[str, Any] = {}
    for place, (recording, run) in enumerate(zip(recordings, runs, strict=True)):
        for group in choose(run, MOST_BYTES // len(runs)):
            texts = conversations_of(recording, group)
            if texts is not None:
                conversations[f"{place}/{group.id}"] = texts
    data = page_data(runs, now=now)
    for run_of_page in data["runs"]:
        # Nothing updates it.
        run_of_page["live"] = False
    return page_html(data["title"], as_script({**data, "conversations": conversations}))


def as_script(value: Any) -> str:
    """Returns a value as JSON for a ``<script>``.

    Numbers without a JSON form are ``null``.
    """
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        # An incomplete character, from an edited line.
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        text = json.dumps(finite)
    # It must not begin tags or comments of HTML.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _static(name: str) -> str:
    path = resources.files("torchrl_sglang.viewer") / "static" / name
    return path.read_text(encoding="utf-8")
