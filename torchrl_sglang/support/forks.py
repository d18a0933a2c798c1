"""THE register of what begins anew in a forked process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_resets: list[weakref.WeakMethod[Callable[[], None]]] = []


def after_fork(reset: Callable[[], None]) -> None:
    """Has a method of an object called in each process that is forked from this one.

    There, threads, tasks, sockets and locks of the parent are none of its own. The
    object is not kept alive.
    """
    _resets[:] = [each for each in _resets if each() is not None]
    _resets.append(weakref.WeakMethod(reset))


def _in_child() -> None:
    for each in _resets:
        reset = each()
        if reset is not None:
            reset()


os.register_at_fork(after_in_child=_in_child)
