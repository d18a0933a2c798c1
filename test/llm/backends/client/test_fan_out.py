"""Calls to many servers at a time."""

from __future__ import annotations

import asyncio

import pytest

from torchrl_sglang.backends.client.fan_out import fan_out


class Calls:
    """Counts the calls that are in flight; a call ends when ``most`` of them are."""

    def __init__(self, most: int) -> None:
        self.most = self.now = 0
        self._full = asyncio.Event()
        self._wanted = most

    async def __call__(self, target: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self._wanted:
            self._full.set()
        await self._full.wait()
        self.now -= 1
        return -target


@pytest.mark.parametrize(("count", "at_once", "most"), [(9, 4, 4), (9, None, 9)])
def test_so_many_calls_are_in_flight(count: int, at_once: int | None, most: int):
    async def work() -> None:
        calls = Calls(most)
        found = await fan_out(calls, range(count), at_once=at_once)
        assert found == [-index for index in range(count)]
        assert (calls.most, calls.now) == (most, 0)

    asyncio.run(work())


def test_no_targets():
    assert asyncio.run(fan_out(Calls(1), [])) == []


def test_the_first_error_ends_all_calls():
    async def work() -> None:
        ended = []

        async def call(target: int) -> None:
            if target == 1:
                raise ValueError(target)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(target)

        with pytest.raises(ValueError, match="1"):
            await fan_out(call, range(3), at_once=2)
        await asyncio.sleep(0)
        # The third was not begun.
        assert ended == [0]

    asyncio.run(work())
