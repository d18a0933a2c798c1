"""Sends answers, whole or as streams, and detects disconnected clients."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from torchrl_sglang.gateway.dialects.base import Dialect, Writer
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.request import usage_of
from torchrl_sglang.gateway.routes.content import failure_of, json_response
from torchrl_sglang.gateway.turns import Turn

_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""Poll event of a hang-up, if the system has it."""

_SSE = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send_answer(
    request: web.Request,
    answer: Awaitable[list[Turn]],
    write: Writer,
    headers: Mapping[str, str],
    *,
    recorded: bool,
) -> web.StreamResponse:
    """Sends an answer; one that is recorded until the connection has taken it."""
    turns = await answer
    content = write.answer(turns, usage_of(turns))
    response = json_response(content, headers=headers)
    if recorded:
        async with _delivery(request):
            await response.prepare(request)
            await response.write_eof()
    return response


@asynccontextmanager
async def _delivery(request: web.Request) -> AsyncIterator[None]:
    """Raises ``ConnectionResetError`` if the client hangs up, before or within.

    Ends when the connection has taken all data.
    """
    _check_open(request.transport, _HUNG_UP)
    yield
    # A client may hang up after its last read.
    _check_open(request.transport, 0)
    while request.transport and request.transport.get_write_buffer_size():
        await asyncio.sleep(0.01)
        _check_open(request.transport, 0)


def _check_open(transport: asyncio.Transport | None, events: int) -> None:
    """Raises ``ConnectionResetError`` if a connection is broken, or has seen events.

    The loop may not know it yet.
    """
    number = -1 if transport is None else transport.get_extra_info("socket").fileno()
    if number >= 0:
        poll = select.poll()
        poll.register(number, events)
        if not poll.poll(0):
            return
    raise ConnectionResetError("The client has hung up.")


class Stream:
    """Streams an answer: the stable prefix as it grows, and finally the rest."""

    def __init__(
        self,
        request: web.Request,
        answer: Awaitable[list[Turn]],
        write: Writer,
        progress: Progress,
        *,
        dialect: Dialect,
        seconds: float,
    ) -> None:
        self._request, self._write, self._progress = request, write, progress
        self._dialect, self._seconds = dialect, seconds
        self._task = asyncio.ensure_future(answer)
        self._has_begun = False
        self._told: dict[int, Draft] = {}

    async def send(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Sends the answer, and waits until the connection has taken it."""
        request = self._request
        response = web.StreamResponse(headers={**_SSE, **headers})
        try:
            # An immediate refusal gets the status of its error.
            await self._wait(min(self._seconds, 0.8))
            if self._task.done():
                self._task.result()
            async with _delivery(request):
                await response.prepare(request)
                async for content in self._contents():
                    await response.write(content)
            with suppress(ConnectionError):
                # Clients hang up when they have read the last event, before this.
                await response.write_eof()
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])
        return response

    async def _wait(self, seconds: float) -> None:
        """Waits for the answer, or for its growth."""
        changed = asyncio.ensure_future(self._progress.changed())
        try:
            await asyncio.wait(
                [self._task, changed],
                timeout=seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()

    async def _contents(self) -> AsyncIterator[bytes]:
        """Yields keep-alive events and stable prefixes, then the rest or an error."""
        failure = None
        try:
            while not self._task.done():
                yield b"".join(self._new()) or self._write.waiting()
                await self._wait(self._seconds)
            turns = self._task.result()
            yield b"".join(self._write.events(turns, usage_of(turns)))
        except GeneratorExit:
            raise
        except Exception as error:  # noqa: BLE001 - The status has been sent already.
            failure = failure_of(self._request, error)
        if failure is not None:
            yield self._write.failed(self._dialect.error(failure))
            if self._task.done() and self._task.exception() is None:
                raise ConnectionResetError("The answer differs from its streamed part.")

    def _new(self) -> Iterator[bytes]:
        """Yields the events of new stable prefixes."""
        progress = self._progress
        if progress.prompt_tokens is None:
            return
        if not self._has_begun:
            self._has_begun = True
            yield from self._write.begin(progress.prompt_tokens)
        for number, draft in progress.drafts.items():
            if self._told.get(number) != draft:
                self._told[number] = draft
                yield from self._write.grow(number, draft)
