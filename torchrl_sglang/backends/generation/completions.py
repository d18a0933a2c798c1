"""Runs one call: checks its requests, sends them, and returns completions in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.batch import run_batch
from torchrl_sglang.backends.generation.dispatch import Dispatcher, Outcome
from torchrl_sglang.backends.generation.log_probs import (
    TemperatureProbe,
    depends_on_server,
    plan_scoring,
)
from torchrl_sglang.backends.generation.request import (
    Batch,
    GenerateRequest,
    check_request,
)
from torchrl_sglang.backends.generation.stale_responses import StaleResponses
from torchrl_sglang.errors import ServerUnavailableError, SGLangError
from torchrl_sglang.types import Completion, VersionSpan

__all__ = ["Generation", "explain_unavailable"]

DEATH_GRACE_SECONDS = 2.0
"""Grace period for a server that hung up to be seen dead, so that the error says so."""


class Generation:
    """Runs calls of :meth:`.AsyncSGLang.generate` and its relatives.

    Used from the background loop only.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._capabilities = dispatcher.capabilities
        self._stale = StaleResponses(dispatcher.fleet, dispatcher.adapters)
        self._probe = TemperatureProbe(
            dispatcher.http, dispatcher.fleet, dispatcher.capabilities
        )

    async def run(self, batch: Batch) -> list[Completion]:
        """Returns the completion of each request; see :meth:`.AsyncSGLang.generate`."""
        done: dict[int, Completion] = {}
        try:
            async with aclosing(self.stream(batch)) as stream:
                async for index, outcome in stream:
                    # An error is in the place of a completion if it is to be returned.
                    done |= {index: outcome}  # type: ignore[dict-item]
        except SGLangError as error:
            if done:
                raise error.replace(completions=done) from error.__cause__
            raise
        return [done[index] for index in range(len(batch.requests))]

    async def stream(self, batch: Batch) -> AsyncGenerator[tuple[int, Outcome], None]:
        """Yields outcomes as they come; see :meth:`.AsyncSGLang.generate_iter`."""
        deadline = time.monotonic() + batch.seconds
        errors: dict[int, SGLangError] = {}
        requests = await self._prepare(batch, errors, deadline)
        for index, error in errors.items():
            yield index, error
        outcomes = run_batch(
            self._dispatcher,
            self._stale,
            requests,
            deadline=deadline,
            request_timeout=batch.request_timeout,
        )
        patient = True
        async with aclosing(outcomes):
            async for index, outcome in outcomes:
                if isinstance(outcome, Completion):
                    yield index, self._with_versions(outcome)
                    continue
                error = outcome
                if isinstance(error, ServerUnavailableError):
                    error = await explain_unavailable(self._fleet, error, patient)
                    patient = False
                if not batch.return_exceptions:
                    note = f"It is item {index} of {len(batch.requests)}."
                    raise error.replace(note=note)
                yield index, error

    async def _prepare(
        self, batch: Batch, errors: dict[int, SGLangError], deadline: float
    ) -> Mapping[int, GenerateRequest]:
        """Returns checked requests; errors are raised, or collected by index."""
        limits = self._capabilities
        name = "The prompt" if batch.return_exceptions else "Prompt {} of the batch"
        known: dict[int, dict[str, object]] = {}
        collected = errors if batch.return_exceptions else None
        checked = _for_each(
            dict(enumerate(batch.requests)),
            lambda i, each: check_request(each, limits, name.format(i), known),
            collected,
        )
        adapters = [request.adapter for request in checked.values()]
        await self._dispatcher.adapters.refresh(adapters)
        ignores = None
        if any(depends_on_server(each, limits) for each in checked.values()):
            ignores = await self._probe.ignores_temperature(deadline)
        return _for_each(
            checked, lambda _, each: plan_scoring(each, ignores, limits), collected
        )

    def _with_versions(self, completion: Completion) -> Completion:
        """Returns a completion with the versions that only the engine knows."""
        kept = self._fleet.weights.in_place_versions
        if kept and completion.versions:
            # A server that ran out of memory computed some of the KV cache again.
            mixed = any(span.version in kept for span in completion.versions[1:])
            completion = replace(completion, mixed_state=mixed)
        if completion.adapter_version is not None:
            # The server knows the version of the base model only.
            end = len(completion.token_ids)
            span = VersionSpan(version=completion.adapter_version, start=0, end=end)
            completion = replace(completion, versions=(span,))
        return completion


def _for_each(
    requests: Mapping[int, GenerateRequest],
    check: Callable[[int, GenerateRequest], GenerateRequest],
    errors: dict[int, SGLangError] | None,
) -> dict[int, GenerateRequest]:
    """Checks each request; its error is collected if there is where to."""
    checked = {}
    for index, request in requests.items():
        try:
            checked[index] = check(index, request)
        except SGLangError as error:
            if errors is None:
                raise
            errors[index] = error
    return checked


async def explain_unavailable(
    fleet: Fleet, error: ServerUnavailableError, patient: bool = True
) -> SGLangError:
    """Returns the error that says so if all servers are this engine's and have ended.

    ``patient``: wait until a server that hung up can be seen dead.
    """
    if fleet.closed or any(replica.handle is None for replica in fleet.replicas):
        return error
    for _ in range(20 if patient else 1):
        fleet.notice_deaths()
        if not fleet.serving:
            better = fleet.no_server_error()
            return error if type(better) is type(error) else better.replace(cause=error)
        await asyncio.sleep(DEATH_GRACE_SECONDS / 20 if patient else 0)
    return error
