"""Runs coroutines of the user so that what they raise remains their own failure.

asyncio acts on two exceptions instead of handing them to whoever awaits: a
``CancelledError`` counts as the cancellation of every task that it passes through, and
``SystemExit`` or ``KeyboardInterrupt`` ends the event loop. A user's coroutine raises
the first one whenever something that it awaits was cancelled, such as a shared task or
a closed client's request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("It awaited something that was cancelled.") from error
    except SystemExit as error:
        raise RuntimeError(f"It raised SystemExit({error.code!r}).") from error
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError("It raised KeyboardInterrupt.") from error
