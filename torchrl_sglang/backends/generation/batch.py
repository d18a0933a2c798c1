"""Runs one call: checks its requests, and yields the outcome of each as it comes.

One request's outcome does not depend on the others of its batch. A prompt that several
of them share is prefilled first: each would compute it, and a router that has not seen
it would spread them over the servers.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.complete import (
    GRACE_SECONDS,
    RequestRun,
    ResendPolicy,
)
from torchrl_sglang.backends.generation.dispatch import Dispatcher
from torchrl_sglang.backends.generation.log_probs import TemperatureProbe
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.requests.plan import RequestPlan, plan_request
from torchrl_sglang.requests.request import Batch, Outcome
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.user_code import UserCodeError
from torchrl_sglang.types import Completion

FEWEST_TOKENS = 32
"""Shorter prompts are not prefilled."""


class Generation:
    """Runs calls of :meth:`.AsyncSGLang.generate`; for the background loop only."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        get_tokenizer: Callable[[], Any],
        poll: Callable[[], Awaitable[None]],
    ) -> None:
        self._dispatcher = dispatcher
        self._get_tokenizer = get_tokenizer
        self._warned_of_context = False
        self._resends = ResendPolicy(dispatcher.fleet, dispatcher.adapters, poll)
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
        plans = await self._plan(batch, errors, deadline)
        for index, error in errors.items():
            yield index, error
        patient = True
        outcomes = self._outcomes(plans, deadline, batch.request_timeout)
        async with aclosing(outcomes):
            async for index, outcome in outcomes:
                if isinstance(outcome, Completion):
                    yield index, outcome
                    continue
                error = outcome
                if isinstance(error, ServerUnavailableError):
                    fleet = self._dispatcher.fleet
                    error = await explain_unavailable(fleet, error, patient)
                    patient = False
                elif batch.return_partial and isinstance(error, GenerationAbortedError):
                    yield index, error.partial
                    continue
                if not batch.return_exceptions:
                    note = f"It is item {index} of {len(batch.requests)}."
                    raise error.replace(note=note)
                yield index, error

    async def _plan(
        self, batch: Batch, errors: dict[int, SGLangError], deadline: float
    ) -> dict[int, RequestPlan]:
        """Returns the plans by index; errors are raised, or collected."""
        limits = self._dispatcher.capabilities
        name = "The prompt" if batch.return_exceptions else "Prompt {} of the batch"
        checked_params: dict[int, dict[str, Any]] = {}
        plans = {}
        probed, ignores = False, None
        await self._dispatcher.adapters.refresh([r.adapter for r in batch.requests])
        for index, request in enumerate(batch.requests):
            try:
                plan = plan_request(request, limits, name.format(index), checked_params)
                if plan.scores is None:
                    if not probed:
                        ignores = await self._probe.ignores_temperature(deadline)
                        probed = True
                    plan = plan.settle(ignores)
                plans[index] = plan
                if not self._warned_of_context and plan.shortage is not None:
                    self._warned_of_context = True
                    torchrl_logger.warning(f"{plan.shortage} This is logged once.")
            except SGLangError as error:
                if not batch.return_exceptions:
                    raise
                errors[index] = error
        return plans

    async def _outcomes(
        self,
        plans: Mapping[int, RequestPlan],
        deadline: float,
        request_timeout: float | None,
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """Yields the index and the outcome of each request as it ends."""
        runs = {
            index: RequestRun(
                self._dispatcher,
                self._resends,
                self._get_tokenizer,
                plan,
                deadline=deadline,
                request_timeout=request_timeout,
            )
            for index, plan in plans.items()
        }
        tickets = [run.ticket for run in runs.values()]
        with self._dispatcher.in_flight.registered(tickets):
            if len(runs) == 1:
                ((index, run),) = runs.items()
                yield index, await _finish(run, index, deadline)
                return
            finished: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()
            prefills: dict[int, asyncio.Task[None]] = {}
            for group in sharing_prompts(plans):
                work = runs[group[0]].prefill()
                prefills |= dict.fromkeys(group, asyncio.ensure_future(work))
            pending = {
                asyncio.ensure_future(run.run(prefills.get(index))): index
                for index, run in runs.items()
            }
            started: list[asyncio.Task[Any]] = [*prefills.values(), *pending]
            for task in pending:
                task.add_done_callback(finished.put_nowait)
            try:
                while pending:
                    try:
                        async with asyncio.timeout(_time_left(deadline)):
                            task = await finished.get()
                    except TimeoutError:
                        for task, index in pending.items():
                            yield index, _outcome(task, index)
                        return
                    index = pending.pop(task)
                    yield index, _outcome(task, index)
            finally:
                for job in started:
                    job.cancel()
                # Retrieves the errors that nobody is told of.
                await asyncio.gather(*started, return_exceptions=True)


def _time_left(deadline: float) -> float:
    """Returns the seconds until a batch ends without its requests' own timeouts."""
    return max(deadline - time.monotonic(), 0.0) + GRACE_SECONDS


async def _finish(run: RequestRun, index: int, deadline: float) -> Outcome:
    """Returns the outcome of the only request of a batch."""
    try:
        async with asyncio.timeout(_time_left(deadline)):
            return _settle(await run.run(None), index)
    except (UserCodeError, SGLangError) as error:
        return _settle(error, index)
    except TimeoutError:
        return _late()


def _outcome(task: asyncio.Task[Outcome], index: int) -> Outcome:
    """Returns the outcome of a request of several."""
    if not task.done():
        return _late()
    try:
        return _settle(task.result(), index)
    except (UserCodeError, SGLangError) as error:
        return _settle(error, index)


def _late() -> ServerTimeoutError:
    return ServerTimeoutError(
        "The timeout of the batch ended before this request was answered."
    )


def _settle(outcome: Outcome | UserCodeError, index: int) -> Outcome:
    """Returns an outcome, which knows its index if it is an error."""
    if isinstance(outcome, UserCodeError):
        raise outcome.error from outcome.error.__cause__
    if isinstance(outcome, (GenerationAbortedError, RequestRefusedError)):
        return outcome.replace(index=index)
    return outcome


async def explain_unavailable(
    fleet: Fleet, error: ServerUnavailableError, patient: bool = True
) -> SGLangError:
    """Returns the error that says so if all servers are our own and have ended."""
    if fleet.state.closed or any(replica.handle is None for replica in fleet.replicas):
        return error
    # A server that has just hung up may need 2 s to be seen dead.
    for _ in range(20 if patient else 1):
        fleet.notice_deaths()
        if not fleet.serving:
            better = fleet.state.no_server_error()
            return error if type(better) is type(error) else better.replace(cause=error)
        await asyncio.sleep(0.1 if patient else 0)
    return error


def sharing_prompts(plans: Mapping[int, RequestPlan]) -> list[list[int]]:
    """Returns the indices of requests that share a prompt worth a prefill. Pure."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for index, request in ((index, plan.request) for index, plan in plans.items()):
        # Requests for the log-probs of their prompt compute it in any case.
        if (
            len(request.input_ids) >= FEWEST_TOKENS
            and not request.return_prompt_logprobs
        ):
            groups[tuple(request.input_ids), request.adapter].append(index)
    return [group for group in groups.values() if len(group) > 1]
