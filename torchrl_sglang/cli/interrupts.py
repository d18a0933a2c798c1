"""Signals that end a command become an exception, so that ``with`` blocks clean up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupted", "interruptible", "uninterrupted"]


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end.

    It is a KeyboardInterrupt because event loops and libraries let that one through.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _pass(_number: int, _frame: FrameType | None) -> None:
    pass


@contextlib.contextmanager
def _handling(handler: object, numbers: tuple[int, ...]) -> Iterator[None]:
    # Only a main thread can have handlers; in another one somebody else has them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises :class:`Interrupted` in the block on SIGINT, SIGTERM and SIGHUP.

    SIGINT counts even where it is ignored, as a script's shell has it for what runs in
    the background: a server must be there to be stopped. An ignored SIGHUP is nohup's.
    """
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers += (signal.SIGHUP,)
    with _handling(_raise, numbers):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets a clean-up finish, however often somebody presses Ctrl-C.

    Signals are caught and dropped, not ignored: what is started meanwhile would
    inherit that they are ignored.
    """
    with _handling(_pass, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield
