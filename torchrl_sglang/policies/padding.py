"""Ragged rows to rectangular tensors and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["pad_samples", "restore_padding", "strip_padding"]

_FILL: dict[str, float] = {"masks": False, "log_probs": 0.0, "generation_info": -1}
"""Container -> padding value; tokens are padded with the padding token."""

_FILL_OF_FIELD: dict[str, float] = {"top_log_probs": 0.0}
"""Field -> padding value, where it differs from its container's."""

_RESPONSE_FIELDS = ("response", "weight_version", "top_token_ids", "top_log_probs")
"""Fields with one value per response token and none for the prompt."""


def strip_padding(token_ids: list[int], padding_value: int | None) -> list[int]:
    """Returns ``token_ids`` without leading padding tokens, but never empty.

    Examples:
        >>> strip_padding([0, 0, 5, 0], 0)
        [5, 0]
    """
    start = 0
    while start < len(token_ids) - 1 and token_ids[start] == padding_value:
        start += 1
    return token_ids[start:] if start else token_ids


def pad_samples(
    samples: Sequence[dict[str, dict[str, Any]]], padding_value: int
) -> None:
    """Pads prompts on the left and responses on the right, in place."""
    fill = {"tokens": padding_value, **_FILL}
    # A scored sequence has no response and is padded like a prompt.
    splits = [
        len(sample["tokens"]["prompt" if "prompt" in sample["tokens"] else "full"])
        for sample in samples
    ]
    for name in fill.keys() & samples[0].keys():
        for field, first in list(samples[0][name].items()):
            if not isinstance(first, torch.Tensor) or not first.ndim:
                continue
            rows = [sample[name][field] for sample in samples]
            value = _FILL_OF_FIELD.get(field, fill[name])
            starts = [0] * len(rows) if field in _RESPONSE_FIELDS else splits
            placed = list(zip(samples, rows, starts, strict=True))
            left = max(starts)
            width = left + max(len(row) - start for _, row, start in placed)
            for sample, row, start in placed:
                padded = row.new_full((width, *row.shape[1:]), value)
                padded[left - start : left - start + len(row)] = row
                sample[name][field] = padded


def restore_padding(
    sample: dict[str, dict[str, Any]], mask: torch.Tensor, padding_value: int
) -> None:
    """Moves a scored sample's values to the places that its tokens had, in place."""
    fill = {"tokens": padding_value, **_FILL}
    for name in fill.keys() & sample.keys():
        for field, row in sample[name].items():
            padded = row.new_full(mask.shape, fill[name])
            sample[name][field] = padded.masked_scatter_(mask, row)
