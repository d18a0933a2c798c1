"""Calls between two processes of a gateway, over a socket pair that only they have.

Messages are pickled: both ends are processes of one user, which one of them started.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any, Self, TypeAlias

from torchrl_sglang.errors import GatewayError, SGLangError
from torchrl_sglang.support.log import torchrl_logger

BUFFER_BYTES = 16 << 20
"""Most bytes that wait to be read."""

_HEAD = struct.Struct("!QQB")
"""Length of a message, number of its call, and kind."""

Part: TypeAlias = Callable[[Any], None]
"""Takes a part of an answer, before the end of it."""

Handler: TypeAlias = Callable[[Any, Part], Awaitable[Any] | None]
"""Takes a message, and what takes parts of the answer, in any thread. What it returns
is awaited, and is the answer if the message was a call."""


class ChannelClosedError(GatewayError):
    """The other process has ended, or ends."""


class _Kind(IntEnum):
    """Kinds of messages."""

    TOLD = 0
    CALL = 1
    PART = 2
    RESULT = 3
    CANCEL = 4


class Channel:
    """One end of a connection between two processes. Used from one event loop.

    Args:
        reader: of the connection.
        writer: of the connection.
        handle: takes messages of the other end.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handle: Handler,
    ) -> None:
        self._reader, self._writer, self._handle = reader, writer, handle
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[asyncio.Future[Any], Part | None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next = 0
        self._closed = False

    @classmethod
    async def over(cls, end: socket.socket, handle: Handler) -> Self:
        """Returns a channel over one end of a socket pair, which it owns."""
        reader, writer = await asyncio.open_connection(sock=end, limit=BUFFER_BYTES)
        return cls(reader, writer, handle)

    # Messages to the other end.

    def tell(self, message: Any) -> None:
        """Sends a message that is not answered; to nobody, once the other has ended."""
        self._send(_Kind.TOLD, 0, message)

    def tell_soon(self, message: Any) -> None:
        """The same, in any thread; messages are sent in the order of the calls."""
        with suppress(RuntimeError):
            # The loop may be closed.
            self._loop.call_soon_threadsafe(self.tell, message)

    async def call(
        self, message: Any, *, seconds: float, on_part: Part | None = None
    ) -> Any:
        """Returns the answer to a message; a call that is cancelled is cancelled there.

        Args:
            message: to be answered.
            seconds: timeout.
            on_part: is called with each part of the answer.

        Raises:
            ChannelClosedError: if the other process ends before.
            SGLangError: that the call raised there; of other errors, the text.
        """
        self._next += 1
        number, answered = self._next, self._loop.create_future()
        self._calls[number] = answered, on_part
        try:
            self._send(_Kind.CALL, number, message)
            async with asyncio.timeout(seconds):
                return await answered
        except TimeoutError:
            raise GatewayError(
                f"A process of the gateway had no answer from another one within "
                f"{seconds:g} s.",
                status=504,
            ) from None
        finally:
            del self._calls[number]
            if not answered.done() or answered.cancelled():
                self._send(_Kind.CANCEL, number, None)

    def _send(self, kind: _Kind, number: int, message: Any) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self._closed:
            if kind is _Kind.CALL:
                raise _closed()
            return
        self._writer.write(_HEAD.pack(len(content), number, kind))
        self._writer.write(content)

    # Messages of the other end.

    async def serve(self) -> None:
        """Takes messages until the other end is closed, and ends what they began."""
        try:
            while True:
                head = await self._reader.readexactly(_HEAD.size)
                length, number, kind = _HEAD.unpack(head)
                content = await self._reader.readexactly(length)
                self._take(_Kind(kind), number, content)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.close()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Closes the connection; the other end notices. Safe to call twice."""
        self._closed = True
        self._writer.close()
        for answered, _ in self._calls.values():
            if not answered.done():
                answered.set_exception(_closed())

    def _take(self, kind: _Kind, number: int, content: bytes) -> None:
        if kind is _Kind.CANCEL:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        message = _read(content)
        if kind is _Kind.TOLD:
            try:
                self._handle(message, _no_part)
            except Exception:  # noqa: BLE001 - The next message may be a good one.
                torchrl_logger.exception("A process of the gateway failed.")
        elif kind is _Kind.CALL:
            task = asyncio.ensure_future(self._answer(number, message))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif number in self._calls:
            _answer_with(message, *self._calls[number], is_part=kind is _Kind.PART)

    def _tell_part(self, number: int, part: Any) -> None:
        with suppress(RuntimeError):
            # The loop may be closed.
            self._loop.call_soon_threadsafe(self._send, _Kind.PART, number, part)

    async def _answer(self, number: int, message: Any) -> None:
        try:
            part = partial(self._tell_part, number)
            answer = self._handle(message, part)
            result = None if answer is None else await answer
        except Exception as error:  # noqa: BLE001 - The caller raises it.
            result = _portable(error)
        self._send(_Kind.RESULT, number, result)


def _answer_with(
    message: Any,
    answered: asyncio.Future[Any],
    on_part: Part | None,
    *,
    is_part: bool,
) -> None:
    """Takes an answer to a call, or a part of one."""
    if answered.done():
        return
    if isinstance(message, Exception):
        answered.set_exception(message)
    elif not is_part:
        answered.set_result(message)
    elif on_part is not None:
        on_part(message)


def _closed() -> ChannelClosedError:
    return ChannelClosedError(
        "A process of the gateway has ended, and with it the answer.", status=503
    )


def _no_part(part: Any) -> None:
    """Takes a part of an answer to a message that has none."""


def _read(content: bytes) -> Any:
    """Returns a message, or an error in the place of one that cannot be read."""
    try:
        return pickle.loads(content)
    except Exception as error:  # noqa: BLE001 - Classes of users are among them.
        return GatewayError(
            f"A message of another process of the gateway cannot be read: {error!r}",
            status=500,
        )


def _portable(error: Exception) -> Exception:
    """Returns an error that any process can read; others are logged here."""
    if isinstance(error, SGLangError) and _is_own(type(error)):
        with suppress(Exception):
            pickle.dumps(error)
            return error
    torchrl_logger.error("The gateway failed.", exc_info=error)
    return GatewayError(f"{type(error).__name__}: {error}", status=500)


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torchrl_sglang"
