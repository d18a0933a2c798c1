"""Isolates exceptions of the user's coroutines from the event loop.

asyncio acts on some exceptions instead of passing them to the awaiting task: a
``CancelledError`` counts as the cancellation of every task in its way, and
``SystemExit`` or ``KeyboardInterrupt`` ends the event loop. A user's coroutine raises
the former when an awaited object was cancelled, such as a shared task or a closed
client's request.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torchrl_sglang.errors import ConfigurationError

T = TypeVar("T")


class UserCodeError(Exception):
    """Carries an exception of a user's function past handlers of other errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(repr(error))
        self.error = error


class CallTimeoutError(TimeoutError):
    """A call took too long, without an exception of its own."""


@contextmanager
def user_code() -> Iterator[None]:
    """Converts exceptions that asyncio would act on into a RuntimeError.

    The cancellation of the current task itself passes, and so does an interrupt from
    the keyboard, which only reaches the main thread.

    Raises:
        RuntimeError: instead of such an exception, which is its cause.

    Examples:
        >>> async def step():
        ...     raise asyncio.CancelledError
        >>> async def run():
        ...     with user_code():
        ...         await step()
        >>> asyncio.run(run())
        Traceback (most recent call last):
        RuntimeError: It awaited something that was cancelled.
    """
    try:
        yield
    except Exception:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("It awaited something that was cancelled.") from error
    except GeneratorExit:
        # The coroutine around it is being closed.
        raise
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError("It raised KeyboardInterrupt.") from error
    except BaseException as error:
        raise RuntimeError(f"It raised {describe(error)}.") from error


@contextmanager
def carried_errors() -> Iterator[None]:
    """Wraps exceptions of user code in :class:`UserCodeError`."""
    try:
        with user_code():
            yield
    except Exception as error:
        raise UserCodeError(error) from error


async def await_user(awaitable: Awaitable[T], *, seconds: float | None = None) -> T:
    """Returns the result of a user's coroutine, which runs in its own task.

    So it cannot cancel the waiting task, nor block it by ignoring its cancellation.

    Raises:
        CallTimeoutError: after ``seconds``.
        RuntimeError: if it raises an exception of asyncio's control flow, or cancels
            itself.
    """
    task = asyncio.ensure_future(_guarded(awaitable))
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise CallTimeoutError(f"It took longer than {seconds:g} s.")
        if task.cancelled():
            raise RuntimeError("It cancelled itself.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            # Its result is unused.
            task.add_done_callback(_forget)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of concurrent coroutines; raises their failures as a group.

    The first failure cancels the others, and a ``CancelledError`` counts as a failure:
    a ``TaskGroup`` alone would treat it as a regular end.
    """

    async def guarded(coroutine: Coroutine[Any, Any, T]) -> T:
        with user_code():
            return await coroutine

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(guarded(coroutine)) for coroutine in coroutines]
    return [task.result() for task in running]


def returns_awaitable(function: Any) -> bool:
    """Returns whether a function, or an object with ``__call__``, is asynchronous.

    A lambda that calls a coroutine function is found only by its result.
    """
    while isinstance(function, partial):
        function = function.func
    calls = (function, getattr(type(function), "__call__", None))  # noqa: B004
    return any(
        inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)
        for call in calls
    )


def refuse_coroutine(name: str, function: Any, reason: str) -> None:
    """Refuses a coroutine function for an argument, which would not be awaited."""
    if returns_awaitable(function):
        raise ConfigurationError(
            f"{name}={function!r} is a coroutine function, and {reason}; give a "
            f"function."
        )


def first_error(error: BaseException) -> BaseException:
    """Returns an error, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """Returns type and text of an error for a sentence, even if ``__str__`` fails.

    Examples:
        >>> describe(KeyError("solution"))
        "KeyError: 'solution'"
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - A user's method raises anything.
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}".rstrip(": .")


async def _guarded(awaitable: Awaitable[T]) -> T:
    with user_code():
        return await awaitable


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
