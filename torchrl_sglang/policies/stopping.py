"""What ends a response, where the server's own ways do not: pure.

A server with a tokenizer matches stop strings on text and keeps a response from ending
early. One that was started with ``skip_tokenizer_init=True`` refuses to do either, so
:func:`without_tokenizer` says it in token ids, and :func:`cut` matches on this side
what token ids cannot say. :func:`cut` also takes a stop string out of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_sglang.types import Completion

__all__ = ["Stages", "cut", "truncate", "turn_end_tokens", "without_tokenizer"]

NEVER = -1e9
"""Bias of a token that shall not come; its probability is 0 in float32."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """How a server without a tokenizer is asked for one response."""

    first: Mapping[str, Any]
    """Sampling parameters, under SGLang's names."""
    rest: Mapping[str, Any] | None = None
    """Those of the whole response, for what follows a first stage that ends for its
    length: the stage in which the end-of-sequence tokens must not come."""


def without_tokenizer(
    params: Mapping[str, Any], *, tokenizer: Any, eos_token_ids: Sequence[int]
) -> Stages:
    """Returns what to ask of a server that has no tokenizer.

    A stop string that is one token becomes a stop token id; it saves what would be
    generated behind it. All stop strings must be matched with :func:`cut` afterwards:
    other tokens can spell the same text.

    Args:
        params: what to ask of a server that has one.
        tokenizer: of the model.
        eos_token_ids: tokens that end a response.
    """
    asked = dict(params)
    least = asked.pop("min_new_tokens", 0)
    # A server adds its own tokenizer's to those of the model's configuration.
    ends = {*eos_token_ids, tokenizer.eos_token_id, *asked.get("stop_token_ids", ())}
    ends.discard(None)
    stops = as_texts(asked.pop("stop", ()))
    if not asked.get("ignore_eos"):
        # Beside ignore_eos, SGLang ignores these as well.
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
    """Returns stop strings as a list, however they are given."""
    return [stop] if isinstance(stop, str) else list(stop)


def single_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """Returns the tokens that are the whole of one of the texts."""
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
    """Returns the response up to the first stop string in it.

    The response stays a beginning of what was generated, token by token: with the stop
    string it ends behind the token that completes it, and without it before the first
    token that holds a part of it.

    Args:
        completion: the response.
        stops: texts that end it.
        decode: of the model's tokenizer.
        include: whether the stop string stays.

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
        # A character that is not whole yet is written as marks that do not count.
        behind = _first(
            end, lambda size: len(decode(ids[:size]).rstrip("\ufffd")) > position
        )
        end = behind - 1
    return replace(
        truncate(completion, end), finish_reason="stop", matched_stop=stop, text=None
    )


def _first(size: int, holds: Callable[[int], bool]) -> int:
    """Returns the least number in ``[1, size]`` for which something holds.

    What holds for a number must hold for greater ones, and must hold for ``size``.
    """
    low, high = 1, size
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def truncate(completion: Completion, size: int) -> Completion:
    """Returns the first ``size`` tokens of a response and all that belongs to them."""
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
