"""Sends one request until its response is complete, in one part or in several.

An update aborts requests on servers that cannot keep them. The next request goes on
from the tokens so far, or begins anew where none can.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from torchrl_sglang.backends.fleet.adapter_registry import AdapterRegistry
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import Suspected
from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.backends.generation.dispatch import Dispatcher, ServerResponse
from torchrl_sglang.backends.generation.in_flight import InFlightRequest
from torchrl_sglang.backends.generation.log_probs import with_scores
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.requests.plan import RequestPlan
from torchrl_sglang.requests.request import Outcome
from torchrl_sglang.requests.resume import (
    Stops,
    cut,
    ended,
    join_completions,
    no_tokens,
    stops_of,
)
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Adapter, Completion, VersionSpan

MOST_SCORINGS = 5
"""Most repetitions of scoring a response when updates and aborts interrupt it."""

GRACE_SECONDS = 0.5
"""Grace period for an in-flight request to report its own timeout."""

MOST_CHECKS = 3
"""Most checks in a row for servers with older weights that find none."""


class RequestRun:
    """One request and the tokens that it has generated so far."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        resends: ResendPolicy,
        get_tokenizer: Callable[[], Any],
        plan: RequestPlan,
        *,
        deadline: float,
        request_timeout: float | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._resends = resends
        self._get_tokenizer = get_tokenizer
        self._plan = plan
        self.ticket = InFlightRequest(
            deadline=deadline,
            request_timeout=request_timeout,
            request_id=plan.request.request_id,
            resumable=plan.resumable,
            survives_retraction=plan.survives_retraction,
        )
        self._start_over()

    @cached_property
    def _stops(self) -> Stops:
        return stops_of(self._plan.request.sampling_params)

    def _start_over(self) -> None:
        self._so_far: Completion | None = None
        self._adapter: Adapter | None = None
        # The part of the request that has no response yet.
        self._rest = self._plan

    async def prefill(self) -> None:
        """Has a server compute the prompt of the request; a failure is only logged."""
        plan, in_flight = self._plan.prefill(), self._dispatcher.in_flight
        deadline, seconds = self.ticket.deadline, self.ticket.request_timeout
        # Without the caller's name: aborting one request must not abort its prefill.
        ticket = InFlightRequest(deadline=deadline, request_timeout=seconds)
        try:
            with in_flight.registered([ticket]):
                async with in_flight.turn(deadline):
                    await self._dispatcher.generate(
                        plan, ticket, ticket.end_of_attempt(), count=False
                    )
        except SGLangError as error:
            # The request itself will fail in the same way.
            torchrl_logger.debug(f"A prefill failed: {error}")

    async def run(self, before: asyncio.Task[None] | None) -> Outcome:
        """Returns the outcome of the request, which is sent after ``before``."""
        outcome: Outcome | None = None
        try:
            if before is not None:
                await asyncio.shield(before)
            while outcome is None:
                outcome = await self._go_on()
        except GenerationAbortedError as error:
            outcome = error
        finally:
            # The rest of the batch may take longer.
            self._dispatcher.in_flight.forget(self.ticket)
        if isinstance(outcome, GenerationAbortedError) and outcome.partial is None:
            partial = self._so_far or no_tokens(self._plan.request)
            return outcome.replace(partial=partial)
        return outcome

    async def _go_on(self) -> Outcome | None:
        """Sends the rest of the request; returns the outcome unless more remains."""
        response = await self._send(self._rest)
        if self._so_far is not None and response.adapter != self._adapter:
            # Requests that select none have another one since.
            self._start_over()
            return None
        # For scoring.
        with self._dispatcher.adapters.held(response.adapter):
            outcome = response.outcome
            stale = await self._resends.is_stale(self._rest, response)
            if stale or response.cut_short:
                joined = await self._keep(response)
            elif isinstance(outcome, Completion):
                joined = self._whole(outcome)
                if self._so_far is not None:
                    joined = await self._cut(joined)
            elif isinstance(outcome, GenerationAbortedError) and outcome.partial:
                return outcome.replace(partial=self._whole(outcome.partial))
            else:
                return outcome
            if joined is None or not self._plan.scores:
                return joined
            return await self._score(response, joined)

    def _whole(self, part: Completion) -> Completion:
        """Returns the response up to the end of a part of it."""
        part = _with_own_version(part)
        return part if self._so_far is None else join_completions(self._so_far, part)

    async def _keep(self, response: ServerResponse) -> Completion | None:
        """Keeps an aborted response's tokens; returns it if it had come to its end."""
        part = self._resends.kept(response)
        if part is None:
            return None
        eos, tokenizer = self._plan.capabilities.eos_token_ids, await self._tokenizer()
        ends = {*eos, getattr(tokenizer, "eos_token_id", None)}
        params = self._plan.request.sampling_params
        joined = ended(await self._cut(self._whole(part)), params, ends)
        if joined.finish_reason != "abort":
            return joined
        continuation = self._plan.resume(joined)
        # Without a tokenizer, a stop string across two parts would be missed.
        misses_stop = self._stops and tokenizer is None
        if continuation is None or misses_stop or not self.ticket.resumable:
            self.ticket.resumable = False
            self.ticket.restarts += 1
            self._start_over()
        else:
            self._so_far, self._rest = joined, continuation
            self._adapter = response.adapter
        return None

    async def _cut(self, whole: Completion) -> Completion:
        """Ends a response at a stop string that more than one part of it holds."""
        tokenizer = await self._tokenizer() if self._stops else None
        if tokenizer is None:
            return whole
        return cut(whole, self._stops, tokenizer.decode, include=True)

    async def _tokenizer(self) -> Any:
        """Returns the server's tokenizer; ``None`` if it has none or it is not here."""
        if not self._plan.capabilities.has_tokenizer:
            return None
        try:
            return await asyncio.to_thread(self._get_tokenizer)
        except ConfigurationError as error:
            torchrl_logger.debug(f"Stop strings are not matched here: {error}")
            return None

    async def _score(
        self, response: ServerResponse, whole: Completion
    ) -> Outcome | None:
        """Returns a response with its mode's log-probs; ``None`` if they are lost."""
        scoring = self._plan.score(whole)
        for _ in range(MOST_SCORINGS):
            scores = await self._send(scoring, like=response)
            outcome = scores.outcome
            if await self._resends.is_stale(scoring, scores):
                continue
            if isinstance(outcome, Completion):
                scored = with_scores(whole, _with_own_version(outcome))
                if scored is not None:
                    return scored
                break
            if not isinstance(outcome, GenerationAbortedError) or outcome.requested:
                return outcome
        if isinstance(outcome, SGLangError):
            return outcome
        self._start_over()
        return None

    async def _send(
        self, plan: RequestPlan, *, like: ServerResponse | None = None
    ) -> ServerResponse:
        """Sends one request in its turn; ``like`` is the response that it scores."""
        ticket = self.ticket
        async with self._dispatcher.in_flight.turn(ticket.deadline):
            deadline = ticket.end_of_attempt() if like is None else like.deadline
            try:
                return await self._dispatcher.generate(
                    plan, ticket, deadline, like=like
                )
            except (ServerTimeoutError, ServerUnavailableError) as error:
                # The request has no time left for another attempt; the batch has.
                if deadline < ticket.deadline and (
                    deadline - time.monotonic() < GRACE_SECONDS
                ):
                    raise ServerTimeoutError(
                        f"A request had no answer within {ticket.request_timeout:g} s: "
                        f"{error}"
                    ) from error
                raise


