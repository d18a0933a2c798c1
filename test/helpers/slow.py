"""Cases of matrices that `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

older_engine_is_slow = pytest.mark.parametrize(
    "any_engine",
    ["sessions", pytest.param("no sessions", marks=pytest.mark.slow)],
    indirect=True,
)
"""Runs with the older generation of SGLang as a slow case."""


def diagonal(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Returns the pairs of a matrix for ``parametrize``.

    Pairs off a diagonal that has every row and every column are slow.
    """
    rows, columns = list(rows), list(columns)
    return [
        pytest.param(row, column, marks=[] if quick else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        for quick in [j == i % len(columns) or i == j % len(rows)]
    ]
