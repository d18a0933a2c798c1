"""Places requests on servers, sends them, and retries them on others.

Only broken connections and answers 5xx are retried: a 4xx is the request's own fault, a
timeout is the caller's limit, and an abort was intended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrl_sglang.backends.client.http import HttpClient, HttpResponse
from torchrl_sglang.backends.fleet.adapter_registry import AdapterRegistry
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.backends.generation.in_flight import (
    Counters,
    InFlight,
    InFlightRequest,
)
from torchrl_sglang.backends.generation.reply import (
    aborted_early,
    cut_short,
    decode_reply,
    decode_tokens,
    parse_completion,
)
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
)
from torchrl_sglang.requests.plan import RequestPlan
from torchrl_sglang.requests.request import Outcome
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import OpenSpan, span, traced_headers
from torchrl_sglang.support.user_code import carried_errors
from torchrl_sglang.types import Adapter, Completion, ServerCapabilities

MAX_ATTEMPTS = 5

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""A router with a keyed policy sends requests with equal values of this header to one
server."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerResponse:
    """One server's response to one request."""

    outcome: Outcome
    url: str
    """Server or router that it was sent to."""
    adapter: Adapter | None
    weights: ServedWeights
    sent_at: float
    deadline: float
    """Monotonic time at which the request's own timeout ends."""
    cut_short: bool = False
    """The server ended in the middle of it."""


