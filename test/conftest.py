"""Quick starts of SGLang servers, and a home for their logs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Deletes the logs that servers leave behind whose starts failed."""
    # pytest's own folder stays where it is.
    tmp_path_factory.getbasetemp()
    with (
        # Short, for the paths of sockets.
        tempfile.TemporaryDirectory(prefix="t_", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
