"""Cases of matrices that `make test` leaves to `make test-slow`."""

from __future__ import annotations

import pytest

older_engine_is_slow = pytest.mark.parametrize(
    "any_engine",
    ["sessions", pytest.param("no sessions", marks=pytest.mark.slow)],
    indirect=True,
)
"""Runs with the older generation of SGLang as a slow case."""
