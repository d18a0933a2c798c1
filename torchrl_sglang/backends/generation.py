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

from torchrl_sglang.backends.adapters import Adapters
from torchrl_sglang.backends.batch import Batch, Flags, prepare
from torchrl_sglang.backends.checks import check_seconds
from torchrl_sglang.backends.data_plane import DataPlane
from torchrl_sglang.backends.fleet import Fleet, version_order
from torchrl_sglang.backends.wire import GenerateRequest
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.types import Completion, ServerCapabilities, VersionSpan

__all__ = ["GENERATE_TIMEOUT_SECONDS", "Call", "Generation"]

GENERATE_TIMEOUT_SECONDS = 1800.0
"""Default budget for one batch."""

MAX_LOOKS = 3
"""How often one call looks which servers have older weights than the rest."""

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


class Generation:
    """Runs calls. Used from the background loop only.

    Args:
        data: sends requests.
        fleet: the servers, and the version of their weights.
        capabilities: what they can do.
        adapters: their LoRA adapters.
    """

    def __init__(
        self,
        data: DataPlane,
        fleet: Fleet,
        capabilities: ServerCapabilities,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._data = data
        self._fleet = fleet
        self._capabilities = capabilities

    async def run(self, call: Call) -> list[Completion]:
        """Returns a completion for each prompt; see :meth:`.AsyncSGLang.generate`."""
        batch = await self._prepare(call)
        outcomes: dict[int, Completion | SGLangError] = dict(batch.errors)
        budget = GENERATE_TIMEOUT_SECONDS if call.timeout is None else call.timeout
        deadline = time.monotonic() + budget
        left, looks = batch.requests, 0
        while left:
            key = self._fleet.weight_version
            interruptions = self._fleet.interruptions
            try:
                answers = await self._data.generate(
                    list(left.values()),
                    cache_key=key,
                    timeout=max(deadline - time.monotonic(), 1e-3),
                    request_timeout=call.request_timeout,
                )
            except ServerUnavailableError as error:
                await self.raise_better(error)
                raise
            again, older = {}, False
            for index, answer in zip(left, answers, strict=True):
                if self._is_older(answer, key):
                    again[index], older = left[index], True
                elif self._is_lost(left[index], answer, key, interruptions):
                    again[index] = left[index]
                else:
                    outcomes[index] = self._in_place(answer, index, batch.size, call)
            if older:
                looks = await self._look_at_servers(looks)
            left = again
        return [outcomes[index] for index in range(batch.size)]  # type: ignore[misc]

    async def stream(
        self, call: Call
    ) -> AsyncGenerator[tuple[int, Completion | SGLangError], None]:
        """Yields responses as they finish; see :meth:`.AsyncSGLang.generate_iter`."""
        batch = await self._prepare(call)
        for index, failure in batch.errors.items():
            yield index, failure
        budget = GENERATE_TIMEOUT_SECONDS if call.timeout is None else call.timeout
        deadline = time.monotonic() + budget
        left, looks = batch.requests, 0
        while left:
            key, again, older = self._fleet.weight_version, {}, False
            interruptions = self._fleet.interruptions
            places = list(left)
            stream = self._data.stream(
                list(left.values()),
                cache_key=key,
                timeout=max(deadline - time.monotonic(), 1e-3),
                request_timeout=call.request_timeout,
            )
            async with contextlib.aclosing(stream):
                try:
                    async for place, answer in stream:
                        index = places[place]
                        if self._is_older(answer, key):
                            again[index], older = left[index], True
                        elif self._is_lost(left[index], answer, key, interruptions):
                            again[index] = left[index]
                        else:
                            yield index, self._in_place(answer, index, batch.size, call)
                except ServerUnavailableError as error:
                    await self.raise_better(error)
                    raise
            if older:
                looks = await self._look_at_servers(looks)
            left = again

    async def _prepare(self, call: Call) -> Batch:
        for name, value in (
            ("timeout", call.timeout),
            ("request_timeout", call.request_timeout),
        ):
            if value is not None:
                check_seconds(name, value)
        flags = Flags(
            return_logprobs=call.return_logprobs,
            return_prompt_logprobs=call.return_prompt_logprobs,
            top_logprobs=call.top_logprobs,
            request_ids=call.request_ids,
            session_ids=call.session_ids,
            adapter=call.adapter,
        )
        batch = prepare(
            call.prompts,
            call.sampling_params,
            flags,
            self._capabilities,
            return_exceptions=call.return_exceptions,
        )
        await self._adapters.look([each.adapter for each in batch.requests.values()])
        return batch

    def _is_lost(
        self,
        request: GenerateRequest,
        answer: Completion | SGLangError,
        key: str,
        interruptions: int,
    ) -> bool:
        """Tells whether a weight update has made an answer worthless: ask again.

        Args:
            request: what was asked.
            answer: what a request came to.
            key: version of the weights when it was sent.
            interruptions: the fleet's, when it was sent.
        """
        interrupted = self._fleet.interruptions > interruptions
        if isinstance(answer, GenerationAbortedError):
            return interrupted and not answer.requested
        if (
            interrupted
            and request.adapter is None
            and isinstance(answer, Completion)
            and answer.adapter != self._adapters.default
        ):
            # One that was just being sent carried what requests carry no longer.
            return True
        return self._is_stale(answer, key)

    def _in_place(
        self, answer: Completion | SGLangError, index: int, size: int, call: Call
    ) -> Completion | SGLangError:
        kept = self._fleet.in_place_versions
        if kept and isinstance(answer, Completion):
            # A server that ran out of memory computed some of that state again.
            mixed = any(span.version in kept for span in answer.versions[1:])
            answer = replace(answer, mixed_state=mixed)
        return _in_place(answer, index, size, call)

    def _is_older(self, answer: Completion | SGLangError, key: str) -> bool:
        """Tells whether an answer has older weights than were served when it was asked.

        Its server was started again by somebody else, and no one knew.
        """
        if not isinstance(answer, Completion) or not answer.versions:
            return False
        return version_order(answer.versions[-1].version) < version_order(key)

    async def _look_at_servers(self, looks: int) -> int:
        """Takes servers that have older weights out of rotation; counts how often.

        Raises:
            WeightSyncStateError: if that was no help.
        """
        if looks >= MAX_LOOKS or self._fleet.look is None:
            raise WeightSyncStateError(
                f"A server answered with older weights than the current ones, "
                f"{self._fleet.weight_version!r}, and does not say so itself: "
                f"it was started again by somebody else. Send the weights again."
            )
        self._fleet.suspect_all()
        await self._fleet.look()
        return looks + 1

    def _is_stale(self, answer: Completion | SGLangError, key: str) -> bool:
        """Takes over a newer weight version, and tells whether to ask again.

        An answer that began with newer weights than ``key``, and with cached state
        that was looked up under that key, may have been computed by older weights:
        another engine object updated them meanwhile.
        """
        if not isinstance(answer, Completion) or not answer.versions:
            return False
        first, last = answer.versions[0].version, answer.versions[-1].version
        if version_order(last) > version_order(self._fleet.weight_version):
            self._fleet.weight_version = last
        newer = version_order(first) > version_order(key)
        return newer and answer.cached_tokens > 0

    async def raise_better(self, error: ServerUnavailableError) -> None:
        """Raises the better error where all servers are ours and have ended."""
        fleet = self._fleet
        if fleet.closed or any(replica.process is None for replica in fleet.replicas):
            return
        for _ in range(20):
            fleet.notice_deaths()
            if not fleet.serving:
                better = fleet.why_nobody_serves()
                if type(better) is not type(error):
                    raise better from error
                return
            await asyncio.sleep(DEATH_GRACE_SECONDS / 20)


def _in_place(
    answer: Completion | SGLangError, index: int, size: int, call: Call
) -> Completion | SGLangError:
    """Returns what an item of a batch came to, or raises its error."""
    if isinstance(answer, SGLangError):
        # Not all of the batch was sent, so its place is another one there.
        if isinstance(answer, (GenerationAbortedError, RequestRefusedError)):
            answer.index = index
        if not call.return_exceptions:
            answer.add_note(f"It is item {index} of {size}.")
            raise answer
    elif answer.adapter_version is not None:
        # The server knows the version of the base model only.
        end = len(answer.token_ids)
        span = VersionSpan(version=answer.adapter_version, start=0, end=end)
        answer = replace(answer, versions=(span,))
    return answer