class Dispatcher:
    """Sends generation requests. Used from the background loop only."""

    def __init__(
        self,
        http: HttpClient,
        fleet: Fleet,
        capabilities: ServerCapabilities,
        adapters: AdapterRegistry,
        *,
        max_attempts: int,
        max_in_flight: int,
    ) -> None:
        self.http = http
        self.fleet = fleet
        self.capabilities = capabilities
        self.adapters = adapters
        self.counters = Counters()
        self.in_flight = InFlight(http, fleet, self.counters, max_in_flight)
        self._max_attempts = max_attempts

    async def generate(
        self,
        plan: RequestPlan,
        ticket: InFlightRequest,
        deadline: float,
        *,
        like: ServerResponse | None = None,
        count: bool = True,
    ) -> ServerResponse:
        """Sends a request until it is answered; ``like`` is a response to score."""
        name = plan.request.adapter

        async def attempt(url: str) -> ServerResponse:
            with (
                span(
                    "POST /generate",
                    kind="client",
                    url__full=f"{url}/generate",
                    http__request__method="POST",
                    gen_ai__operation__name="text_completion",
                    gen_ai__usage__input_tokens=len(plan.request.input_ids),
                ) as traced,
                # Looked up here, so that a request that waited has the newest.
                self.adapters.used(name)
                if like is None
                else self.adapters.held(like.adapter) as adapter,
            ):
                response = await self._attempt(
                    url, plan, ticket, deadline, adapter, count
                )
                _trace(traced, response.outcome)
                return response

        return await self.send(
            attempt,
            ticket,
            deadline,
            session_id=plan.request.session_id,
            direct=plan.direct,
            prefer=None if like is None else like.url,
        )

    async def _attempt(
        self,
        url: str,
        plan: RequestPlan,
        ticket: InFlightRequest,
        deadline: float,
        adapter: Adapter | None,
        count: bool,
    ) -> ServerResponse:
        """Sends a request once; counts and returns its response."""
        weights, sent_at = self.fleet.weights, time.monotonic()
        payload = plan.payload(
            cache_key=weights.version,
            rid=ticket.sent_as,
            adapter=None if adapter is None else adapter.served_as,
            # A router drops the interval, and deltas would have to be joined.
            stream=not (self.fleet.is_router(url) or self.capabilities.streams_deltas),
        )
        path, loss = f"{url}/generate", None
        try:
            if "stream" in payload:
                tell = plan.request.on_tokens
                answer, loss = await self._stream(path, payload, deadline, tell)
            else:
                session = plan.request.session_id
                answer = await self.post(path, payload, ticket, deadline, session)
            reply = decode_reply(answer, plan)
            # Otherwise only the mark of the end was lost.
            if loss is not None and reply.meta_info.finish_reason is None:
                self._count_loss(ticket, url, loss)
                reply = cut_short(reply, loss)
            else:
                loss = None
        except RequestRefusedError as error:
            reply, loss = aborted_early(error), None
        seconds, meta = time.monotonic() - sent_at, reply.meta_info
        outcome: Outcome
        try:
            outcome = parse_completion(
                reply,
                plan,
                server=url,
                sent_version=weights.version,
                in_place_versions=self.fleet.weights.in_place_versions,
                adapter=adapter,
            )
        except GenerationAbortedError as error:
            outcome = error.replace(requested=ticket.aborted)
        except RequestRefusedError as error:
            outcome = error
        if count:
            self.counters.count_times(
                seconds, meta.queue_time, meta.first_token_latency, meta.num_retractions
            )
            self.counters.count_outcome(len(plan.request.input_ids), outcome)
        return ServerResponse(
            outcome=outcome,
            url=url,
            adapter=adapter,
            weights=weights,
            sent_at=sent_at,
            deadline=deadline,
            cut_short=loss is not None,
        )

    async def send(
        self,
        attempt: Callable[[str], Awaitable[T]],
        ticket: InFlightRequest,
        deadline: float,
        *,
        session_id: str | None = None,
        direct: bool = False,
        prefer: str | None = None,
    ) -> T:
        """Calls ``attempt`` with addresses until it must not be repeated."""
        failed: list[str] = []
        adapters_checked = False
        while True:
            if ticket.aborted:
                raise GenerationAbortedError(
                    "The request was aborted before a server had it.", requested=True
                )
            url = self.fleet.pick(session_id, failed, direct=direct, prefer=prefer)
            try:
                with self.in_flight.attempt(ticket, url):
                    return await attempt(url)
            except RequestRefusedError as error:
                if adapters_checked or not await self.adapters.missed(error):
                    raise
                # Another process had unloaded its adapter.
                adapters_checked = True
            except ServerUnavailableError as error:
                self.fleet.failed(url)
                failed.append(url)
                delay = retry_delay(error, len(failed), self._max_attempts)
                if delay is None or delay >= seconds_left(deadline):
                    raise
                torchrl_logger.debug(f"Attempt {len(failed)} failed: {error}")
                self.counters.retries += 1
                await asyncio.sleep(delay)

    async def post(
        self,
        url: str,
        payload: dict[str, Any],
        ticket: InFlightRequest,
        deadline: float,
        session_id: str | None,
    ) -> HttpResponse:
        """Posts a request and returns the answer, which is a success."""
        answer = await self.http.request(
            "POST",
            url,
            payload,
            timeout=seconds_left(deadline),
            headers={
                ROUTING_KEY_HEADER: session_id or ticket.sent_as,
                **self._traced(),
            },
        )
        return answer.raise_for_status()

    def _traced(self) -> dict[str, str]:
        """Returns headers with which servers that trace continue a trace."""
        # Reading the arguments takes longer.
        headers = traced_headers()
        return headers if headers and self.capabilities.args.enable_trace else {}

    async def _stream(
        self,
        url: str,
        payload: dict[str, Any],
        deadline: float,
        tell: Callable[[list[int]], None] | None,
    ) -> tuple[HttpResponse, ServerUnavailableError | None]:
        """Posts a request; returns the last event, and the error that came behind."""
        latest: HttpResponse | None = None
        called_at = 0.0

        def keep(event: HttpResponse) -> None:
            nonlocal latest, called_at
            latest = event
            if tell is None:
                return
            # An event has everything so far, and takes its time to read: callbacks are
            # 0.05 s apart.
            if (now := time.monotonic()) - called_at >= 0.05:
                called_at = now
                if (ids := decode_tokens(event)) is not None:
                    with carried_errors():
                        tell(ids)

        timeout, headers = seconds_left(deadline), self._traced()
        loss = None
        try:
            await self.http.stream(url, payload, keep, timeout=timeout, headers=headers)
        except ServerUnavailableError as error:
            if latest is None or not error.transient:
                raise
            loss = error
        if latest is None:
            raise ServerUnavailableError(f"{url} sent a stream without any event.")
        return latest, loss

    def _count_loss(
        self, ticket: InFlightRequest, url: str, loss: ServerUnavailableError
    ) -> None:
        """Counts a server that ended in a response; raises if too many did."""
        ticket.losses += 1
        if ticket.losses >= self._max_attempts:
            raise loss.replace(transient=False) from None
        self.in_flight.abandon(ticket)
        self.fleet.failed(url)
        self.counters.retries += 1


def _trace(traced: OpenSpan, outcome: Outcome) -> None:
    if isinstance(outcome, Completion):
        traced.set(
            gen_ai__usage__output_tokens=len(outcome.token_ids),
            gen_ai__response__finish_reasons=[outcome.finish_reason],
            cached_tokens=outcome.cached_tokens,
            weight_version=outcome.weight_version,
        )
    else:
        traced.fail(str(outcome))


def retry_delay(
    error: ServerUnavailableError, attempt: int, max_attempts: int
) -> float | None:
    """Returns the delay after the ``attempt``-th attempt; ``None`` for no retry."""
    if attempt >= max_attempts or not error.transient:
        return None
    # The longest delay doubles with each attempt.
    limit = min(0.1 * 2.0 ** (attempt - 1), 5.0)
    # Requests that failed together must not return together.
    return random.uniform(limit / 2, limit)


def seconds_left(deadline: float) -> float:
    """Returns the timeout of a call that ends at ``deadline``; never 0."""
    return max(deadline - time.monotonic(), 1e-3)
