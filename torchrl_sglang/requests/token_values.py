"""Makes, joins and cuts values of tokens: :class:`.TokenValues`. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_sglang.types import Completion, TokenLayout, TokenValues

LOG_PROB = TokenLayout(name="log_probs", dtype="float32", unknown=math.nan, padding=0.0)
"""Log-probability of each response token."""

WEIGHT_VERSION = TokenLayout(name="weight_version", dtype="int64")
"""Weight version of each response token; -1 where it is not a number, or not known."""

TOP_TOKENS = TokenLayout(name="top_token_ids", dtype="int64")
"""Top-k tokens at each position, for some k."""

TOP_LOG_PROBS = TokenLayout(
    name="top_log_probs", dtype="float32", unknown=math.nan, padding=0.0
)
"""Log-probabilities of the top-k tokens."""

_LISTS = tuple(layout.name for layout in (LOG_PROB, TOP_TOKENS, TOP_LOG_PROBS))
"""Fields of a completion with an entry for each response token, beside its tokens."""


def values_of(completion: Completion, layout: TokenLayout) -> TokenValues:
    """Returns a quantity of each token of a response; unknown where it has none."""
    length = len(completion.token_ids)
    if layout.name == WEIGHT_VERSION.name:
        versions = unknown_values(layout, length)
        for span in completion.versions:
            if span.version.isdigit():
                versions.values[span.start : span.end] = int(span.version)
        return versions
    if layout.name in _LISTS:
        rows = getattr(completion, layout.name)
        values = None if rows is None else to_token_values(rows, layout)
    else:
        values = completion.columns.get(layout.name)
    return unknown_values(layout, length) if values is None else values


def to_token_values(
    rows: Sequence[Any] | np.ndarray[Any, Any], layout: TokenLayout
) -> TokenValues:
    """Returns one value for each token, or one list; ValueError: they do not fit."""
    if layout.shape is None:
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        flat = [value for row in rows for value in row]
        listed = _to_array(flat, layout)
        if listed.ndim != 1:
            raise ValueError(f"its lists hold values of the shape {listed.shape[1:]}")
        return TokenValues(layout=layout, values=listed, counts=counts)
    values = _to_array(rows, layout)
    if not len(rows):
        values = values.reshape(0, *layout.shape)
    if values.shape != (len(rows), *layout.shape):
        raise ValueError(
            f"the shape {values.shape} is not that of {len(rows)} tokens with "
            f"{layout.shape} each"
        )
    return TokenValues(layout=layout, values=values)


def _to_array(
    rows: Sequence[Any] | np.ndarray[Any, Any], layout: TokenLayout
) -> np.ndarray[Any, Any]:
    kind = np.dtype(layout.dtype)
    if kind.kind not in "biu":
        return np.array(rows, dtype=kind)
    array = np.array(rows)
    values = array.astype(kind)
    # NumPy cuts fractions off, and bits.
    if array.size and array.dtype != kind and not np.array_equal(array, values):
        raise ValueError(f"it has values that no {layout.dtype} is equal to")
    return values


def same_values(layout: TokenLayout, length: int, value: Any) -> TokenValues:
    """Returns one value for all tokens; ``None`` for the unknown one."""
    if value is None:
        return unknown_values(layout, length)
    return to_token_values([value] * length, layout)


def unknown_values(layout: TokenLayout, length: int) -> TokenValues:
    """Returns values of tokens that have none."""
    if layout.shape is None:
        return TokenValues(
            layout=layout,
            values=np.empty(0, dtype=layout.dtype),
            counts=np.zeros(length, dtype=np.int64),
        )
    values = np.full((length, *layout.shape), layout.unknown, dtype=layout.dtype)
    return TokenValues(layout=layout, values=values)


def concatenate(parts: Sequence[TokenValues]) -> TokenValues:
    """Returns the values of tokens that follow each other; at least one part."""
    counts = [part.counts for part in parts if part.counts is not None]
    return TokenValues(
        layout=parts[0].layout,
        values=np.concatenate([part.values for part in parts]),
        counts=np.concatenate(counts) if counts else None,
    )


def truncate_values(completion: Completion, size: int) -> dict[str, Any]:
    """Returns the fields of a completion for each response token, cut to ``size``."""
    lists = {name: getattr(completion, name) for name in _LISTS}
    return {
        "token_ids": completion.token_ids[:size],
        "columns": {name: values[:size] for name, values in completion.columns.items()},
        **{name: values and values[:size] for name, values in lists.items()},
    }


def join_values(first: Completion, second: Completion) -> dict[str, Any]:
    """Returns the fields that are kept for each token of two parts of a response.

    The request of the second part began with the tokens of the first. Where its prompt
    has values, they replace the last tokens' values before it: an engine may know a
    quantity of a token only when the next one is computed. Other values of the first
    part are taken from it only if the same weights have computed them.
    """
    joined: dict[str, Any] = {"token_ids": [*first.token_ids, *second.token_ids]}
    for name in _LISTS:
        head, tail = getattr(first, name), getattr(second, name)
        unknown = head is None or tail is None
        joined[name] = None if unknown else [*head, *tail]
    joined["columns"] = {
        name: _join_column(name, first, second)
        for name in {**first.columns, **second.columns}
    }
    length = len(first.token_ids)
    prompt_columns = {
        name: values[: len(values) - length]
        for name, values in second.prompt_columns.items()
        if len(values) > length
    }
    return {**joined, "prompt_columns": {**prompt_columns, **first.prompt_columns}}


def _same_weights(first: Completion, second: Completion) -> bool:
    versions = {span.version for part in (first, second) for span in part.versions}
    if first.versions and second.versions:
        return len(versions) == 1
    return first.weight_version == second.weight_version is not None


def _join_column(name: str, first: Completion, second: Completion) -> TokenValues:
    parts = first.columns.get(name), second.columns.get(name)
    layout = next(values.layout for values in parts if values is not None)
    head, tail = (
        unknown_values(layout, len(part.token_ids)) if values is None else values
        for values, part in zip(parts, (first, second), strict=True)
    )
    late = second.prompt_columns.get(name, unknown_values(layout, 0))[-len(head) :]
    if len(late) > 1 and not _same_weights(first, second):
        late = late[-1:]
    if len(head) and len(late):
        return concatenate([head[: len(head) - len(late)], late, tail])
    return concatenate([head, tail])
