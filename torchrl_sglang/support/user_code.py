"""Runs coroutines of the user so that what they raise remains their own failure.

asyncio acts on some exceptions instead of handing them to whoever awaits: a
``CancelledError`` counts as the cancellation of every task that it passes through, and
``SystemExit`` or ``KeyboardInterrupt`` ends the event loop. A user's coroutine raises
the first one whenever something that it awaits was cancelled, such as a shared task or
a closed client's request.
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
    """Carries what a function of the user raised past handlers of other errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(repr(error))
        self.error = error


class CallTimeoutError(TimeoutError):
    """A call took too long; the function that was called raised nothing."""


@contextmanager
def user_code() -> Iterator[None]:
    """Turns exceptions of user code that asyncio would act on into a RuntimeError.

    The cancellation of the current task itself passes, and so does an interrupt from
    the keyboard, which reaches the main thread alone.

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
    """Turns what user code raises into :class:`UserCodeError`, which carries it."""
    try:
        with user_code():
            yield
    except Exception as error:
        raise UserCodeError(error) from error


async def await_user(awaitable: Awaitable[T], *, seconds: float | None = None) -> T:
    """Returns the result of a user's coroutine, which runs in a task of its own.

    So it cannot cancel the task that waits for it, nor make it wait by ignoring its
    cancellation.

    Args:
        awaitable: the coroutine, or a future.
        seconds: timeout; ``None`` for none.

    Raises:
        CallTimeoutError: after so many seconds.
        RuntimeError: if it raises something that asyncio would act on, or cancels
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
            # Nobody asks for its result.
            task.add_done_callback(_forget)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of coroutines that run side by side.

    The first failure cancels the others, and a ``CancelledError`` counts as one: a
    ``TaskGroup`` alone would take it for the end of a task that was not wanted.

    Raises:
        BaseExceptionGroup: of the failures.
    """

    async def guarded(coroutine: Coroutine[Any, Any, T]) -> T:
        with user_code():
            return await coroutine

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(guarded(each)) for each in coroutines]
    return [task.result() for task in running]


def returns_awaitable(function: Any) -> bool:
    """Returns whether a function, or an object with ``__call__``, is asynchronous.

    A lambda that calls a coroutine function is found only by what it returns.
    """
    while isinstance(function, partial):
        function = function.func
    calls = (function, getattr(type(function), "__call__", None))  # noqa: B004
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in calls
    )


def refuse_coroutine(name: str, function: Any, reason: str) -> None:
    """Refuses a coroutine function where nothing awaits what it returns.

    Args:
        name: of the argument.
        function: the user's.
        reason: why it is not awaited, a clause.

    Raises:
        ConfigurationError: naming the argument.
    """
    if returns_awaitable(function):
        raise ConfigurationError(
            f"{name}={function!r} is a coroutine function, and {reason}; give a "
            f"function."
        )


def describe(error: BaseException) -> str:
    """Returns type and text of an error for a sentence, whatever its ``__str__`` does.

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
