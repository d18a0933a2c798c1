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
"""Names in modules that start a server or a process, or wait for one."""

RANKS = re.compile(r"\b(run_ranks|start_patiently|torch\.distributed\.run)\b")
"""Names in single tests, and in fixtures, that start ranks of torchrun or Ray."""


@functools.cache
def place(path: Path) -> int:
    """Returns the place of a file in a run: ranks, then servers, then all others.

    The long files come first, so that no worker has one alone at the end.
    """
    text = path.read_text()
    kinds = (RANKS, STARTS)
    return next((i for i, names in enumerate(kinds) if names.search(text)), len(kinds))


@functools.cache
def starts_something(path: Path) -> bool:
    """Returns whether a module of tests starts something; it is not imported then."""
    return path.suffix == ".py" and STARTS.search(path.read_text()) is not None


def starts_nothing(item: pytest.Item) -> bool:
    """Returns whether neither a test nor its module nor a fixture starts anything."""
    if not isinstance(item, pytest.Function) or starts_something(item.path):
        return False
    if item.get_closest_marker("servers") or _starts(item.function):
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
    source = inspect.getsource(function)
    return any(names.search(source) for names in (STARTS, RANKS))
