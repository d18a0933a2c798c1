"""The requests of one engine in this process: their limit, counts, and aborts."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    SGLangError,
)
from torchrl_sglang.requests.request import Outcome
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.support.histogram import SECONDS, TOKENS, Histogram
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion

ABORTS_AT_ONCE = 64
"""Most calls at once that abort requests by their ids."""

REPEATS = 5
"""Most repetitions of an abort while its request runs."""

REPEAT_SECONDS = 0.5
RECALL_SECONDS = 2.0
"""Timeout for servers to return the requests that a router sent them."""

RATE_SECONDS = 10.0
"""Window of the reported token rate."""


@dataclass(kw_only=True, eq=False, slots=True)
class InFlightRequest:
    """One running request."""

    deadline: float
    """Monotonic time at which the timeout of the batch ends."""
    request_timeout: float | None = None
    """Timeout of the request from when it is sent, in seconds."""
    request_id: str | None = None
    """The caller's name for it; several requests can share one."""
    sent_as: str = ""
    """Id on a server while the request is sent; otherwise empty."""
    sent_to: str = ""
    """Server or router that it is sent to."""
    aborted: bool = False
    resumable: bool = True
    """Whether the response can go on in another request."""
    survives_retraction: bool = True
    """Whether the response stays exact when the server retracts the request."""
    losses: int = 0
    """Number of servers that ended in the middle of the response."""
    restarts: int = 0
    """Number of weight updates that made the response begin anew."""

    def end_of_attempt(self) -> float:
        """Returns when an attempt that begins now times out."""
        if self.request_timeout is None:
            return self.deadline
        return min(self.deadline, time.monotonic() + self.request_timeout)


