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


def starts_nothing(item: pytest.Item) -> bool:
    """Returns whether neither a test's module nor a fixture of it starts anything."""
    if not isinstance(item, pytest.Function) or _starts(item.path.read_text()):
        return False
    found = item._fixtureinfo.name2fixturedefs.values()
    own = Path(__file__).parents[1]
    return not any(
        _starts_by(definition.func)
        for definitions in found
        for definition in definitions
        if own in Path(inspect.getfile(definition.func)).parents
    )


@functools.cache
def _starts(source: str) -> bool:
    return STARTS.search(source) is not None


@functools.cache
def _starts_by(function: Any) -> bool:
    return _starts(inspect.getsource(function))
