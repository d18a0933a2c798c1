"""Calls of functions that block, fail or never return."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
import time

import pytest

from torchrl_sglang.support.blocking import BlockingCalls


@pytest.fixture
def calls():
    calls = BlockingCalls("test-calls", most=2)
    yield calls
    calls.close()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "test-calls"]


def test_values_and_errors(calls):
    async def double(value):
        return 2 * value

    class Callable:
        async def __call__(self, value):
            return value

    async def main():
        run = functools.partial(calls.call, seconds=10.0)
        assert await run(abs, -3) == 3
        assert await run(double, 3) == 6
        assert await run(Callable(), 4) == 4
        assert await run(lambda: double(5)) == 10
        with pytest.raises(ZeroDivisionError):
            await run(lambda: 1 / 0)
        values = await asyncio.gather(*(run(abs, -n) for n in range(50)))
        assert values == list(range(50))

    asyncio.run(main())
    assert len(threads()) <= 2


def test_a_call_that_hangs_costs_its_thread_only(calls):
    gate = threading.Event()

    async def main():
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await calls.run(gate.wait, seconds=0.01)
        # More hang than there may be threads, and others still run.
        values = await asyncio.gather(
            *(calls.run(lambda n=n: n, seconds=10.0) for n in range(10))
        )
        assert values == list(range(10))
        with pytest.raises(TimeoutError):
            await calls.call(lambda: asyncio.sleep(60), seconds=0.01)

    asyncio.run(main())
    calls.close()
    gate.set()
    for thread in threads():
        thread.join(10.0)
    assert not threads()


def test_waiting_for_a_thread_does_not_count(calls):
    gate, ran = threading.Event(), []

    async def main():
        busy = [asyncio.create_task(calls.run(gate.wait, seconds=30.0)) for _ in "ab"]
        await asyncio.sleep(0)
        waits = asyncio.create_task(calls.run(lambda: 7, seconds=0.01))
        cancelled = asyncio.create_task(calls.run(lambda: ran.append(1), seconds=1.0))
        await asyncio.sleep(0.1)
        assert not waits.done()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*busy) == [True, True]
        assert await waits == 7
        assert await calls.run(lambda: 8, seconds=10.0) == 8
        assert cancelled.cancelled()

    asyncio.run(main())
    assert not ran


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_coroutine_that_nobody_awaits_any_more(calls, when):
    """As at the end of a collection, in the middle of a call."""
    returns, made = threading.Event(), []

    async def double(value):
        return 2 * value

    def blocks():
        returns.wait()
        made.append(double(3))
        return made[0]

    async def main():
        task = asyncio.create_task(calls.call(blocks, seconds=10.0))
        await asyncio.sleep(0.05)
        if when == "after":
            returns.set()
            # The event loop hears of the result when this coroutine waits again.
            time.sleep(0.05)  # noqa: ASYNC251 - On purpose.
        task.cancel()
        await asyncio.wait([task])
        returns.set()
        await asyncio.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        unraisable = []
        patch.setattr(sys, "unraisablehook", unraisable.append)
        asyncio.run(main())
        made.clear()
        gc.collect()
    assert not unraisable


def test_after_the_end(calls):
    calls.close()
    with pytest.raises(RuntimeError, match="have ended"):
        asyncio.run(calls.run(lambda: 1, seconds=1.0))
