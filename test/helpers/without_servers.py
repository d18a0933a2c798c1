"""Finds the tests that start nothing, for the loop of somebody who changes a line."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

STARTS = re.compile(
    r"\b(AsyncSGLang|FakeServer|Gateway|make_sglang_\w+|start_servers|ray_cluster"
    r"|subprocess|socket|forked_\w+|trainer_python|getfixturevalue"
    r"|torch\.multiprocessing)\b"
)
"""Names of what starts a server or a process, or waits for one."""


@functools.cache
def starts_something(path: Path) -> bool:
    """Returns whether a module of tests starts something; it is not imported then."""
    return path.suffix == ".py" and STARTS.search(path.read_text()) is not None


def starts_nothing(item: pytest.Item) -> bool:
    """Returns whether neither a test's module nor a fixture of it starts anything."""
    if not isinstance(item, pytest.Function) or starts_something(item.path):
        return False
    found = item._fixtureinfo.name2fixturedefs.values()
    own = Path(__file__).parents[1]
    return not any(
        _starts(definition.func)
        for definitions in found
        for definition in definitions
        if own in Path(inspect.getfile(definition.func)).parents
    )


@functools.cache
def _starts(function: Any) -> bool:
    return STARTS.search(inspect.getsource(function)) is not None
