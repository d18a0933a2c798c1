"""Stop strings and ``min_new_tokens`` where the server does not implement them. Pure.

A server that was started with ``skip_tokenizer_init=True`` supports neither:
:func:`without_tokenizer` rewrites both as token ids, and :func:`cut` matches the stop
strings afterwards. :func:`cut` also removes a stop string from a response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_sglang.types import Completion

__all__ = ["Stages", "cut", "truncate", "turn_end_tokens", "without_tokenizer"]

NEVER = -1e9
"""Logit bias that makes a token's probability 0 in float32."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Sampling parameters of one response of a server without a tokenizer."""

    first: Mapping[str, Any]
    """For the first request."""
    rest: Mapping[str, Any] | None = None
    """For the whole response, to go on from a first request that ends for its length;
    that one excludes the end-of-sequence tokens up to ``min_new_tokens``."""


def without_tokenizer(
    params: Mapping[str, Any], *, tokenizer: Any, eos_token_ids: Sequence[int]
) -> Stages:
    """Rewrites sampling parameters for a server that has no tokenizer.

    A stop string that is one token becomes a stop token id. All stop strings must still
    be matched with :func:`cut`: other tokens can spell the same text.
    """
    asked = dict(params)
    least = asked.pop("min_new_tokens", 0)
    # A server with a tokenizer also ends responses at the tokenizer's token.
    ends = {*eos_token_ids, tokenizer.eos_token_id, *asked.get("stop_token_ids", ())}
    ends.discard(None)
    stops = as_texts(asked.pop("stop", ()))
    if not asked.get("ignore_eos"):
        # With ignore_eos, SGLang ignores stop tokens too.
        asked["stop_token_ids"] = sorted({*ends, *single_tokens(stops, tokenizer)})
    limit = asked.get("max_new_tokens")
    if not least or asked.get("ignore_eos"):
        return Stages(first=asked)
    bias = {**asked.get("logit_bias", {}), **dict.fromkeys(ends, NEVER)}
    first = {**asked, "max_new_tokens": least, "logit_bias": bias}
    if limit is not None and limit <= least:
        return Stages(first=first)
    return Stages(first=first, rest=asked)


def as_texts(stop: str | Sequence[str]) -> list[str]:
    """Returns one or several stop strings as a list."""
    return [stop] if isinstance(stop, str) else list(stop)


def single_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """Returns the tokens of those texts that are one token."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [ids[0] for ids in encoded if len(ids) == 1]


def turn_end_tokens(
    params: Mapping[str, Any],
    *,
    eos_token_ids: Sequence[int],
    tokenizer: Any,
    special_ids: set[int],
) -> set[int]:
    """Returns the tokens that end a turn when they are the last of a response.

    The server's finish reason is not enough: a response can end with such a token at
    its maximum length, and a stop string can be the text of one token.
    """
    ends = set(params.get("stop_token_ids", ()))
    if not params.get("ignore_eos"):
        ends.update(eos_token_ids)
    if tokenizer is None:
        return ends
    if not params.get("ignore_eos"):
        ends.add(tokenizer.eos_token_id)
    stops = single_tokens(as_texts(params.get("stop", ())), tokenizer)
    return ends.union(special_ids.intersection(stops))


def cut(
    completion: Completion, stops: Sequence[str], decode: Decode, *, include: bool
) -> Completion:
    """Truncates a response at its first stop string.

    With ``include`` it ends after the token that completes the stop string, otherwise
    before the first token that holds a part of it.

    Examples:
        >>> words = ["a", "b", "cd", "e"]
        >>> decode = lambda ids: "".join(words[i] for i in ids)
        >>> whole = Completion(token_ids=[0, 1, 2, 3], finish_reason="length")
        >>> cut(whole, ["bc"], decode, include=True).token_ids
        [0, 1, 2]
        >>> cut(whole, ["bc"], decode, include=False).token_ids
        [0]
    """
    ids = completion.token_ids
    text = decode(ids)
    if not any(stop in text for stop in stops):
        return completion
    end = _first(len(ids), lambda size: any(s in decode(ids[:size]) for s in stops))
    text = decode(ids[:end])
    position, stop = min((text.find(s), s) for s in stops if s in text)
    if not include:
        # An incomplete character decodes to replacement marks.
        behind = _first(
            end, lambda size: len(decode(ids[:size]).rstrip("\ufffd")) > position
        )
        end = behind - 1
    return replace(
        truncate(completion, end), finish_reason="stop", matched_stop=stop, text=None
    )


def _first(size: int, holds: Callable[[int], bool]) -> int:
    """Returns the smallest of ``1 ... size`` that a monotone predicate accepts."""
    low, high = 1, size
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def truncate(completion: Completion, size: int) -> Completion:
    """Truncates a response to its first ``size`` tokens."""
    return replace(
        completion,
        token_ids=completion.token_ids[:size],
        log_probs=_until(completion.log_probs, size),
        top_token_ids=_until(completion.top_token_ids, size),
        top_log_probs=_until(completion.top_log_probs, size),
        versions=tuple(
            replace(span, end=min(span.end, size))
            for span in completion.versions
            if span.start < size
        ),
    )


def _until(values: list[Any] | None, size: int) -> list[Any] | None:
    return None if values is None else values[:size]