@dataclass(kw_only=True)
class Counters:
    """Running totals of one engine object; see :class:`.EngineStats`."""

    in_flight: int = 0
    completed: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    response_tokens: int = 0
    retractions: int = 0
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    response_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    _recent: deque[tuple[float, int]] = field(default_factory=deque, repr=False)

    def count(self, prompt: int, cached: int, response: int) -> None:
        """Counts the tokens of a finished response."""
        self.completed += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.response_lengths.add(response)
        self._count_tokens(response)

    def count_times(
        self,
        seconds: float,
        queued: float | None,
        first_token: float | None,
        retractions: int | None,
    ) -> None:
        """Counts the durations of an answered request; ``None`` where not reported."""
        self.request_seconds.add(seconds)
        if queued is not None:
            self.queue_seconds.add(queued)
        if first_token is not None:
            self.first_token_seconds.add(first_token)
        self.retractions += retractions or 0

    def count_outcome(self, prompt: int, outcome: Outcome) -> None:
        """Counts the tokens of a response, finished or aborted."""
        if isinstance(outcome, Completion):
            self.count(prompt, outcome.cached_tokens, len(outcome.token_ids))
        elif isinstance(outcome, GenerationAbortedError) and outcome.partial:
            self._count_tokens(len(outcome.partial.token_ids))

    def _count_tokens(self, response: int) -> None:
        self.response_tokens += response
        self._recent.append((time.monotonic(), response))
        self._drop_old()

    def _drop_old(self) -> None:
        oldest = time.monotonic() - RATE_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second over the last ten seconds."""
        self._drop_old()
        return sum(count for _, count in self._recent) / RATE_SECONDS


class InFlight:
    """Registers, limits and aborts running requests, on the background loop."""

    def __init__(
        self, http: HttpClient, fleet: Fleet, counters: Counters, limit: int
    ) -> None:
        self._http = http
        self._fleet = fleet
        self._counters = counters
        self._limit = limit
        self._reset()
        # Requests of a parent process do not run in its child.
        after_fork(self._reset)

    def _reset(self) -> None:
        self._turns = asyncio.Semaphore(self._limit)
        self._running: set[InFlightRequest] = set()
        self._aborting: set[asyncio.Task[None]] = set()
        self._landed = asyncio.Event()
        self._counters.in_flight = 0

    @property
    def queued(self) -> int:
        """Number of running requests that wait to be sent."""
        return len(self._running) - self._counters.in_flight

    @contextmanager
    def registered(self, tickets: Collection[InFlightRequest]) -> Iterator[None]:
        """Lets requests be aborted until they are forgotten."""
        self._running.update(tickets)
        try:
            yield
        finally:
            self._running.difference_update(tickets)

    def forget(self, ticket: InFlightRequest) -> None:
        """Removes a request that has its response."""
        self._running.discard(ticket)

    @asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """Waits until one more request may be in flight."""
        try:
            # Without a timer where nobody waits.
            is_free = not self._turns.locked() and self._fleet.gate.is_open
            seconds = None if is_free else max(deadline - time.monotonic(), 0.0)
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
                try:
                    await self._fleet.gate.passed()
                except BaseException:
                    self._turns.release()
                    raise
        except TimeoutError:
            raise ServerTimeoutError(
                "A request waited for its turn until its timeout: too many others are "
                "in flight (see max_in_flight), or a weight update took longer."
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    @contextmanager
    def attempt(self, ticket: InFlightRequest, url: str) -> Iterator[None]:
        """Gives a request an id for one attempt; aborts it if it gets no answer."""
        # Each attempt has a new id: the previous one may be aborted meanwhile. A server
        # aborts all whose ids begin with the given one, so they have one length.
        ticket.sent_as, ticket.sent_to = os.urandom(16).hex(), url
        self._counters.in_flight += 1
        if self._counters.in_flight == 1:
            self._fleet.watch()
        try:
            yield
        except RequestRefusedError:
            raise
        except BaseException:
            # The server may still compute it.
            self.abandon(ticket)
            raise
        finally:
            ticket.sent_as = ""
            self._counters.in_flight -= 1
            self._landed.set()

    def abandon(self, ticket: InFlightRequest) -> None:
        """Aborts a request whose response nobody waits for, without waiting."""
        self._start(self._abort([ticket]))

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Aborts requests by name, or all of all users; returns how many ran here."""
        tickets = [
            ticket
            for ticket in self._running
            if not ticket.aborted
            and (request_ids is None or ticket.request_id in request_ids)
        ]
        # First, so that requests which wait here are not sent any more.
        for ticket in tickets:
            ticket.aborted = True
        if request_ids is None:
            await self._abort_all()
        else:
            await self._abort(tickets)
        self._start(self._repeat(tickets))
        return len(tickets)

    async def interrupt(
        self,
        loads: Callable[[], Awaitable[Sequence[tuple[int, int]]]],
        *,
        keep: bool,
        others: bool,
        timeout: float,
    ) -> None:
        """Aborts the requests that servers have, before they are paused.

        ``keep``: skip requests that survive a retraction; ``others``: also abort
        requests of other users. No response starves: one that has to begin anew does so
        once, and no request is aborted before its server has computed a token of the
        oldest ones.
        """

        def sent() -> list[InFlightRequest]:
            return [
                ticket
                for ticket in self._running
                if ticket.sent_as and not (keep and ticket.survives_retraction)
            ]

        await self._until(
            lambda: not any(run.restarts and not run.resumable for run in sent()),
            timeout,
        )
        end = time.monotonic() + min(timeout, 10.0)
        while sent() and time.monotonic() < end:
            # A server that runs requests has computed a token of each.
            try:
                counts = await loads()
            except SGLangError as error:
                torchrl_logger.debug(f"No loads before a weight update: {error}")
                break
            if any(running for running, _ in counts) and all(
                running or not queued for running, queued in counts
            ):
                break
            await asyncio.sleep(0.005)
        while (waiting := sent()) and time.monotonic() < end:
            if others:
                await self._abort_all()
            else:
                await self._abort(waiting)
            # An abort that overtakes its request has no effect.
            await self._until(lambda: not sent(), REPEAT_SECONDS)

    def _sent_to(self, *places: str) -> dict[InFlightRequest, str]:
        """Returns the id of each request in flight at servers or a router."""
        return {
            ticket: ticket.sent_as
            for ticket in self._running
            if ticket.sent_as and ticket.sent_to in places
        }

    async def recall(self, router: str) -> None:
        """Aborts requests in flight through a router whose server was lost; they go on.

        Nobody knows which server has which request, and the connection to one that
        vanished may never close. The others return the tokens that they have computed,
        and what nobody returns was lost with its server.
        """
        begun = time.monotonic()
        await self._send_again([router], lambda: self._fleet.urls, until_gone=router)
        self._http.give_up(router, before=begun)

    def sent_to(self, url: str) -> int:
        """Returns how many requests are in flight at a server or a router."""
        return len(self._sent_to(url))

    async def evict(self, url: str) -> None:
        """Aborts the requests of a leaving server; they continue on other servers."""
        places = [url] if self._fleet.router is None else [url, self._fleet.router.url]
        await self._send_again(places, lambda: [url], until_gone=url)

    async def _send_again(
        self, places: Sequence[str], urls: Callable[[], Sequence[str]], until_gone: str
    ) -> None:
        """Aborts requests at servers, as a weight update does; they are sent again."""
        rid_of = self._sent_to(*places)

        def running() -> list[InFlightRequest]:
            return [ticket for ticket, rid in rid_of.items() if ticket.sent_as == rid]

        def is_gone() -> bool:
            return all(ticket.sent_to != until_gone for ticket in running())

        self._fleet.change_weights(ServedWeights.abort_requests)
        end = time.monotonic() + RECALL_SECONDS
        while True:
            aborts = [{"rid": ticket.sent_as} for ticket in running()]
            calls = [(abort, url) for abort in aborts for url in urls()]
            await fan_out(self._post, calls, at_once=ABORTS_AT_ONCE)
            # An abort that overtakes its request has no effect.
            await self._until(is_gone, REPEAT_SECONDS)
            if is_gone() or time.monotonic() >= end:
                return

    async def _until(self, holds: Callable[[], bool], timeout: float) -> None:
        """Waits until a condition on running requests holds, or for the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not holds():
                    self._landed.clear()
                    await self._landed.wait()

    async def close(self) -> None:
        """Waits shortly for aborts that are in flight."""
        loop = asyncio.get_running_loop()
        # Tasks of a fork's parent never end in this process.
        tasks = [task for task in self._aborting if task.get_loop() is loop]
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def _repeat(self, tickets: Sequence[InFlightRequest]) -> None:
        """Re-sends aborts that may have arrived before their request."""
        for _ in range(REPEATS):
            await asyncio.sleep(REPEAT_SECONDS)
            if self._running.isdisjoint(tickets):
                return
            await self._abort(tickets)

    def _abort(self, tickets: Collection[InFlightRequest]) -> Coroutine[Any, Any, None]:
        """Aborts the current attempts; ConfigurationError: a key is missing."""
        fleet = self._fleet
        calls: list[tuple[Mapping[str, object], str]] = [
            ({"rid": run.sent_as}, server)
            for run in tickets
            if run.sent_as
            # A router does not tell which server has it.
            for server in (
                fleet.urls if fleet.is_router(run.sent_to) else [run.sent_to]
            )
        ]
        return self._post_each(calls)

    async def _abort_all(self) -> None:
        everything: Mapping[str, object] = {"abort_all": True}
        await self._post_each([(everything, url) for url in self._fleet.urls])

    async def _post_each(
        self, calls: Sequence[tuple[Mapping[str, object], str]]
    ) -> None:
        """Sends aborts to all servers, and then raises if one wants another key."""
        denials = await fan_out(self._post, calls, at_once=ABORTS_AT_ONCE)
        for denial in filter(None, denials):
            raise denial

    async def _post(
        self, call: tuple[Mapping[str, object], str]
    ) -> ConfigurationError | None:
        payload, url = call
        try:
            answer = await self._http.request(
                "POST", f"{url}/abort_request", payload, timeout=5.0
            )
            answer.raise_for_status()
        except ConfigurationError as denial:
            return denial
        except SGLangError as error:
            # A server that has ended has nothing left to abort.
            torchrl_logger.debug(f"An abort did not arrive: {error}")
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._aborting.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._aborting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            torchrl_logger.warning(f"An abort was refused: {error}")
