"""Sends a batch of requests to the engine: the middle step of the pipeline.

Implements stop strings and ``min_new_tokens`` for servers without a tokenizer, with the
decisions of :mod:`.stopping`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_sglang.backends.base import (
    GenerateRequest,
    RLSGLangEngine,
    join_completions,
    resume_request,
)
from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.policies.chat import decode
from torchrl_sglang.policies.stopping import Stages, as_texts, cut, without_tokenizer
from torchrl_sglang.types import Completion

__all__ = ["SampleRequest", "ask"]

Outcome = Completion | SGLangError
"""Result of a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest(GenerateRequest):
    """A request for one sample of a policy."""

    include_stop: bool = True
    """Whether the response keeps the stop string that it ends with."""


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
    if engine.capabilities.has_tokenizer:
        for request in requests:
            if request.sampling_params.get("stop") and not request.include_stop:
                _needed(tokenizer, "stop")  # Before anything is generated.
        outcomes = _generate(engine, requests, return_exceptions)
    else:
        outcomes = _generate_in_stages(engine, requests, tokenizer, return_exceptions)
    for index, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        stops = as_texts(request.sampling_params.get("stop", ()))
        on_server = engine.capabilities.has_tokenizer and request.include_stop
        if stops and not on_server and isinstance(outcome, Completion):
            outcomes[index] = cut(
                outcome,
                stops,
                lambda ids: decode(_needed(tokenizer, "stop"), [ids])[0],
                include=request.include_stop,
            )
    return outcomes


def _generate(
    engine: RLSGLangEngine,
    requests: Sequence[GenerateRequest],
    return_exceptions: bool,
) -> list[Outcome]:
    return list(engine.generate_requests(requests, return_exceptions=return_exceptions))


def _needed(tokenizer: Any, name: str) -> Any:
    if tokenizer is None:
        raise ConfigurationError(
            f"{name!r} needs a tokenizer, and neither the server nor the wrapper has "
            f"one; pass tokenizer=..."
        )
    return tokenizer


def _generate_in_stages(
    engine: RLSGLangEngine,
    requests: Sequence[SampleRequest],
    tokenizer: Any,
    return_exceptions: bool,
) -> list[Outcome]:
    """Generates on a server without a tokenizer; see :func:`.without_tokenizer`."""
    stages = _stages(engine, requests, tokenizer)
    first = [
        replace(request, sampling_params=stage.first)
        for request, stage in zip(requests, stages, strict=True)
    ]
    outcomes = _generate(engine, first, return_exceptions)
    rest = {}
    for index, (outcome, stage) in enumerate(zip(outcomes, stages, strict=True)):
        if (
            stage.rest is not None
            and isinstance(outcome, Completion)
            and outcome.finish_reason == "length"
        ):
            whole = replace(requests[index], sampling_params=stage.rest)
            request = resume_request(whole, outcome.token_ids, engine.capabilities)
            if request is not None:
                rest[index] = request
    if not rest:
        return outcomes
    continued = _generate(engine, list(rest.values()), return_exceptions=True)
    for index, outcome in zip(rest, continued, strict=True):
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


def _stages(
    engine: RLSGLangEngine, requests: Sequence[SampleRequest], tokenizer: Any
) -> list[Stages]:
    # Most requests of a batch share one mapping, which is translated once.
    known: dict[int, Stages] = {}
    for request in requests:
        params = request.sampling_params
        if id(params) in known:
            continue
        for name in ("stop", "min_new_tokens"):
            if params.get(name):
                _needed(tokenizer, name)
        known[id(params)] = (
            Stages(first=params)
            if tokenizer is None or params.get("max_new_tokens") == 0
            else without_tokenizer(
                params,
                tokenizer=tokenizer,
                eos_token_ids=engine.capabilities.eos_token_ids,
            )
        )
    return [known[id(request.sampling_params)] for request in requests]
