"""Calls the user's functions beside an event loop, each with a timeout.

Coroutines run on the loop, everything else in detached threads. An error of a function
is its own failure: nothing in it acts on the event loop.

A hanging call costs only its thread: its caller gets a TimeoutError, another thread
takes its place, and neither shutdown nor the interpreter's exit waits for it.
``concurrent.futures`` would join it at exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from torchrl_sglang.support.user_code import CallTimeoutError, await_user, describe

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(eq=False, slots=True)
class _ThreadCall:
    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    start: float | None = None
    """Monotonic time of the start."""
    abandoned: bool = False
    """Nobody waits for it, and its thread has been replaced."""


class BlockingCalls:
    """Daemon threads, started when they are needed.

    Args:
        name: of the threads.
        most: most threads whose call somebody waits for.

    Examples:
        >>> calls = BlockingCalls("example", most=1)
        >>> asyncio.run(calls.run(lambda: 1 + 1, seconds=10.0))
        2
        >>> calls.close()
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._queue: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._queued = 0
        self._closed = False

    async def run(self, function: Callable[[], T], *, seconds: float) -> T:
        """Returns the result of a function.

        Raises:
            CallTimeoutError: if it has not returned ``seconds`` after its start.
            RuntimeError: instead of an exception that asyncio would act on.
        """
        # With the caller's context variables, like asyncio.to_thread().
        call = _ThreadCall(partial(contextvars.copy_context().run, function))
        self._submit(call)
        result = asyncio.wrap_future(call.future)
        try:
            while not result.done():
                # Waiting for a thread does not count: all threads come free in time.
                passed = 0.0 if call.start is None else time.monotonic() - call.start
                if passed >= seconds:
                    raise CallTimeoutError(f"It took longer than {seconds:g} s.")
                await asyncio.wait([result], timeout=seconds - passed)
            value: T = result.result()
            return value
        except BaseException:
            result.cancel()
            self._abandon(call)
            raise

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float,
        **keywords: Any,
    ) -> Any:
        """Returns the result of a function or a coroutine function; see :meth:`run`."""
        bound = partial(function, *arguments, **keywords)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - A class attribute.
        ):
            return await await_user(bound(), seconds=seconds)
        value = await self.run(bound, seconds=seconds)
        if inspect.isawaitable(value):
            # From a lambda that calls a coroutine function, for example.
            return await await_user(value, seconds=seconds)
        return value

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function in a thread, without a timeout."""
        call = _ThreadCall(function)
        self._submit(call)
        return call.future

    def close(self) -> None:
        """Ends all idle threads, and the others after their call."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _submit(self, call: _ThreadCall) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("The threads for blocking calls have ended.")
            self._queue.put(call)
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._start()
            else:
                self._queued += 1

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if call.future.set_running_or_notify_cancel():
                call.start = time.monotonic()
                _run(call)
            with self._lock:
                if call.abandoned:
                    return
                if self._queued:
                    self._queued -= 1
                else:
                    self._idle += 1
            # Waiting keeps no result alive.
            del call

    def _abandon(self, call: _ThreadCall) -> None:
        if call.future.cancel():
            # The call has not begun, and will not.
            return
        call.future.add_done_callback(_discard)
        with self._lock:
            if not call.future.running():
                # The call is done.
                return
            call.abandoned = True
            self._threads -= 1
            if self._queued and not self._closed:
                self._queued -= 1
                self._start()


class DaemonExecutor(ThreadPoolExecutor):
    """The default executor of an event loop, in daemon threads.

    A hanging call of ``asyncio.to_thread`` does not block the end of the loop or the
    process; a ``ThreadPoolExecutor`` joins its threads in both.

    Args:
        name: prefix of the threads' names.
        most: largest number of threads.
    """

    def __init__(self, name: str, most: int) -> None:
        super().__init__(max_workers=1)
        self._calls = BlockingCalls(name, most)

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Calls a function in a thread."""
        return self._calls.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls, without a wait."""
        self._calls.close()


def _run(call: _ThreadCall) -> None:
    try:
        value = call.function()
    except (CancelledError, StopIteration, GeneratorExit) as error:
        # A future cannot hold them, or treats them as its own.
        call.future.set_exception(_wrapped(error))
    except Exception as error:  # noqa: BLE001 - Passed on to the caller.
        call.future.set_exception(error)
    except BaseException as error:  # noqa: BLE001 - asyncio would act on it.
        call.future.set_exception(_wrapped(error))
    else:
        call.future.set_result(value)


def _discard(future: Future[Any]) -> None:
    """Closes a coroutine that nobody will await."""
    if future.exception() is None and inspect.iscoroutine(value := future.result()):
        value.close()


def _wrapped(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"It raised {describe(error)}.")
    wrapped.__cause__ = error
    return wrapped
