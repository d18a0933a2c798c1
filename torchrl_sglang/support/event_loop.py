"""The background event loop of this process for all coroutines.

The engine is written once, as coroutines; synchronous methods submit them here and
wait. A forked child starts its own loop.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextvars
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _after_fork_in_child() -> None:
    # The parent may have held the lock, and its loop's thread does not exist here.
    global _lock, _loop
    _lock, _loop = threading.Lock(), None
    # A thread of the parent may have been about to wake a loop.
    _calls.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def get_loop() -> asyncio.AbstractEventLoop:
    """Returns the background loop of this process; starts it at the first call."""
    global _loop  # noqa: PLW0603 - One per process.
    if _loop is not None:
        return _loop
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


def weakly(
    method: Callable[[T], Coroutine[Any, Any, None]],
) -> Callable[[T], Coroutine[Any, Any, None]]:
    """Returns a coroutine function without effect once the object is collected."""
    held = weakref.WeakMethod(method)

    async def call(argument: T) -> None:
        if (living := held()) is not None:
            await living(argument)

    return call


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
        # An error refers to this frame, and the future to the error: a cycle, which
        # would keep the caller's variables, such as servers, until the next collection.
        del future


async def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the background loop and awaits it on any other loop."""
    loop, caller = get_loop(), asyncio.get_running_loop()
    if loop is caller:
        return await coroutine
    call = _LoopCall(coroutine, caller)
    _post(loop, call.start)
    try:
        return await call.result
    except asyncio.CancelledError:
        _post(loop, call.cancel)
        raise
    finally:
        # Otherwise an error would refer to itself, as in run_sync().
        del call


class _LoopCall(Generic[T]):
    """A coroutine on the background loop, awaited by another loop."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], caller: asyncio.AbstractEventLoop
    ) -> None:
        self.result: asyncio.Future[T] = caller.create_future()
        self._coroutine = coroutine
        self._caller = caller
        self._context = contextvars.copy_context()

    def start(self) -> None:
        create = asyncio.get_running_loop().create_task
        self._task = create(self._coroutine, context=self._context)
        self._task.add_done_callback(lambda _: _post(self._caller, self._finish))

    def cancel(self) -> None:
        self._task.cancel()

    def _finish(self) -> None:
        error = None if self._task.cancelled() else self._task.exception()
        if self.result.done():
            return
        if self._task.cancelled():
            self.result.cancel()
        elif error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(self._task.result())


class _CallQueue:
    """Thread-safe call queue of a loop; coalesces wake-ups.

    Works without a lock: the garbage collector can run anywhere, and calls, too.
    """

    def __init__(self) -> None:
        self._waiting = collections.deque[Callable[[], object]]()
        self._woken = False

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._waiting.append(call)
        # Two threads may both wake the loop, which then finds nothing the second time.
        if self._woken:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            # The loop is closed: nobody waits, and the calls refer to it.
            self._waiting.clear()
            self._woken = False

    def _run(self) -> None:
        # First: later calls wake the loop again.
        self._woken = False
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()


_calls = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _CallQueue]()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls a function on a loop, after all earlier calls of this function."""
    calls = _calls.get(loop)
    if calls is None:
        # Calls refer to their loop; the calls of a closed loop are dropped.
        for reference in _calls.keyrefs():
            other = reference()
            if other is not None and other.is_closed():
                _calls.pop(other, None)
        calls = _calls.setdefault(loop, _CallQueue())
    calls.add(loop, call)


async def iterate(stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields from a generator of the background loop, on any other event loop."""
    steps = _Steps(stream)
    try:
        while True:
            item = await run_async(steps.next())
            if item is None:
                return
            yield item
    finally:
        await asyncio.shield(run_async(steps.close()))


def iterate_sync(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yields from a generator of the background loop, in any thread."""
    steps = _Steps(stream)
    try:
        while (item := run_sync(steps.next())) is not None:
            yield item
    finally:
        if on_background_loop():
            # The garbage collector runs there, too.
            submit(steps.close())
        elif not sys.is_finalizing():
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
