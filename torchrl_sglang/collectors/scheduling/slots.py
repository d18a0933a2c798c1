"""Sends requests in the order of :class:`.LongestFirst`, as servers have room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.collectors.scheduling.longest import LongestFirst, Sample
from torchrl_sglang.collectors.scheduling.room import most_in_flight, room_of
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.support.digest import digest
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion

LOOK_SECONDS = 0.5
"""Time between two looks at what servers run, while requests wait for them."""

AnyRequest = TypeVar("AnyRequest", bound=GenerateRequest)


class Slots:
    """Slots of an engine's servers, which requests get longest first.

    Args:
        engine: that the requests are sent with.

    Raises:
        UnsupportedByServerError: if its servers do not tell how many requests they run.
    """

    def __init__(self, engine: RLSGLangEngine) -> None:
        self._control = engine.control
        self._room = self._most = 0
        self._reset()
        # Requests of a parent process do not run in its child.
        after_fork(self._reset)
        run_sync(self._look())

    def _reset(self) -> None:
        self._order = LongestFirst()
        self._waiting: dict[Sample, asyncio.Future[None]] = {}
        self._in_flight = 0
        self._will_fill = False
        self._looking: asyncio.Task[None] | None = None

    def slot(self, prompt: Sequence[int], *, batch: int = 0) -> Slot:
        """Returns the slot of one request.

        Args:
            prompt: token ids of the prompt.
            batch: that the response is for; earlier ones go first.
        """
        return Slot(self, Sample(prompt=digest(prompt), batch=batch))

    def assign(self, requests: Sequence[AnyRequest]) -> list[AnyRequest]:
        """Returns the requests of a batch, each with a slot."""
        return [replace(each, slot=self.slot(each.input_ids)) for each in requests]

    @property
    def in_flight(self) -> int:
        """Number of requests that have a slot."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Number of requests that wait for one."""
        return len(self._order)

    # On the engine's event loop.

    async def acquire(self, sample: Sample) -> None:
        """Returns when the request may be sent."""
        loop = asyncio.get_running_loop()
        place = self._waiting[sample] = loop.create_future()
        self._order.add(sample)
        self._fill_soon(loop)
        try:
            await place
        except BaseException:
            if self._waiting.pop(sample, None) is None:
                # It was let in and cancelled at once.
                self.release(sample, None)
            else:
                self._order.discard(sample)
            raise

    def release(self, sample: Sample, completion: Completion | None) -> None:
        """Gives the request's place to the next one."""
        loop = asyncio.get_running_loop()
        length = None if completion is None else len(completion.token_ids)
        self._in_flight -= 1
        self._order.end(sample, loop.time(), length)
        self._fill_soon(loop)

    def _fill_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        # Requests of a batch come one after the other, before the loop's next turn.
        if not self._will_fill:
            self._will_fill = True
            loop.call_soon(self._fill, loop)

    def _fill(self, loop: asyncio.AbstractEventLoop) -> None:
        self._will_fill = False
        if self._in_flight == 0:
            # Memory that was full is free again.
            self._most = self._room
        while self._in_flight < self._most:
            sample = self._order.next(loop.time())
            if sample is None:
                return
            self._in_flight += 1
            place = self._waiting.pop(sample)
            # A request that is being cancelled gives its place back.
            if not place.done():
                place.set_result(None)
        if len(self._order) and (self._looking is None or self._looking.done()):
            self._looking = loop.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        """Follows what servers run, until no request waits."""
        while len(self._order):
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except SGLangError as error:
                torchrl_logger.debug(f"Servers did not tell what they run: {error}")
            self._fill(asyncio.get_running_loop())

    async def _look(self) -> None:
        loads = await self._control.server_loads()
        if not loads:
            # Requests that are sent tell what has become of the servers.
            return
        self._room = room_of(loads).most
        self._most = most_in_flight(loads, self._in_flight, self._most)


class Slot:
    """The slot of one request."""

    def __init__(self, slots: Slots, sample: Sample) -> None:
        self._slots = slots
        self._sample = sample

    async def acquire(self) -> None:
        """Returns when the request may be sent."""
        await self._slots.acquire(self._sample)

    def release(self, completion: Completion | None) -> None:
        """The request has ended; ``None``: without a response."""
        self._slots.release(self._sample, completion)
