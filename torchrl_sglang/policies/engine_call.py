"""Sends a batch of requests to the engine: the middle step of the pipeline.

A server that was started with ``skip_tokenizer_init=True`` supports neither stop
strings nor ``min_new_tokens``: :func:`without_tokenizer` rewrites both as token ids,
and :func:`.cut` matches the stop strings afterwards. The steps are a generator of the
engine's calls, which :func:`ask` runs and :func:`ask_async` awaits.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.chat.tokens import decode
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.sampling import as_texts
from torchrl_sglang.requests.request import GenerateRequest, Outcome
from torchrl_sglang.requests.resume import (
    cut,
    join_completions,
    resume_request,
    stops_of,
)
from torchrl_sglang.types import Completion, ServerCapabilities

NEVER = -1e9
"""Logit bias that makes a token's probability 0 in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest(GenerateRequest):
    """A request for one sample of a policy."""

    include_stop: bool = True
    """Whether the response keeps the stop string that ended it."""


class Stages(NamedTuple):
    """Sampling parameters of one response of a server without a tokenizer."""

    first: Mapping[str, Any]
    """Sampling parameters of the first request."""
    rest: Mapping[str, Any] | None = None
    """Sampling parameters of the whole response, to go on from a first request that
    ends for its length; that one excludes the end-of-sequence tokens up to
    ``min_new_tokens``."""


_Steps = Generator[tuple[Sequence[GenerateRequest], bool], list[Outcome], list[Outcome]]
"""Yields requests of an engine's call and its ``return_exceptions``, takes their
outcomes, and returns the outcomes of all requests."""


def ask(
    engine: RLSGLangEngine,
    requests: Sequence[SampleRequest],
    *,
    tokenizer: Any,
    return_exceptions: bool = False,
) -> list[Outcome]:
    """Returns a completion, or with ``return_exceptions`` an error, for each request.

    The tokenizer may be ``None`` if no request needs one.
    """
    steps = _steps(engine.capabilities, requests, tokenizer, return_exceptions)
    calls, collect = next(steps)
    try:
        while True:
            outcomes = engine.generate_requests(calls, return_exceptions=collect)
            calls, collect = steps.send(list(outcomes))
    except StopIteration as end:
        return _value(end)


async def ask_async(
    engine: RLSGLangEngine,
    requests: Sequence[SampleRequest],
    *,
    tokenizer: Any,
    timeout: float,
    return_exceptions: bool = False,
) -> list[Outcome]:
    """The same as :func:`ask`, to be awaited; each call has a timeout, in seconds."""
    steps = _steps(engine.capabilities, requests, tokenizer, return_exceptions)
    calls, collect = next(steps)
    try:
        while True:
            outcomes = await engine.agenerate_requests(
                calls, timeout=timeout, return_exceptions=collect
            )
            calls, collect = steps.send(list(outcomes))
    except StopIteration as end:
        return _value(end)


def _value(end: StopIteration) -> list[Outcome]:
    value: list[Outcome] = end.value
    return value


def _steps(
    capabilities: ServerCapabilities,
    requests: Sequence[SampleRequest],
    tokenizer: Any,
    return_exceptions: bool,
) -> _Steps:
    """Generates, and cuts responses at stop strings that the server does not cut."""
    on_server = capabilities.has_tokenizer
    if tokenizer is None:
        for request in requests:
            _check_without_tokenizer(request, on_server)
    if on_server:
        outcomes = yield requests, return_exceptions
    else:
        outcomes = yield from _in_stages(
            capabilities, requests, tokenizer, return_exceptions
        )
    for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        matched = on_server and request.include_stop
        if not matched and isinstance(outcome, Completion):
            outcomes[index] = cut(
                outcome,
                stops_of(request.sampling_params),
                lambda ids: decode(tokenizer, [ids])[0],
                include=request.include_stop,
            )
    return outcomes


def _check_without_tokenizer(request: SampleRequest, on_server: bool) -> None:
    """Refuses parameters that need a tokenizer, before anything is generated."""
    names = () if on_server else ("stop", "min_new_tokens")
    names = names if request.include_stop else ("stop", "stop_regex", *names)
    for name in names:
        if request.sampling_params.get(name):
            raise ConfigurationError(
                f"{name!r} needs a tokenizer, and neither the server nor the wrapper "
                f"has one; pass tokenizer=..."
            )


