"""Control of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_BY_PYTHON = 10_000
"""More objects than Python itself freezes at its start: 375 in 3.12."""

NEW_OBJECTS_OF_SERVERS = 50_000
"""New objects between two collections in a server: hundreds of concurrent requests are
alive, and a collection after each 700 objects visits most of them, again and again."""


@contextmanager
def collect_garbage_afterwards() -> Iterator[None]:
    """Pauses the garbage collector, which would visit every new object repeatedly.

    For code with many new objects and few dropped objects. When a quarter of all
    objects are new survivors, a full collection visits every object of the process,
    including imported libraries.
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
    """Excludes existing objects from garbage collections within a block.

    Most of them come from the imports of torch and transformers: a collection with them
    stops all threads for at least a third of a second. Cycles among them, which become
    garbage within the block, are freed after it.
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


def collect_rarely_from_now_on() -> None:
    """Excludes existing objects from garbage collections, and has fewer collections.

    For processes that serve clients until they end. A full collection would visit all
    imported libraries, and block all clients for half a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_OF_SERVERS, *gc.get_threshold()[1:])
