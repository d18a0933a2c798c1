"""When Python's garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_garbage_afterwards() -> Iterator[None]:
    """Pauses the garbage collector, which would visit every new object again.

    For code that makes many objects and drops few. Once those that outlive its visits
    are a quarter of all, it visits every object of the process, with those of imported
    libraries.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
