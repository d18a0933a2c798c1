"""When Python's garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_BY_PYTHON = 10_000
"""More objects than Python itself begins with that are frozen: 375 in 3.12."""


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


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """Keeps objects that exist already out of garbage collections within a block.

    These are, above all, what torch and transformers have imported: a collection that
    visits them stops all threads for a third of a second and more. What is dropped of
    them within the block is freed after it, where it is part of a cycle.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        # The program does so itself.
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
