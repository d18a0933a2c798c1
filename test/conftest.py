"""Quick starts of SGLang servers, shared by all workers of a test run."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from helpers.forked_starts import forked_starts

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.errors import ConfigurationError


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # A worker inherits TORCHRL_SGLANG_PYTHON.
        return
    try:
        cpu.engine_python()
    except ConfigurationError:
        # A machine for the tests that need a GPU.
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    stack.enter_context(forked_starts())
