"""Sends the requests of one batch and yields their outcomes as they come.

One server gets a batch as one request, which is the fastest form, and sends each
response when it is finished. If that fails, the requests without a response are sent
one by one, so that a bad one fails alone. Several servers get one request per prompt,
so that the router can balance them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.generation.dispatch import (
    Dispatcher,
    Outcome,
    Response,
    aborted_before_sending,
)
from torchrl_sglang.backends.generation.in_flight import Ticket
from torchrl_sglang.backends.generation.log_probs import to_scoring_request, with_scores
from torchrl_sglang.backends.generation.prefill import (
    Prefix,
    prefill,
    prefix_of,
    shared_prefixes,
)
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.backends.generation.sampling import dropped_by_router
from torchrl_sglang.backends.generation.stale_responses import StaleResponses
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import Completion

__all__ = ["run_batch"]

LARGEST_BATCH = 512
"""Most prompts of one request: a server visits all of them at each event."""

SINGLE_REQUESTS = 64
"""Most requests of a batch that are sent one by one at once, each on a connection."""

MOST_SCORINGS = 5
"""How often scoring a response is repeated when updates and aborts interrupt it."""

GRACE_SECONDS = 0.5
"""Grace period for an in-flight request to report its own timeout."""


@dataclass(kw_only=True, eq=False)
class _Item:
    """One request of a batch while it runs."""

    index: int
    request: GenerateRequest
    ticket: Ticket
    reply: asyncio.Future[Response | SGLangError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """What it got of a batch that was sent as one; ``None``: it is sent alone."""
    adapters: ExitStack = field(default_factory=ExitStack)
    """Keeps the adapter of its response loaded, for scoring."""

    def resolve(self, reply: Response | SGLangError | None) -> None:
        """Sets the reply unless it is set."""
        if not self.reply.done():
            self.reply.set_result(reply)


async def run_batch(
    dispatcher: Dispatcher,
    stale: StaleResponses,
    requests: Mapping[int, GenerateRequest],
    *,
    deadline: float,
    request_timeout: float | None,
) -> AsyncGenerator[tuple[int, Outcome], None]:
    """Yields the index and outcome of each request as it comes.

    One request's outcome does not depend on the others. Closing the generator aborts
    what is in flight.
    """
    names = [request.request_id for request in requests.values()]
    with dispatcher.in_flight.registered(names) as tickets:
        items = [
            _Item(index=index, request=request, ticket=ticket)
            for (index, request), ticket in zip(requests.items(), tickets, strict=True)
        ]
        batch = _Batch(dispatcher, stale, items, deadline, request_timeout)
        pending = batch.start()
        tasks = list(pending)
        ended: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        try:
            while pending:
                left = max(deadline - time.monotonic(), 0.0) + GRACE_SECONDS
                try:
                    async with asyncio.timeout(left):
                        task = await ended.get()
                except TimeoutError:
                    for task, item in pending.items():
                        yield item.index, _outcome(task, item.index)
                    return
                index = pending.pop(task).index
                yield index, _outcome(task, index)
        finally:
            await batch.close(tasks)


class _Batch:
    """Sends the requests of one batch."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        stale: StaleResponses,
        items: Sequence[_Item],
        deadline: float,
        request_timeout: float | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._stale = stale
        self._items = items
        self._deadline = deadline
        self._request_timeout = request_timeout
        self._as_one = (
            dispatcher.fleet.only is not None
            and not dispatcher.capabilities.streams_deltas
            and request_timeout is None
            and len(items) > 1
        )
        limit = SINGLE_REQUESTS if self._as_one else max(len(items), 1)
        self._turns = asyncio.Semaphore(limit)
        self._helpers: list[asyncio.Task[None]] = []

    def start(self) -> dict[asyncio.Task[Outcome], _Item]:
        """Starts a task per request, and the tasks that several of them wait for."""
        shared = shared_prefixes(item.request for item in self._items)
        prefills: dict[Prefix, asyncio.Task[None]] = {}
        if not self._as_one:
            for prefix, request in shared.items():
                work = prefill(self._dispatcher, [request], self._request_deadline())
                prefills[prefix] = self._help(work)
        else:
            before = None
            if shared:
                requests = list(shared.values())
                before = self._help(prefill(self._dispatcher, requests, self._deadline))
            for start in range(0, len(self._items), LARGEST_BATCH):
                part = self._items[start : start + LARGEST_BATCH]
                self._help(self._send_as_one(part, before))
        return {
            asyncio.ensure_future(
                self._complete(item, prefills.get(prefix_of(item.request)))
            ): item
            for item in self._items
        }

    async def close(self, tasks: Sequence[asyncio.Task[Outcome]]) -> None:
        """Ends all tasks and frees the adapters of all responses."""
        every: list[asyncio.Task[Any]] = [*self._helpers, *tasks]
        for task in every:
            task.cancel()
        # Retrieves the errors that nobody is told of.
        await asyncio.gather(*every, return_exceptions=True)
        for item in self._items:
            item.adapters.close()

    def _help(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._helpers.append(task)
        return task

    def _request_deadline(self) -> float:
        """Returns when the timeout of a request ends that is sent now."""
        if self._request_timeout is None:
            return self._deadline
        return min(self._deadline, time.monotonic() + self._request_timeout)

    async def _complete(
        self, item: _Item, before: asyncio.Task[None] | None
    ) -> Outcome:
        """Returns the outcome of one request, which is sent until it is not stale."""
        try:
            if before is not None:
                await asyncio.shield(before)
            response = await item.reply if self._as_one else None
            if isinstance(response, SGLangError):
                return response
            while True:
                if response is None:
                    response = await self._send_alone(item, item.request)
                if not await self._stale.is_stale(item.request, response):
                    scored = await self._score(item, response)
                    if scored is not None:
                        return scored
                response = None
        finally:
            # The rest of the batch may take longer.
            self._dispatcher.in_flight.forget(item.ticket)
            item.adapters.close()

    async def _score(self, item: _Item, response: Response) -> Outcome | None:
        """Returns a response with the log-probs of the requested mode.

        ``None`` if they are lost: the weights that generated it have been replaced.
        """
        completion = response.outcome
        if not (item.request.score_response and isinstance(completion, Completion)):
            return completion
        request = to_scoring_request(item.request, completion)
        for _ in range(MOST_SCORINGS):
            scores = await self._send_alone(item, request, like=response)
            outcome = scores.outcome
            if await self._stale.is_stale(request, scores):
                continue
            if isinstance(outcome, Completion):
                return with_scores(completion, outcome)
            if not isinstance(outcome, GenerationAbortedError) or outcome.requested:
                return outcome
        return outcome if isinstance(outcome, SGLangError) else None

    async def _send_alone(
        self, item: _Item, request: GenerateRequest, *, like: Response | None = None
    ) -> Response:
        """Sends one request by itself; ``like`` is the response that it scores."""
        dispatcher = self._dispatcher
        async with dispatcher.in_flight.turn(self._deadline, self._turns):
            deadline = self._request_deadline() if like is None else like.sent.deadline

            async def attempt(url: str) -> Response:
                (response,) = await dispatcher.post(
                    url, [request], [item.ticket], deadline, like=like
                )
                self._keep_adapter(item, response)
                return response

            try:
                return await dispatcher.send(
                    attempt,
                    lambda: [item.ticket],
                    session_id=request.session_id,
                    deadline=deadline,
                    direct=dropped_by_router(request.sampling_params),
                    prefer=None if like is None else like.sent.url,
                )
            except (ServerTimeoutError, ServerUnavailableError) as error:
                # The request has no time left for another attempt; the batch has.
                own = self._request_timeout is not None and deadline < self._deadline
                if own and deadline - time.monotonic() < GRACE_SECONDS:
                    raise ServerTimeoutError(
                        f"A request had no answer within {self._request_timeout:g} s: "
                        f"{error}"
                    ) from error
                raise

    async def _send_as_one(
        self, items: Sequence[_Item], before: asyncio.Task[None] | None
    ) -> None:
        """Sends requests as one, and resolves the reply of each when it comes."""
        breaks = itertools.count(1)

        async def attempt(url: str) -> None:
            try:
                await self._stream(url, _waiting(items))
            except ServerUnavailableError as error:
                if _spoils_batch(error, next(breaks)):
                    raise _SpoiltBatchError(str(error)) from error
                raise

        rest: SGLangError | None = None
        try:
            if before is not None:
                await asyncio.shield(before)
            async with self._dispatcher.in_flight.turn(self._deadline):
                await self._dispatcher.send(
                    attempt,
                    lambda: [item.ticket for item in _waiting(items)],
                    session_id=None,
                    deadline=self._deadline,
                )
        except (RequestRefusedError, _SpoiltBatchError) as error:
            torchrl_logger.debug(f"The requests of a batch are sent alone: {error}")
        except SGLangError as error:
            rest = error
        finally:
            for item in items:
                item.resolve(rest)

    async def _stream(self, url: str, items: Sequence[_Item]) -> None:
        responses = self._dispatcher.stream(
            url,
            [item.request for item in items],
            [item.ticket for item in items],
            self._deadline,
        )
        async with aclosing(responses):
            async for place, response in responses:
                if response is not None:
                    self._keep_adapter(items[place], response)
                items[place].resolve(response)

    def _keep_adapter(self, item: _Item, response: Response) -> None:
        if response.adapter is not None:
            held = self._dispatcher.adapters.held([response.adapter])
            item.adapters.enter_context(held)


def _waiting(items: Sequence[_Item]) -> list[_Item]:
    """Returns the items without a reply; those that were aborted get theirs here."""
    for item in items:
        if item.ticket.aborted:
            item.resolve(aborted_before_sending())
    return [item for item in items if not item.reply.done()]


class _SpoiltBatchError(ServerUnavailableError):
    """A batch failed as a whole, perhaps because of one of its requests."""


def _spoils_batch(error: ServerUnavailableError, breaks: int) -> bool:
    """Returns whether the requests of a failed batch are to be sent alone. Pure.

    An error answer or a malformed one may be the fault of one request. A connection
    that breaks is more likely the server's, the first time.
    """
    if error.status is None:
        return False
    return error.status >= 500 or not error.transient or breaks > 1


def _outcome(task: asyncio.Task[Outcome], index: int) -> Outcome:
    """Returns the outcome of a request, which knows its index if it is an error."""
    if not task.done():
        outcome: Outcome = ServerTimeoutError(
            "The timeout of the batch ended before this request was answered."
        )
    else:
        try:
            outcome = task.result()
        except SGLangError as error:
            outcome = error
    if isinstance(outcome, (GenerationAbortedError, RequestRefusedError)):
        return outcome.replace(index=index)
    return outcome
