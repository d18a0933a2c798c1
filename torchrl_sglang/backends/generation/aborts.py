"""Aborts requests on the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.in_flight import InFlight, Ticket
from torchrl_sglang.errors import SGLangError

__all__ = ["Aborts"]

ABORT_TIMEOUT_SECONDS = 5.0
"""Timeout of an abort call."""

ABORTS_AT_ONCE = 64
"""Most abort calls to one server at once."""

REPEATS = 5
"""How often an abort is sent again while its request runs."""

REPEAT_SECONDS = 0.5
"""Time between these."""

CLOSE_TIMEOUT_SECONDS = 1.0
"""Timeout for the last aborts when an engine is shut down."""


class Aborts:
    """Tells servers to abort requests. Used from the background loop only."""

    def __init__(self, http: HttpClient, fleet: Fleet, in_flight: InFlight) -> None:
        self._http = http
        self._fleet = fleet
        self._in_flight = in_flight
        self._background: set[asyncio.Task[None]] = set()

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Aborts requests by the caller's names, or all, those of other engines too.

        Returns:
            How many requests of this engine were running.
        """
        # First, so that requests which wait here are not sent any more.
        tickets = self._in_flight.mark_aborted(request_ids)
        if request_ids is None:
            await self._post({"abort_all": True})
        await self._abort(tickets)
        self._start(self._repeat(tickets))
        return len(tickets)

    def abandon(self, rids: Sequence[str]) -> None:
        """Aborts requests by their ids on the servers, without waiting."""
        if rids:
            self._start(self._abort_rids(rids))

    async def close(self) -> None:
        """Waits shortly for aborts that are in flight."""
        loop = asyncio.get_running_loop()
        # Those of a fork's parent never end here.
        tasks = [task for task in self._background if task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_SECONDS)

    async def _repeat(self, tickets: Sequence[Ticket]) -> None:
        """Re-sends aborts that may have arrived before their request."""
        for _ in range(REPEATS):
            await asyncio.sleep(REPEAT_SECONDS)
            if not any(map(self._in_flight.is_running, tickets)):
                return
            await self._abort(tickets)

    async def _abort(self, tickets: Sequence[Ticket]) -> None:
        await self._abort_rids(
            [
                ticket.sent_as
                for ticket in tickets
                if ticket.sent_as and self._in_flight.is_running(ticket)
            ]
        )

    async def _abort_rids(self, rids: Sequence[str]) -> None:
        for start in range(0, len(rids), ABORTS_AT_ONCE):
            part = rids[start : start + ABORTS_AT_ONCE]
            await asyncio.gather(*(self._post({"rid": rid}) for rid in part))

    async def _post(self, payload: dict[str, object]) -> None:
        async def to_one(url: str) -> None:
            try:
                await self._http.request(
                    "POST",
                    f"{url}/abort_request",
                    payload,
                    timeout=ABORT_TIMEOUT_SECONDS,
                )
            except SGLangError as error:
                # A server that has ended has nothing left to abort.
                torchrl_logger.debug(f"An abort did not arrive: {error}")

        await asyncio.gather(*(to_one(url) for url in self._fleet.urls))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
