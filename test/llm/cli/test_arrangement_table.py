"""The table of the guide is what the formulas say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "source"


@pytest.mark.slow
def test_the_page_has_todays_table():
    written = runpy.run_path(str(DOCS / "arrangement_table.py"))
    page = written["PAGE"].read_text()
    assert written["make_page"](page) == page, (
        "The formulas of plan have changed: run docs/source/arrangement_table.py."
    )
