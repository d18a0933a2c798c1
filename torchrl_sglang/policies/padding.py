"""Ragged rows to rectangular tensors and back: pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["pad", "strip_padding"]


def strip_padding(token_ids: list[int], padding_value: int | None) -> list[int]:
    """Returns ``token_ids`` without the padding tokens that they begin with.

    A row of padding tokens only keeps its last one, which a prompt can consist of.

    Examples:
        >>> strip_padding([0, 0, 5, 0], 0)
        [5, 0]
    """
    start = 0
    while start < len(token_ids) - 1 and token_ids[start] == padding_value:
        start += 1
    return token_ids[start:] if start else token_ids


def pad(
    rows: Sequence[torch.Tensor], *, side: str, value: float | int | bool
) -> torch.Tensor:
    """Returns the rows as one tensor of shape ``(len(rows), longest)``.

    Args:
        rows: one-dimensional tensors of one dtype.
        side: ``"left"`` or ``"right"``: where the padding goes.
        value: what it is filled with.

    Examples:
        >>> pad([torch.tensor([1, 2]), torch.tensor([3])], side="left", value=0)
        tensor([[1, 2],
                [0, 3]])
    """
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side=side
    )
