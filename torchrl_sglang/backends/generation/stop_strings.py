"""Ends responses at stop strings that no server could match. Pure."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrl_sglang.types import Completion

__all__ = ["Stops", "cut", "stops_of"]

Stops = Mapping[str, re.Pattern[str]]
"""What ends a response: the caller's text -> pattern."""


def stops_of(params: Mapping[str, Any]) -> Stops:
    """Returns the stop strings and regular expressions of sampling parameters."""
    stop = params.get("stop", ())
    texts = [stop] if isinstance(stop, str) else stop
    patterns = {text: re.compile(re.escape(text)) for text in texts}
    return patterns | {text: re.compile(text) for text in params.get("stop_regex", ())}


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

    Examples:
        >>> words = ["a", "b", "cd", "e"]
        >>> decode = lambda ids: "".join(words[i] for i in ids)
        >>> whole = Completion(token_ids=[0, 1, 2, 3], finish_reason="length")
        >>> stops = stops_of({"stop": ["bc"]})
        >>> cut(whole, stops, decode, include=True).token_ids
        [0, 1, 2]
        >>> cut(whole, stops, decode, include=False).token_ids
        [0]
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
    """Truncates a response to its first ``size`` tokens."""
    names = ("token_ids", "log_probs", "top_token_ids", "top_log_probs")
    rows: dict[str, Any] = {name: getattr(completion, name) for name in names}
    return replace(
        completion,
        versions=tuple(
            replace(span, end=min(span.end, size))
            for span in completion.versions
            if span.start < size
        ),
        **{name: row and row[:size] for name, row in rows.items()},
    )
