"""Places requests on servers, sends them, and retries them on others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.weights_state import Weights
from torchrl_sglang.backends.generation.aborts import Aborts
from torchrl_sglang.backends.generation.in_flight import InFlight, Ticket
from torchrl_sglang.backends.generation.metrics import Counters
from torchrl_sglang.backends.generation.protocol import (
    ROUTING_KEY_HEADER,
    finished_reply,
    parse_completion,
    reply_position,
    to_payload,
)
from torchrl_sglang.backends.generation.request import GenerateRequest
from torchrl_sglang.backends.generation.retries import RetryPolicy, seconds_left
from torchrl_sglang.backends.lora.registry import AdapterRegistry
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import Adapter, Completion, ServerCapabilities

__all__ = ["Dispatcher", "Outcome", "Response", "Sent"]

Outcome = Completion | SGLangError
"""Result of a request."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Where and when a request was sent."""

    url: str
    """Server or router."""
    weights: Weights
    """State of the weights at that time."""
    time: float
    """That time, on the monotonic clock."""
    deadline: float
    """When the request's own timeout ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One server's response to one request."""

    outcome: Outcome
    adapter: Adapter | None
    """LoRA adapter that it was computed with."""
    sent: Sent


class Dispatcher:
    """Sends generation requests. Used from the background loop only."""

    def __init__(
        self,
        http: HttpClient,
        fleet: Fleet,
        capabilities: ServerCapabilities,
        adapters: AdapterRegistry,
        *,
        retries: RetryPolicy,
        max_in_flight: int,
        counters: Counters,
    ) -> None:
        self.http = http
        self.fleet = fleet
        self.capabilities = capabilities
        self.adapters = adapters
        self.counters = counters
        self.in_flight = InFlight(max_in_flight, counters)
        self.aborts = Aborts(http, fleet, self.in_flight)
        self._retries = retries

    async def send(
        self,
        attempt: Callable[[str], Awaitable[T]],
        tickets: Callable[[], Sequence[Ticket]],
        *,
        session_id: str | None,
        deadline: float,
        direct: bool = False,
        prefer: str | None = None,
    ) -> T:
        """Sends requests until an attempt succeeds or must not be repeated.

        Args:
            attempt: sends them to an address, under their tickets' ``sent_as``.
            tickets: returns those that wait for a response.
            session_id: requests of one session go to one server.
            deadline: when their timeout ends.
            direct: send to a server, not to the router.
            prefer: server to choose if it serves and has not failed.
        """
        failed: list[str] = []
        adapters_checked = False
        delay: float | None
        number = 0
        while True:
            number += 1
            waiting = tickets()
            if all(ticket.aborted for ticket in waiting):
                raise aborted_before_sending()
            url = self.fleet.pick(session_id, failed, direct=direct, prefer=prefer)
            rids = self.in_flight.sent(waiting)
            try:
                return await attempt(url)
            except (asyncio.CancelledError, ServerTimeoutError):
                # Nobody waits for the response any more.
                self.aborts.abandon(self.in_flight.landed(rids))
                raise
            except RequestRefusedError as error:
                if adapters_checked or not await self.adapters.missed(error):
                    raise
                # Another process had unloaded its adapter.
                adapters_checked, delay = True, 0.0
            except ServerUnavailableError as error:
                self.fleet.failed(url)
                failed.append(url)
                delay = self._retries.delay(error, number)
                if delay is None or delay >= seconds_left(deadline):
                    raise
                torchrl_logger.debug(f"Attempt {number} failed: {error}")
                self.counters.retries += 1
            finally:
                unanswered = self.in_flight.landed(rids)
            # The connection broke, but the server may still compute the request.
            self.aborts.abandon(unanswered)
            await asyncio.sleep(delay)

    async def post(
        self,
        url: str,
        requests: Sequence[GenerateRequest],
        tickets: Sequence[Ticket],
        deadline: float,
        *,
        like: Response | None = None,
        count: bool = True,
    ) -> list[Response]:
        """Sends requests as one and returns their responses.

        ``like`` is a response whose adapter they use; ``count`` is for the metrics.
        """
        with ExitStack() as stack:
            if like is None:
                # Looked up here, so that a request that waited has the newest.
                names = [request.adapter for request in requests]
                adapters = stack.enter_context(self.adapters.used(names))
            else:
                adapters = [like.adapter] * len(requests)
                stack.enter_context(self.adapters.held(adapters))
            sent, call = self._call(url, requests, tickets, adapters, deadline)
            answer = await self.http.request("POST", **call)
        replies = answer.raise_for_status().json()
        if isinstance(replies, dict) and len(requests) == 1:
            replies = [replies]
        if not isinstance(replies, list) or len(replies) != len(requests):
            size = len(replies) if isinstance(replies, list) else type(replies).__name__
            raise ServerUnavailableError(
                f"{url} was sent {len(requests)} prompts and answered {size}."
            )
        return [
            self._read(sent, *each, count=count)
            for each in zip(replies, requests, tickets, adapters, strict=True)
        ]

    async def stream(
        self,
        url: str,
        requests: Sequence[GenerateRequest],
        tickets: Sequence[Ticket],
        deadline: float,
    ) -> AsyncGenerator[tuple[int, Response | None], None]:
        """Sends requests as one and yields the position and response of each.

        A response comes when it is finished; a malformed one is ``None``.
        """
        rids = [ticket.sent_as for ticket in tickets]
        names = [request.adapter for request in requests]
        with self.adapters.used(names) as adapters:
            sent, call = self._call(
                url, requests, tickets, adapters, deadline, stream=True
            )
            async with aclosing(self.http.events(**call)) as events:
                async for event in events:
                    reply = finished_reply(event, url)
                    if reply is None:
                        continue
                    place = reply_position(reply, len(requests), url)
                    self.in_flight.landed([rids[place]])
                    item = requests[place], tickets[place], adapters[place]
                    try:
                        response = self._read(sent, reply, *item)
                    except ServerUnavailableError as error:
                        torchrl_logger.debug(f"A request is sent again: {error}")
                        response = None
                    yield place, response

    def _call(
        self,
        url: str,
        requests: Sequence[GenerateRequest],
        tickets: Sequence[Ticket],
        adapters: Sequence[Adapter | None],
        deadline: float,
        *,
        stream: bool = False,
    ) -> tuple[Sent, dict[str, Any]]:
        """Returns the record of an HTTP call, and its arguments."""
        weights = self.fleet.weights
        payload = to_payload(
            requests,
            self.capabilities,
            cache_key=weights.version,
            rids=[ticket.sent_as for ticket in tickets],
            adapters=[None if each is None else each.served_as for each in adapters],
            stream=stream,
        )
        return Sent(
            url=url, weights=weights, time=time.monotonic(), deadline=deadline
        ), {
            "url": f"{url}/generate",
            "payload": payload,
            "timeout": seconds_left(deadline),
            "headers": routing_header(requests[0].session_id, tickets[0]),
        }

    def _read(
        self,
        sent: Sent,
        reply: Any,
        request: GenerateRequest,
        ticket: Ticket,
        adapter: Adapter | None,
        *,
        count: bool = True,
    ) -> Response:
        """Returns the response in one item of a reply."""
        outcome: Outcome
        try:
            completion = parse_completion(
                reply,
                request,
                vocab_size=self.capabilities.vocab_size,
                server=sent.url,
                sent_version=sent.weights.version,
            )
        except GenerationAbortedError as error:
            outcome = error.replace(requested=ticket.aborted)
        except RequestRefusedError as error:
            outcome = error
        else:
            outcome = completion
            if adapter is not None:
                outcome = replace(
                    completion, adapter=adapter.name, adapter_version=adapter.version
                )
            if count:
                self.counters.count(completion, len(request.input_ids))
        return Response(outcome=outcome, adapter=adapter, sent=sent)


def routing_header(session_id: str | None, ticket: Ticket) -> dict[str, str]:
    """Returns the header by which a router keeps a session on one server."""
    return {ROUTING_KEY_HEADER: session_id or ticket.sent_as}


def aborted_before_sending() -> GenerationAbortedError:
    """Returns the outcome of a request that was aborted while it waited."""
    return GenerationAbortedError(
        "The request was aborted before a server had it.", requested=True
    )
