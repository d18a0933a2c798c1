"""The running requests of one engine in this process, and their limit."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from torchrl_sglang.backends.generation.metrics import Counters
from torchrl_sglang.errors import ServerTimeoutError

__all__ = ["InFlight", "Ticket"]


@dataclass(kw_only=True, eq=False, slots=True)
class Ticket:
    """One running request."""

    request_id: str | None = None
    """The caller's name for it; several requests can share one."""
    # A server aborts every request whose id begins with the given one, so all ids have
    # one length and none is a user's.
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Beginning of its ids on the servers."""
    sent_as: str = ""
    """Id of its latest attempt; empty before the first."""
    aborted: bool = False
    """Whether the caller has aborted it."""


class InFlight:
    """Registers running requests and limits how many are in flight at once.

    Used from the background loop only.
    """

    def __init__(self, limit: int, counters: Counters) -> None:
        self._limit = limit
        self._counters = counters
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._turns = asyncio.Semaphore(self._limit)
        self._running: set[Ticket] = set()
        self._sent: set[str] = set()
        self._attempts = itertools.count()
        self._counters.in_flight = 0

    def _reset_after_fork(self) -> None:
        # Requests of the parent process do not run in the child.
        if self._pid != os.getpid():
            self._reset()

    @property
    def queued(self) -> int:
        """Number of running requests that wait to be sent."""
        self._reset_after_fork()
        return len(self._running) - len(self._sent)

    @contextmanager
    def registered(self, request_ids: Sequence[str | None]) -> Iterator[list[Ticket]]:
        """Yields a ticket per request, by which it can be aborted."""
        self._reset_after_fork()
        tickets = [Ticket(request_id=each) for each in request_ids]
        self._running.update(tickets)
        try:
            yield tickets
        finally:
            self._running.difference_update(tickets)

    def forget(self, ticket: Ticket) -> None:
        """Removes a request that has its response."""
        self._running.discard(ticket)

    def is_running(self, ticket: Ticket) -> bool:
        """Returns whether a request has no response yet."""
        return ticket in self._running

    def mark_aborted(self, request_ids: Collection[str] | None) -> list[Ticket]:
        """Marks running requests, by default all, and returns them."""
        tickets = [
            ticket
            for ticket in self._running
            if not ticket.aborted
            and (request_ids is None or ticket.request_id in request_ids)
        ]
        for ticket in tickets:
            ticket.aborted = True
        return tickets

    def sent(self, tickets: Sequence[Ticket]) -> list[str]:
        """Registers an attempt and returns the id of each request on the server."""
        # Each attempt has new ids: the previous one may be aborted meanwhile.
        number = next(self._attempts) % 16**8
        for ticket in tickets:
            ticket.sent_as = f"{ticket.rid}-{number:08x}"
        names = [ticket.sent_as for ticket in tickets]
        self._sent.update(names)
        self._counters.in_flight = len(self._sent)
        return names

    def landed(self, names: Collection[str]) -> list[str]:
        """Ends attempts, and returns those that were still in flight."""
        ended = [name for name in names if name in self._sent]
        self._sent.difference_update(ended)
        self._counters.in_flight = len(self._sent)
        return ended

    @asynccontextmanager
    async def turn(
        self, deadline: float, own: asyncio.Semaphore | None = None
    ) -> AsyncIterator[None]:
        """Waits until one more request may be in flight, of its batch and of all."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                    if own is not None:
                        await stack.enter_async_context(own)
                    await stack.enter_async_context(self._turns)
            except TimeoutError:
                raise ServerTimeoutError(
                    "A request waited for its turn until its timeout: too many others "
                    "are in flight; see max_in_flight."
                ) from None
            yield
