"""Quick starts of SGLang servers, and a home for their logs."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from helpers.forked_starts import forked_starts
from helpers.without_servers import place, starts_nothing, starts_something

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.watchdog import (
    SHARED_FILES,
    SHARED_MEMORY,
    shared_files,
)
from torchrl_sglang.errors import ConfigurationError

# Imports and collection make millions of objects and little garbage: without this, a
# third of their time is Python's garbage collector's.
gc.disable()

# Ray reads both when it is imported, as by TorchRL in the conftest.py of a folder.
# Without a token it writes one into the user's home.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray sets it in a process that starts a cluster: programs that were forked from one
# that had not would have another.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Ray's workers have a low priority otherwise, and starve beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-servers",
        action="store_true",
        help="run only the tests that start no server and no process",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--without-servers"):
        return None
    return True if starts_something(collection_path) else None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--without-servers"):
        left = [item for item in items if starts_nothing(item)]
        config.hook.pytest_deselected(items=[i for i in items if i not in {*left}])
        items[:] = left
    items.sort(key=lambda item: place(item.path))


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # A worker inherits TORCHRL_SGLANG_PYTHON.
        return
    if config.getoption("numprocesses", None):
        # The workers collect.
        gc.enable()
    try:
        cpu.engine_python()
    except ConfigurationError:
        # A machine for the tests that need a GPU.
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    stack.enter_context(shared_memory())
    stack.enter_context(forked_starts())


@contextmanager
def shared_memory() -> Iterator[None]:
    """Deletes the files there of forked servers, which are below no watchdog."""

    def found() -> set[str]:
        paths = Path(SHARED_MEMORY).iterdir()
        return {str(path) for path in paths if path.name.startswith(SHARED_FILES)}

    before = found()
    yield
    living = [int(each.name) for each in Path("/proc").glob("[0-9]*")]
    for path in found() - before - shared_files(living):
        with suppress(OSError):
            os.unlink(path)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Keeps what there is before a file's tests out of Python's garbage collections.

    Imported libraries alone are half a million objects, which each collection would
    look at for most of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Deletes the logs that servers leave behind whose starts failed."""
    # pytest's own folder stays where it is, and so do the kernels that servers compile.
    tmp_path_factory.getbasetemp()
    # That of multiprocessing is deleted later, by itself.
    multiprocessing.util.get_temp_dir()
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    with (
        # Short, for the paths of sockets.
        tempfile.TemporaryDirectory(prefix="t_", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", kernels)
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
