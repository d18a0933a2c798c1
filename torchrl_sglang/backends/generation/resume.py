"""Goes on from the tokens of an unfinished response. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchrl_sglang.backends.generation.request import GenerateRequest, longest_prompt
from torchrl_sglang.types import Completion, ServerCapabilities, VersionSpan

__all__ = ["ended", "join_completions", "no_tokens", "resume_request"]

AnyRequest = TypeVar("AnyRequest", bound=GenerateRequest)


def ended(
    whole: Completion, params: Mapping[str, Any], end_tokens: Collection[int | None]
) -> Completion:
    """Returns an aborted response as ended if its last token was its end."""
    # In the step of an abort, a server does not look for another end.
    if whole.finish_reason != "abort":
        return whole
    last, most = whole.token_ids[-1], params.get("max_new_tokens")
    stops = last in end_tokens or last in params.get("stop_token_ids", ())
    if stops and not params.get("ignore_eos"):
        return replace(whole, finish_reason="stop", matched_stop=last)
    if most is not None and len(whole.token_ids) >= most:
        return replace(whole, finish_reason="length")
    return whole


def no_tokens(request: GenerateRequest) -> Completion:
    """Returns the response to a request that was aborted before its first token."""
    tops: list[Any] | None = [] if request.top_logprobs else None
    return Completion(
        token_ids=[],
        log_probs=[] if request.return_logprobs else None,
        logprobs_mode=request.logprobs_mode if request.wants_logprobs else None,
        top_token_ids=tops,
        top_log_probs=tops,
        finish_reason="abort",
    )


def resume_request(
    request: AnyRequest, token_ids: Sequence[int], capabilities: ServerCapabilities
) -> AnyRequest | None:
    """Returns the request that goes on behind the first tokens of its response.

    ``None`` if the response has reached ``max_new_tokens`` or the context length.

    Examples:
        >>> request = GenerateRequest(
        ...     input_ids=[5, 6], sampling_params={"max_new_tokens": 8}
        ... )
        >>> rest = resume_request(request, [7, 8, 9], engine.capabilities)
        >>> rest.input_ids, rest.sampling_params
        ([5, 6, 7, 8, 9], {'max_new_tokens': 5})
    """
    done, params = len(token_ids), dict(request.sampling_params)
    most = params.get("max_new_tokens")
    input_ids = [*request.input_ids, *token_ids]
    if len(input_ids) > longest_prompt(capabilities):
        return None
    if most is not None:
        if done >= most:
            return None
        params["max_new_tokens"] = most - done
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(params["min_new_tokens"] - done, 0)
    return replace(
        request,
        input_ids=input_ids,
        sampling_params=params,
        return_prompt_logprobs=False,
    )


def join_completions(first: Completion, second: Completion) -> Completion:
    """Returns the completion that a response and its continuation make up."""
    length = len(first.token_ids)
    known = all(part.versions or not part.token_ids for part in (first, second))
    spans = list(first.versions)
    for span in second.versions:
        start, end = span.start + length, span.end + length
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(version=span.version, start=start, end=end))
    return replace(
        second,
        token_ids=[*first.token_ids, *second.token_ids],
        log_probs=_concatenate(first.log_probs, second.log_probs),
        top_token_ids=_concatenate(first.top_token_ids, second.top_token_ids),
        top_log_probs=_concatenate(first.top_log_probs, second.top_log_probs),
        prompt_log_probs=first.prompt_log_probs,
        cached_tokens=first.cached_tokens,
        versions=tuple(spans) if known else (),
        mixed_state=first.mixed_state or second.mixed_state,
        text=_join_texts(first.text, second.text),
    )


def _concatenate(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    return None if first is None or second is None else [*first, *second]


def _join_texts(first: str | None, second: str | None) -> str | None:
    # The last token of the first may hold a part of a character.
    if first is None or second is None or first.endswith("\ufffd"):
        return None
    return first + second