def _with_own_version(part: Completion) -> Completion:
    """Returns tokens of an adapter that has a version with that version."""
    if part.adapter_version is None:
        return part
    # The server knows the version of the base model only.
    end = len(part.token_ids)
    span = VersionSpan(version=part.adapter_version, start=0, end=end)
    return replace(part, versions=(span,))


class ResendPolicy:
    """Decides whether a response must be generated again after a weight update."""

    def __init__(
        self,
        fleet: Fleet,
        adapters: AdapterRegistry,
        poll: Callable[[], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._poll = poll
        self._checked_at = -math.inf
        self._vain_checks = 0
        self._checking: asyncio.Task[None] | None = None

    async def is_stale(self, plan: RequestPlan, response: ServerResponse) -> bool:
        """Returns whether a request has to be sent again."""
        outcome, sent_with = response.outcome, response.weights
        aborted = self._fleet.weights.abort_epoch > sent_with.abort_epoch
        if isinstance(outcome, GenerationAbortedError):
            return aborted and not outcome.requested
        if not isinstance(outcome, Completion):
            return False
        if (
            aborted
            and plan.request.adapter is None
            and outcome.adapter != self._adapters.default
        ):
            # The request was sent with the previous default adapter.
            return True
        if outcome.weight_version is None:
            return False
        if version_order(outcome.weight_version) < version_order(sent_with.version):
            # Another process restarted the server, and this one did not know.
            await self._check_servers(response.sent_at)
            return True
        self._vain_checks = 0
        self._observe(outcome.weight_version)
        return self._used_stale_cache(outcome, sent_with.version)

    def _observe(self, version: str) -> None:
        """Takes over a newer version, which another engine object has sent."""
        if version_order(version) > version_order(self._fleet.weights.version):
            self._fleet.change_weights(lambda weights: weights.observe(version))

    def kept(self, response: ServerResponse) -> Completion | None:
        """Returns the tokens of an aborted response that the rest can follow."""
        error, sent_with = response.outcome, response.weights.version
        partial = getattr(error, "partial", None)
        if not isinstance(partial, Completion) or not partial.token_ids:
            return None
        older = version_order(partial.weight_version or "") < version_order(sent_with)
        if older or self._used_stale_cache(partial, sent_with):
            return None
        return partial

    async def _check_servers(self, sent_at: float) -> None:
        """Takes servers with older weights out of rotation, once for all requests."""
        if sent_at < self._checked_at:
            return
        if self._checking is None or self._checking.done():
            if self._vain_checks >= MOST_CHECKS:
                raise WeightSyncStateError(
                    f"A server answered with older weights than the current ones, "
                    f"{self._fleet.weights.version!r}, and does not say so itself: "
                    f"it was started again by somebody else. Send the weights again."
                )
            self._vain_checks += 1
            self._checking = asyncio.ensure_future(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        self._fleet.apply(Suspected())
        await self._poll()
        self._checked_at = time.monotonic()

    def _used_stale_cache(self, completion: Completion, key: str) -> bool:
        """Returns whether a response may rest on a KV cache of older weights."""
        # True if the response started on newer weights than its cache key and hit a
        # cached prefix: another engine object updated the weights, or the cache was not
        # flushed.
        weights = self._fleet.weights
        if completion.versions:
            first = completion.versions[0].version
            suspect = first not in weights.clean_versions
        else:
            # The response may have started on any of the weights in place.
            first = completion.weight_version or ""
            suspect = first not in weights.in_place_versions
        newer = version_order(first) > version_order(key)
        return newer and suspect and completion.cached_tokens > 0
