"""The register of resets for forked processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_resets: list[weakref.WeakMethod[Callable[[], None]]] = []


def after_fork(reset: Callable[[], None]) -> None:
    """Registers a method to be called in each forked child of this process.

    Threads, tasks, sockets and locks of the parent are invalid there. The object is not
    kept alive.
    """
    _resets[:] = [reference for reference in _resets if reference() is not None]
    _resets.append(weakref.WeakMethod(reset))


def _in_child() -> None:
    for reference in _resets:
        reset = reference()
        if reset is not None:
            reset()


os.register_at_fork(after_in_child=_in_child)