def _in_stages(
    capabilities: ServerCapabilities,
    requests: Sequence[SampleRequest],
    tokenizer: Any,
    return_exceptions: bool,
) -> _Steps:
    # Most requests of a batch share one mapping, which is translated once.
    stages_by_id: dict[int, Stages] = {}
    for params in (request.sampling_params for request in requests):
        if id(params) not in stages_by_id:
            stages_by_id[id(params)] = without_tokenizer(
                params,
                tokenizer=tokenizer,
                eos_token_ids=capabilities.eos_token_ids,
            )
    stages = [stages_by_id[id(request.sampling_params)] for request in requests]
    first = [
        # Nobody knows yet where their stop strings cut them, nor how long they are.
        replace(request, sampling_params=stage.first, on_tokens=None)
        for request, stage in zip(requests, stages, strict=True)
    ]
    outcomes = yield first, return_exceptions
    remaining = {}
    for index, (outcome, stage) in enumerate(zip(outcomes, stages, strict=True)):
        if stage.rest is None or not isinstance(outcome, Completion):
            continue
        remainder = replace(requests[index], sampling_params=stage.rest, on_tokens=None)
        request = resume_request(remainder, outcome, capabilities)
        if outcome.finish_reason == "length" and request is not None:
            remaining[index] = request
    if not remaining:
        return outcomes
    continued = yield list(remaining.values()), True
    for index, outcome in zip(remaining, continued, strict=True):
        begun = outcomes[index]
        assert isinstance(begun, Completion)
        if isinstance(outcome, Completion):
            outcomes[index] = join_completions(begun, outcome)
            continue
        # The second request's batch has other positions.
        error = outcome.replace(index=index) if hasattr(outcome, "index") else outcome
        if not return_exceptions:
            raise error.replace(note=f"It is item {index} of {len(requests)}.")
        outcomes[index] = error
    return outcomes


def without_tokenizer(
    params: Mapping[str, Any], *, tokenizer: Any, eos_token_ids: Sequence[int]
) -> Stages:
    """Rewrites sampling parameters for a server that has no tokenizer.

    A stop string that is one token becomes a stop token id. All stop strings must still
    be matched with :func:`cut`: other tokens can spell the same text.
    """
    shared = dict(params)
    if tokenizer is None or shared.get("max_new_tokens") == 0:
        return Stages(first=shared)
    minimum, stops = shared.pop("min_new_tokens", 0), shared.pop("stop", ())
    # A server with a tokenizer also ends responses at the tokenizer's token.
    ends = {
        *eos_token_ids,
        tokenizer.eos_token_id,
        *shared.get("stop_token_ids", ()),
    }
    ends.discard(None)
    if shared.get("ignore_eos"):
        # With ignore_eos, SGLang ignores stop tokens too.
        return Stages(first=shared)
    shared["stop_token_ids"] = sorted(ends | _single_tokens(stops, tokenizer))
    if not minimum:
        return Stages(first=shared)
    bias = {**shared.get("logit_bias", {}), **dict.fromkeys(ends, NEVER)}
    first = {**shared, "max_new_tokens": minimum, "logit_bias": bias}
    limit = shared.get("max_new_tokens")
    is_whole = limit is not None and limit <= minimum
    return Stages(first=first, rest=None if is_whole else shared)


def _single_tokens(stop: str | Sequence[str], tokenizer: Any) -> set[int]:
    """Returns the tokens of those stop strings that are one token."""
    texts = as_texts(stop)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return {ids[0] for ids in encoded if len(ids) == 1}


class EndTokens(NamedTuple):
    """Tokens that end a turn when they are the last of a response."""

    ends: frozenset[int]
    """All of them."""
    dropped: frozenset[int]
    """Those that messages lack: the chat template writes them itself, or its own end in
    the place of the model's end-of-sequence token."""

    def have_ended(self, token_ids: Sequence[int]) -> bool:
        """Returns whether a response ends with an end of a turn."""
        return bool(token_ids) and token_ids[-1] in self.ends

    def drop_last(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the message of a response lacks its last token."""
        return bool(token_ids) and token_ids[-1] in self.dropped


def turn_end_tokens(
    params: Mapping[str, Any],
    *,
    eos_token_ids: Sequence[int],
    tokenizer: Any,
    template: ChatTemplate | None,
) -> EndTokens:
    """Returns the tokens that end a turn when they are the last of a response.

    The server's finish reason is not enough: a response can end with such a token at
    its maximum length, and a stop string can be the text of one token. A stop token is
    a part of the message unless the template writes it: ``</tool_call>`` is one.
    """
    eos = frozenset({*eos_token_ids, getattr(tokenizer, "eos_token_id", None)})
    ends = frozenset(params.get("stop_token_ids", ()))
    if not params.get("ignore_eos"):
        ends |= eos
    if tokenizer is not None and params.get("stop"):
        special = set(tokenizer.all_special_ids)
        ends |= special & _single_tokens(params["stop"], tokenizer)
    written = frozenset[int]() if template is None else template.end_ids
    return EndTokens(ends=ends, dropped=ends & (eos | written))
