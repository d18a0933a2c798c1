"""Calls between processes of a gateway: answers, errors, parts, ends."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.processes.channel import Channel, ChannelClosedError
from torchrl_sglang.gateway.processes.process import until_silent

SECONDS = 30.0


@asynccontextmanager
async def channels(handle: Callable[..., Any]) -> AsyncIterator[tuple[Channel, Any]]:
    """Yields an end that asks, and the task and the end of the one that answers."""
    ends = socket.socketpair()
    asking = await Channel.over(ends[0], lambda message, part: None)
    answering = await Channel.over(ends[1], handle)
    tasks = [asyncio.ensure_future(each.serve()) for each in (asking, answering)]
    try:
        yield asking, answering
    finally:
        asking.close()
        answering.close()
        await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)


class UnpicklableError(Exception):
    """Holds what cannot be pickled, as errors of users do."""

    def __init__(self) -> None:
        super().__init__("odd", lambda: None)


class ForeignError(ConfigurationError):
    """A user's own error of this package's kind."""


def test_answers_come_to_their_calls() -> None:
    async def answer(message: Any) -> Any:
        await asyncio.sleep(0.001 * (10 - message))
        return {"twice": 2 * message}

    async def main() -> list[Any]:
        async with channels(lambda message, part: answer(message)) as (asking, _):
            calls = (asking.call(number, seconds=SECONDS) for number in range(10))
            return await asyncio.gather(*calls)

    assert asyncio.run(main()) == [{"twice": 2 * number} for number in range(10)]


def test_messages_are_taken_in_their_order() -> None:
    taken: list[Any] = []

    def handle(message: Any, part: Any) -> None:
        taken.append(message)

    async def main() -> None:
        async with channels(handle) as (asking, _):
            for number in range(100):
                asking.tell(number)
            asking.tell_soon("soon")
            await asyncio.sleep(0)
            await asking.call("last", seconds=SECONDS)
            # Larger than what is buffered.
            await asking.call(bytes(40 << 20), seconds=SECONDS)

    asyncio.run(main())
    assert taken[:-1] == [*range(100), "soon", "last"]
    assert len(taken[-1]) == 40 << 20


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ConfigurationError("wrong"), ConfigurationError, None),
        (GatewayError("full", status=503, code="c"), GatewayError, 503),
        (ValueError("a defect"), GatewayError, 500),
        (UnpicklableError(), GatewayError, 500),
        # Its class may be in a script that only one process runs.
        (ForeignError("own"), GatewayError, 500),
    ],
)
def test_errors_are_raised_where_they_are_asked_for(
    error: Exception, kind: type, status: int | None
) -> None:
    async def fail() -> None:
        raise error

    async def main() -> None:
        async with channels(lambda message, part: fail()) as (asking, _):
            with pytest.raises(kind) as found:
                await asking.call("?", seconds=SECONDS)
            assert type(found.value) is kind
            assert getattr(found.value, "status", None) == status
            assert str(error.args[0]) in str(found.value)

    asyncio.run(main())


def test_parts_come_before_their_answer() -> None:
    async def answer(part: Callable[[Any], None]) -> str:
        for number in range(3):
            await asyncio.to_thread(part, number)
        return "done"

    async def main() -> list[Any]:
        parts: list[Any] = []
        async with channels(lambda message, part: answer(part)) as (asking, _):
            end = await asking.call("?", seconds=SECONDS, on_part=parts.append)
        return [*parts, end]

    assert asyncio.run(main()) == [0, 1, 2, "done"]


def hanging() -> tuple[asyncio.Event, asyncio.Event, Callable[[], Awaitable[None]]]:
    """Returns a call that hangs, behind events of its begin and its end."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return begun, ended, hang


def test_a_call_that_is_cancelled_is_cancelled_there() -> None:
    async def main() -> None:
        begun, ended, hang = hanging()
        async with channels(lambda message, part: hang()) as (asking, _):
            call = asyncio.ensure_future(asking.call("?", seconds=SECONDS))
            await begun.wait()
            call.cancel()
            await asyncio.wait_for(ended.wait(), SECONDS)
            begun.clear()
            ended.clear()
            with pytest.raises(GatewayError, match="no answer.*within 0.05 s") as slow:
                await asking.call("?", seconds=0.05)
            assert slow.value.status == 504
            await asyncio.wait_for(ended.wait(), SECONDS)

    asyncio.run(main())


def test_an_end_that_closes_ends_all_calls() -> None:
    async def main() -> None:
        begun, ended, hang = hanging()
        async with channels(lambda message, part: hang()) as (asking, answering):
            call = asyncio.ensure_future(asking.call("?", seconds=SECONDS))
            await begun.wait()
            answering.close()
            with pytest.raises(ChannelClosedError) as closed:
                await call
            assert closed.value.status == 503
            await asyncio.wait_for(ended.wait(), SECONDS)
            with pytest.raises(ChannelClosedError):
                await asking.call("?", seconds=SECONDS)
            asking.tell("nobody hears it")

    asyncio.run(main())


def test_a_message_that_cannot_be_read_ends_nothing() -> None:
    """A class that only the sender has is in it."""

    async def main() -> None:
        ends = socket.socketpair()
        asking = await Channel.over(ends[0], lambda message, part: None)
        task = asyncio.ensure_future(asking.serve())
        other, other_writer = await asyncio.open_connection(sock=ends[1])
        unknown = pickle.dumps(UnpicklableError).replace(
            b"UnpicklableError", b"NowhereToBeFound"
        )
        for content, expected in ((unknown, GatewayError), (pickle.dumps(7), None)):
            call = asyncio.ensure_future(asking.call("?", seconds=SECONDS))
            head = struct.Struct("!QQB")
            length, number, _ = head.unpack(await other.readexactly(head.size))
            await other.readexactly(length)
            other_writer.write(head.pack(len(content), number, 3) + content)
            if expected is None:
                assert await call == 7
            else:
                with pytest.raises(expected, match="cannot be read"):
                    await call
        other_writer.close()
        await asyncio.wait_for(task, SECONDS)

    asyncio.run(main())


def test_one_missed_answer_is_no_silence() -> None:
    asked = 0

    async def answer() -> None:
        nonlocal asked
        asked += 1
        # Misses the second, and then the fifth and all others.
        if asked == 2 or asked >= 5:
            await asyncio.Event().wait()

    async def main() -> None:
        async with channels(lambda message, part: answer()) as (asking, _):
            silent = until_silent(asking, every=0.0, within=0.2)
            await asyncio.wait_for(silent, SECONDS)
            assert asked == 6
            asking.close()
            with pytest.raises(ChannelClosedError):
                await until_silent(asking, every=0.0, within=SECONDS)

    asyncio.run(main())
