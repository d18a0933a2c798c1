"""One call of the engine, from its arguments to completions of the right weights.

It stands between the faces of :class:`~torchrl_sglang.AsyncSGLang` and the data plane:
prompts are checked, answers find their places, and none is kept that older weights may
have computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.generation.dispatch import DataPlane, Moment
from torchrl_sglang.backends.generation.log_probs import (
    depends_on_server,
    ignores_temperature,
    plan_scoring,
)
from torchrl_sglang.backends.generation.protocol import GenerateRequest
from torchrl_sglang.backends.generation.request import Batch, Flags, prepare
from torchrl_sglang.backends.lora.registry import Adapters
from torchrl_sglang.backends.support.checks import check_seconds
from torchrl_sglang.backends.support.versions import version_order
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.types import (
    Completion,
    LogProbsMode,
    ServerCapabilities,
    VersionSpan,
)

__all__ = [
    "GENERATE_TIMEOUT_SECONDS",
    "Call",
    "Generation",
    "WeightState",
]

GENERATE_TIMEOUT_SECONDS = 1800.0
"""Default budget for one batch."""

MAX_LOOKS = 3
"""How often in a row requests look which servers have older weights than the rest."""

DEATH_GRACE_SECONDS = 2.0
"""A server that hung up gets this long to be seen dead, so that the error says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one call of :meth:`.AsyncSGLang.generate` and its relatives."""

    prompts: Sequence[Sequence[int]]
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    return_logprobs: bool | Sequence[bool] = False
    return_prompt_logprobs: bool | Sequence[bool] = False
    top_logprobs: int | Sequence[int] = 0
    request_ids: Sequence[str] | None = None
    session_ids: str | Sequence[str | None] | None = None
    timeout: float | None = None
    request_timeout: float | None = None
    return_exceptions: bool = False
    adapter: str | Sequence[str | None] | None = None
    logprobs_mode: LogProbsMode = "model"


class Generation:
    """Runs calls. Used from the background loop only.

    Args:
        data: sends requests.
        http: connections, for questions to the servers.
        fleet: the servers, and the version of their weights.
        capabilities: what they can do.
        adapters: their LoRA adapters.
    """

    def __init__(
        self,
        data: DataPlane,
        http: HttpClient,
        fleet: Fleet,
        capabilities: ServerCapabilities,
        adapters: Adapters,
    ) -> None:
        self._http = http
        # For which servers it was found out whether log-probs ignore the temperature.
        self._probed: tuple[int, bool | None] | None = None
        self._adapters = adapters
        self._data = data
        self._fleet = fleet
        self._capabilities = capabilities

    async def run(self, call: Call) -> list[Completion]:
        """Returns a completion for each prompt; see :meth:`.AsyncSGLang.generate`."""
        outcomes: dict[int, Completion | SGLangError] = {}
        stream = self._stream(call)
        async with contextlib.aclosing(stream):
            async for index, outcome in stream:
                if isinstance(outcome, SGLangError) and not call.return_exceptions:
                    finished = {
                        place: answer
                        for place, answer in outcomes.items()
                        if isinstance(answer, Completion)
                    }
                    raise _with_note(outcome.replace(completions=finished), index, call)
                outcomes[index] = outcome
        return [outcomes[index] for index in sorted(outcomes)]  # type: ignore[misc]

    async def stream(
        self, call: Call
    ) -> AsyncGenerator[tuple[int, Completion | SGLangError], None]:
        """Yields responses as they finish; see :meth:`.AsyncSGLang.generate_iter`."""
        stream = self._stream(call)
        async with contextlib.aclosing(stream):
            async for index, outcome in stream:
                if isinstance(outcome, SGLangError) and not call.return_exceptions:
                    raise _with_note(outcome, index, call)
                yield index, outcome

    async def _stream(
        self, call: Call
    ) -> AsyncGenerator[tuple[int, Completion | SGLangError], None]:
        batch, deadline = await self._prepare(call)
        for index, failure in batch.errors.items():
            yield index, failure
        places = list(batch.requests)
        stream = self._data.stream(
            list(batch.requests.values()),
            timeout=max(deadline - time.monotonic(), 1e-3),
            request_timeout=call.request_timeout,
        )
        patient = True
        async with contextlib.aclosing(stream):
            async for place, outcome in stream:
                index = places[place]
                if isinstance(outcome, ServerUnavailableError):
                    better = await self.better(outcome, patient=patient)
                    patient = False
                    yield index, better
                else:
                    yield index, self._in_place(outcome, index)

    async def _prepare(self, call: Call) -> tuple[Batch, float]:
        """Returns what to send, and when the call's budget ends."""
        for name, value in (
            ("timeout", call.timeout),
            ("request_timeout", call.request_timeout),
        ):
            if value is not None:
                check_seconds(name, value)
        budget = GENERATE_TIMEOUT_SECONDS if call.timeout is None else call.timeout
        deadline = time.monotonic() + budget
        flags = Flags(
            return_logprobs=call.return_logprobs,
            return_prompt_logprobs=call.return_prompt_logprobs,
            top_logprobs=call.top_logprobs,
            request_ids=call.request_ids,
            session_ids=call.session_ids,
            adapter=call.adapter,
            logprobs_mode=call.logprobs_mode,
        )
        batch = prepare(
            call.prompts,
            call.sampling_params,
            flags,
            self._capabilities,
            return_exceptions=call.return_exceptions,
        )
        await self._adapters.look([each.adapter for each in batch.requests.values()])
        if any(map(self._depends_on_server, batch.requests.values())):
            ignores = await self._ignores_temperature(deadline)
        else:
            ignores = None
        planned = plan_scoring(
            batch,
            ignores,
            self._capabilities,
            return_exceptions=call.return_exceptions,
        )
        return planned, deadline

    def _depends_on_server(self, request: GenerateRequest) -> bool:
        return depends_on_server(request, self._capabilities)

    async def _ignores_temperature(self, deadline: float) -> bool | None:
        """Returns whether the servers' log-probs are those before the temperature.

        It is asked of every server that serves, again when others have come.

        Returns:
            ``None`` if one of them did not tell, or they differ.
        """
        members = self._fleet.membership_epoch
        if self._probed is None or self._probed[0] != members:
            urls = self._fleet.serving
            found = await asyncio.gather(
                *(
                    ignores_temperature(self._http, url, self._capabilities, deadline)
                    for url in urls
                )
            )
            if None in found or not urls:
                return None
            self._probed = (members, found[0] if len(set(found)) == 1 else None)
        return self._probed[1]

    def _in_place(
        self, outcome: Completion | SGLangError, index: int
    ) -> Completion | SGLangError:
        """Returns what an item of a batch came to, for its caller."""
        if isinstance(outcome, SGLangError):
            # Not all of the batch was sent, so its place is another one there.
            if isinstance(outcome, (GenerationAbortedError, RequestRefusedError)):
                return outcome.replace(index=index)
            return outcome
        kept = self._fleet.weights.in_place_versions
        if kept and outcome.versions:
            # A server that ran out of memory computed some of that state again.
            mixed = any(span.version in kept for span in outcome.versions[1:])
            outcome = replace(outcome, mixed_state=mixed)
        if outcome.adapter_version is not None:
            # The server knows the version of the base model only.
            end = len(outcome.token_ids)
            span = VersionSpan(version=outcome.adapter_version, start=0, end=end)
            outcome = replace(outcome, versions=(span,))
        return outcome

    async def better(
        self, error: ServerUnavailableError, *, patient: bool = True
    ) -> SGLangError:
        """Returns the better error where all servers are ours and have ended.

        Args:
            error: what a request came to.
            patient: wait until a server that hung up can be seen dead.
        """
        fleet = self._fleet
        if fleet.closed or any(replica.handle is None for replica in fleet.replicas):
            return error
        for _ in range(20 if patient else 1):
            fleet.notice_deaths()
            if not fleet.serving:
                better = fleet.no_server_error()
                if type(better) is not type(error):
                    return better.replace(cause=error)
                return error
            await asyncio.sleep(DEATH_GRACE_SECONDS / 20 if patient else 0)
        return error


