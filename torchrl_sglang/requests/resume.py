"""Responses in several parts: goes on from tokens, joins parts, finds their end. Pure.

No server sees a stop string that two parts hold together, so it is matched here.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.token_values import join_values, truncate_values
from torchrl_sglang.types import Completion, ServerCapabilities, VersionSpan

AnyRequest = TypeVar("AnyRequest", bound=GenerateRequest)

Stops = Mapping[str, re.Pattern[str]]
"""Strings that end a response: the caller's text -> pattern."""


def ended(
    whole: Completion, params: Mapping[str, Any], end_tokens: Collection[int | None]
) -> Completion:
    """Returns an aborted response as ended if its last token was its end."""
    # In the step of an abort, a server does not look for another end.
    if whole.finish_reason != "abort":
        return whole
    last_token, limit = whole.token_ids[-1], params.get("max_new_tokens")
    stops = last_token in end_tokens or last_token in params.get("stop_token_ids", ())
    if stops and not params.get("ignore_eos"):
        return replace(whole, finish_reason="stop", matched_stop=last_token)
    if limit is not None and len(whole.token_ids) >= limit:
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
    request: AnyRequest, whole: Completion, capabilities: ServerCapabilities
) -> AnyRequest | None:
    """Builds the request for the rest; ``None``: no token may follow."""
    done, params = len(whole.token_ids), dict(request.sampling_params)
    limit = params.get("max_new_tokens")
    input_ids = [*request.input_ids, *whole.token_ids]
    # A server that was lost has not reported those that come last.
    lost = {column.name for column in request.token_columns} - whole.columns.keys()
    if len(input_ids) > capabilities.longest_prompt:
        return None
    if limit is not None:
        if done >= limit:
            return None
        params["max_new_tokens"] = limit - done
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(params["min_new_tokens"] - done, 0)
    return replace(
        request,
        input_ids=input_ids,
        sampling_params=params,
        return_prompt_logprobs=False,
        columns_from=request.columns_from if lost or not done else len(input_ids) - 1,
    )


def join_completions(first: Completion, second: Completion) -> Completion:
    """Returns the completion that a response and its continuation make up."""
    length = len(first.token_ids)
    has_versions = all(part.versions or not part.token_ids for part in (first, second))
    spans = list(first.versions)
    for span in second.versions:
        start, end = span.start + length, span.end + length
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(version=span.version, start=start, end=end))
    return replace(
        second,
        **join_values(first, second),
        prompt_log_probs=first.prompt_log_probs,
        cached_tokens=first.cached_tokens,
        versions=tuple(spans) if has_versions else (),
        mixed_state=first.mixed_state or second.mixed_state,
        text=_join_texts(first.text, second.text),
    )


def _join_texts(first: str | None, second: str | None) -> str | None:
    # The last token of the first may hold a part of a character.
    if first is None or second is None or first.endswith("\ufffd"):
        return None
    return first + second


def stops_of(params: Mapping[str, Any]) -> Stops:
    """Returns the stop strings and regular expressions of sampling parameters."""

    def texts(name: str) -> Sequence[str]:
        stops = params.get(name) or ()
        return [stops] if isinstance(stops, str) else stops

    patterns = {text: re.compile(re.escape(text)) for text in texts("stop")}
    return patterns | {text: re.compile(text) for text in texts("stop_regex")}


def cut(
    completion: Completion,
    stops: Stops,
    decode: Callable[[Sequence[int]], str],
    *,
    include: bool,
) -> Completion:
    """Truncates a response at its first stop string; ``decode`` keeps special tokens.

    With ``include`` it ends after the token that completes the stop string, otherwise
    before the first token that holds a part of it.
    """
    ids = completion.token_ids

    def found(size: int) -> list[tuple[int, str]]:
        text = decode(ids[:size])
        matches = [(pattern.search(text), stop) for stop, pattern in stops.items()]
        return [(match.start(), stop) for match, stop in matches if match]

    if not stops or not found(len(ids)):
        return completion
    sizes = range(1, len(ids))
    end = 1 + bisect.bisect_left(sizes, True, key=lambda size: bool(found(size)))
    position, stop = min(found(end))
    if not include:
        # An incomplete character decodes to replacement marks.
        end = bisect.bisect_left(
            sizes[: end - 1],
            True,
            key=lambda size: len(decode(ids[:size]).rstrip("\ufffd")) > position,
        )
    return _truncate(
        replace(completion, finish_reason="stop", matched_stop=stop, text=None), end
    )


def _truncate(completion: Completion, size: int) -> Completion:
    return replace(
        completion,
        versions=tuple(
            replace(span, end=min(span.end, size))
            for span in completion.versions
            if span.start < size
        ),
        **truncate_values(completion, size),
    )
