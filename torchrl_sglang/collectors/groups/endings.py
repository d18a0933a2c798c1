"""Clean-up at a conversation's end that its functions asked for, such as of sandboxes.

Each function is called once, whatever happens: when the conversation has ended, at a
shutdown that does not wait for it, and at once if it is given after the end, as by a
function that took too long.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from torchrl_sglang.collectors.groups.user_functions import name_of
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.user_code import describe


class Endings:
    """The functions that a conversation ends with, the last one first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: list[Callable[[], Any]] = []
        self._ended = False

    def add(self, function: Callable[[], Any]) -> None:
        """Keeps a function for the end; calls it in a thread if that is over."""
        with self._lock:
            self._functions.append(function)
            is_over = self._ended
        if is_over:
            self.call_in_thread()

    def take(self) -> Iterator[Callable[[], Any]]:
        """Yields the functions that nobody has taken yet, and begins the end."""
        while True:
            with self._lock:
                self._ended = True
                if not self._functions:
                    return
                function = self._functions.pop()
            yield function

    def call_in_thread(self) -> bool:
        """Calls the rest in a thread that nothing waits for."""
        with self._lock:
            self._ended = True
            has_functions = bool(self._functions)
        if has_functions:
            threading.Thread(
                target=self._call_all, name="torchrl_sglang-endings", daemon=True
            ).start()
        return has_functions

    def _call_all(self) -> None:
        for function in self.take():
            try:
                value = function()
                if inspect.isawaitable(value):
                    asyncio.run(_result(value))
            except BaseException as error:  # noqa: BLE001 - A user's raises anything.
                warn(function, error)


def warn(function: Callable[[], Any], error: BaseException) -> None:
    """Logs that a function failed; the conversation is over."""
    torchrl_logger.warning(
        f"{name_of(function)!r}, which was given to at_end(), failed: {describe(error)}"
    )


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