def _with_note(error: SGLangError, index: int, call: Call) -> SGLangError:
    return error.replace(note=f"It is item {index} of {len(call.prompts)}.")


class WeightState:
    """Tells requests of weight updates; see :class:`.data_plane.Weights`.

    Args:
        fleet: the servers, and the version of their weights.
        adapters: their LoRA adapters.
    """

    def __init__(self, fleet: Fleet, adapters: Adapters) -> None:
        self._fleet = fleet
        self._adapters = adapters
        # How often servers were looked at, and how often in a row without success.
        self._looks = self._vain_looks = 0
        self._looking: asyncio.Task[None] | None = None

    def moment(self) -> Moment:
        """Returns the state of the weights now."""
        weights = self._fleet.weights
        return Moment(weights.version, weights.abort_epoch, self._looks)

    async def outdated(
        self,
        request: GenerateRequest,
        outcome: Completion | SGLangError,
        moment: Moment,
    ) -> bool:
        """Returns whether a weight update has made an answer worthless: ask again.

        Raises:
            WeightSyncStateError: if servers go on answering with older weights than
                were served when they were asked.
        """
        interrupted = self._fleet.weights.abort_epoch > moment.interruptions
        if isinstance(outcome, GenerationAbortedError):
            return interrupted and not outcome.requested
        if (
            interrupted
            and request.adapter is None
            and isinstance(outcome, Completion)
            and outcome.adapter != self._adapters.default
        ):
            # One that was just being sent carried what requests carry no longer.
            return True
        if self._is_older(outcome, moment.version):
            await self._look_at_servers(moment)
            return True
        return self._is_stale(outcome, moment.version)

    def _is_older(self, answer: Completion | SGLangError, key: str) -> bool:
        """Tells whether an answer has older weights than were served when it was asked.

        Its server was started again by somebody else, and no one knew.
        """
        if not isinstance(answer, Completion) or answer.weight_version is None:
            return False
        if version_order(answer.weight_version) < version_order(key):
            return True
        self._vain_looks = 0
        return False

    async def _look_at_servers(self, moment: Moment) -> None:
        """Takes servers that have older weights out of rotation, once for all requests.

        Raises:
            WeightSyncStateError: if that was no help.
        """
        if moment.looks < self._looks:
            # Somebody has looked since it was sent.
            return
        if self._looking is None or self._looking.done():
            if self._vain_looks >= MAX_LOOKS or self._fleet.poll is None:
                raise WeightSyncStateError(
                    f"A server answered with older weights than the current ones, "
                    f"{self._fleet.weights.version!r}, and does not say so itself: "
                    f"it was started again by somebody else. Send the weights again."
                )
            self._vain_looks += 1
            self._looking = asyncio.ensure_future(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        look = self._fleet.poll
        if look is not None:
            self._fleet.suspect_all()
            await look()
        self._looks += 1

    def _is_stale(self, answer: Completion | SGLangError, key: str) -> bool:
        """Takes over a newer weight version, and tells whether to ask again.

        An answer that began with newer weights than ``key``, and with a cached prefix
        that was looked up under that key, may have been computed by older weights:
        another engine object updated them meanwhile, or the cache was not emptied.
        """
        if not isinstance(answer, Completion) or answer.weight_version is None:
            return False
        fleet, last = self._fleet, answer.weight_version
        fleet.weights_state.observe(last)
        if answer.versions:
            first = answer.versions[0].version
            suspect = first not in fleet.weights.clean_versions
        else:
            # It may have begun with any of them.
            first, suspect = last, last not in fleet.weights.in_place_versions
        newer = version_order(first) > version_order(key)
        return newer and suspect and answer.cached_tokens > 0
