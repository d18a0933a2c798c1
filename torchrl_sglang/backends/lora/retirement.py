"""Drops LoRA adapters that were replaced, after the last request that uses them.

A server that drops an adapter in use accepts no other adapter until then, and none at
all while it is paused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.errors import RequestRefusedError, SGLangError

UNLOAD_SECONDS = 60.0
"""Default timeout for servers to drop an adapter."""

LINGER_SECONDS = 5.0
"""A replaced adapter is kept for so long, while there is space: engine objects in other
processes discover its replacement within a second."""

DRAIN_SECONDS = 1800.0
"""Longest wait for the last requests of a replaced adapter."""

CLOSE_SECONDS = 2.0
"""Timeout for dropping replaced adapters when an engine is shut down."""


class Retirement:
    """Counts the requests that use each adapter, and drops adapters after the last."""

    def __init__(self, control: ControlPlane, fleet: Fleet, dropped: set[str]) -> None:
        self._control = control
        self._fleet = fleet
        self.dropped = dropped
        """Loads that this object has dropped, which it never uses again."""
        self.pinned: set[str] = set()
        """Loads that servers keep among those that batches are computed with."""
        self.retiring: dict[str, asyncio.Task[None]] = {}
        """Loads that no new request uses, while they are not dropped."""
        self._users: Counter[str] = Counter()
        self._unused = asyncio.Event()
        self._space_wanted = asyncio.Event()

    def users(self, served_as: str) -> int:
        """Returns the number of requests that use an adapter."""
        return max(self._users[served_as], 0)

    @contextmanager
    def hold(self, served_as: str) -> Iterator[None]:
        """Keeps an adapter loaded while a request uses it."""
        self._users[served_as] += 1
        try:
            yield
        finally:
            self._users[served_as] -= 1
            self._unused.set()

    def retire(self, served_as: str) -> None:
        """Drops an adapter in the background, after the last request that uses it."""

        async def retire() -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._space_wanted.wait(), LINGER_SECONDS)
            await self._wait_until_unused([served_as], time.monotonic() + DRAIN_SECONDS)
            await self.drop(served_as)

        self._in_background(served_as, retire())

    def drop_soon(self, served_as: str) -> None:
        """Drops an adapter in the background now."""
        self._in_background(served_as, self.drop(served_as))

    def _in_background(self, served_as: str, work: Coroutine[Any, Any, None]) -> None:
        self.dropped.add(served_as)
        task = asyncio.ensure_future(work)
        self.retiring[served_as] = task
        task.add_done_callback(lambda _: self.retiring.pop(served_as, None))

    async def hurry(self, served_names: Iterable[str], deadline: float) -> None:
        """Waits until adapters that no new request uses are unused and dropped."""
        names = list(served_names)
        self._space_wanted.set()
        try:
            await self._wait_until_unused(names, deadline)
            tasks = [self.retiring[name] for name in names if name in self.retiring]
            if tasks:
                await asyncio.wait(tasks, timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            self._space_wanted.clear()

    async def _wait_until_unused(self, names: Collection[str], deadline: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                while any(map(self.users, names)):
                    self._unused.clear()
                    await self._unused.wait()

    async def drop(self, served_as: str, timeout: float = UNLOAD_SECONDS) -> None:
        """Tells every server to drop an adapter; failures are only logged."""
        self.forget(served_as)
        self._users.pop(served_as, None)
        for error in await self.unload(served_as, timeout):
            torchrl_logger.warning(
                f"The LoRA adapter {served_as!r} was not dropped: {error}"
            )

    async def unload(self, served_as: str, timeout: float) -> list[SGLangError]:
        """Tells every server to drop an adapter; returns why some may still hold it."""
        outcomes = await self._control.unload_lora_adapter(served_as, timeout=timeout)
        errors = (error for error in outcomes.values() if error is not None)
        # A server that refuses does not have it.
        return [each for each in errors if not isinstance(each, RequestRefusedError)]

    def forget(self, served_as: str) -> None:
        """Records that servers do not hold an adapter any more."""
        self._fleet.change(lambda now: now.without_adapter(served_as))
        self.pinned.discard(served_as)

    async def close(self) -> None:
        """Cancels the waits; servers that keep running drop the replaced adapters."""
        unused = [name for name in self.retiring if not self.users(name)]
        tasks = list(self.retiring.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if any(replica.handle is None for replica in self._fleet.replicas):
            await asyncio.gather(*(self.drop(name, CLOSE_SECONDS) for name in unused))
