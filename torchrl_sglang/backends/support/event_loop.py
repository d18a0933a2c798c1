"""The background event loop of this process, on which all coroutines run.

The engine is written once, as coroutines; synchronous methods submit them here and
wait. A forked child starts its own loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Generic, TypeVar

__all__ = [
    "get_loop",
    "iterate",
    "iterate_sync",
    "on_background_loop",
    "run_sync",
    "submit",
]

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _after_fork_in_child() -> None:
    # The parent may have held the lock, and its loop's thread does not exist here.
    global _lock, _loop
    _lock, _loop = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)


def get_loop() -> asyncio.AbstractEventLoop:
    """Returns the background loop of this process; starts it at the first call."""
    global _loop  # noqa: PLW0603 - There is one for each process.
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(
                target=_loop.run_forever, name="torchrl_sglang-loop", daemon=True
            ).start()
        return _loop


def on_background_loop() -> bool:
    """Returns whether the current thread runs the background loop."""
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Starts a coroutine on the background loop and returns its future."""
    return asyncio.run_coroutine_threadsafe(coroutine, get_loop())


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the background loop and waits; Ctrl-C cancels it."""
    if on_background_loop():
        coroutine.close()
        raise RuntimeError(
            "A synchronous engine method was called on torchrl_sglang's own event "
            "loop, where it would wait for itself; await the asynchronous one."
        )
    if sys.is_finalizing():
        # The loop's thread is gone, so waiting for it would never end.
        coroutine.close()
        raise RuntimeError("The interpreter is exiting; the engine cannot be used.")
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
    finally:
        # An error refers to this frame, and the future to the error: a cycle that would
        # keep the caller's variables, such as servers, until the next collection.
        del future


async def iterate(stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields from a generator of the background loop, on any other event loop."""
    steps = _Steps(stream)
    try:
        while True:
            item = await asyncio.wrap_future(submit(steps.next()))
            if item is None:
                return
            yield item
    finally:
        await asyncio.shield(asyncio.wrap_future(submit(steps.close())))


def iterate_sync(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yields from a generator of the background loop, in any thread."""
    steps = _Steps(stream)
    try:
        while (item := run_sync(steps.next())) is not None:
            yield item
    finally:
        if not sys.is_finalizing():
            run_sync(steps.close())


class _Steps(Generic[T]):
    """A generator whose abandoned step may still be unwinding when it is closed."""

    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._turn = asyncio.Lock()

    async def next(self) -> T | None:
        async with self._turn:
            return await anext(self._stream, None)

    async def close(self) -> None:
        async with self._turn:
            await self._stream.aclose()
