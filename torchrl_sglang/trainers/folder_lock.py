"""One run at a time writes to a folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger

LOCK = ".lock"
"""File that a run holds. The system lets go of it when the process ends, however."""

OWNER = ".lock_owner"
"""Who holds it, for another one's error."""


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Holds an existing folder for one run; refuses a second run."""
    lock = FileLock(folder / LOCK, timeout=0)
    owner = folder / OWNER
    try:
        lock.acquire()
    except Timeout:
        holder = "another process"
        with suppress(OSError):
            text = owner.read_text()
            holder = "this process" if text == _own() else f"process {text}"
        raise ConfigurationError(
            f"Another run writes to {folder}, that of {holder}; wait for its end (that "
            f"of its with block), or give another output."
        ) from None
    except (OSError, NotImplementedError) as error:
        torchrl_logger.warning(
            f"{folder} cannot be locked ({error}): two runs with this output would "
            f"write over each other's files."
        )
        yield
        return
    try:
        with suppress(OSError):
            owner.write_text(_own())
        yield
    finally:
        lock.release()


def _own() -> str:
    return f"{os.getpid()} on {platform.node()}"
