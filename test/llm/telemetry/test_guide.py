"""The guide lists every metric as it is exported."""

from __future__ import annotations

import re
from pathlib import Path

from torchrl_sglang.telemetry.rows import PREFIX, ROWS, exported_name

GUIDE = Path(__file__).parents[3] / "docs/source/guides/metrics.rst"
LINE = re.compile(r"   \* - ``(\w+)``(?: \(([\w, ]+)\))?\n     - (\w+)\n     - (.+)\n")


def test_every_metric_has_a_line():
    listed = [match.groups() for match in LINE.finditer(GUIDE.read_text())]
    rows = [
        (
            exported_name(part, name).removeprefix(f"{PREFIX}_"),
            ", ".join(row.labels) or None,
            row.kind,
            row.help,
        )
        for part, rows in ROWS.items()
        for name, row in rows.items()
    ]
    assert listed[0][0] == "up"
    assert listed[1:] == rows
