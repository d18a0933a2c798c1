"""Signals that end a command raise an exception, so that ``with`` blocks clean up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal to end this process; event loops let a KeyboardInterrupt pass."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextlib.contextmanager
def _handling(handler: object, numbers: tuple[int, ...]) -> Iterator[None]:
    # Only the main thread can have handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises :class:`Interrupted` in the block on SIGINT, SIGTERM and SIGHUP.

    SIGINT counts even where a shell ignores it for background jobs, so that a server
    can be stopped; a SIGHUP that ``nohup`` ignores stays ignored.
    """
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers += (signal.SIGHUP,)
    with _handling(_raise, numbers):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Drops these signals in the block, to let a clean-up finish.

    They are caught, not ignored: child processes would inherit an ignored signal.
    """
    with _handling(lambda *_: None, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield
