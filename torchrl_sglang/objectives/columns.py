"""Reads the columns of a batch as rectangular tensors, and writes them back.

A batch is a TensorDict with a single batch dimension: dense, or a lazy stack of rows of
different lengths. Rectangular tensors are ``(B, T)`` and padded on the left, as
TorchRL's losses read them.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_sglang.errors import ConfigurationError, NotFiniteError
from torchrl_sglang.requests.token_columns import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    PROMPT,
    TOKENS,
)


def read(batch: TensorDictBase, key: NestedKey, padding_value: Any) -> Tensor | None:
    """Returns a column, padded on the left; None if the batch lacks it."""
    value = batch.get(
        key,
        None,
        as_padded_tensor=True,
        padding_side="left",
        padding_value=padding_value,
    )
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"{key!r} must be a column of numbers, got {type(value).__name__}."
        )
    if value.is_nested:
        return pad_sequence(
            list(value.unbind()),
            batch_first=True,
            padding_value=padding_value,
            padding_side="left",
        )
    return value


def rows_of(batch: TensorDictBase, key: NestedKey) -> list[Tensor] | None:
    """Returns the column of each row, not padded; None if a row lacks it."""
    if not isinstance(batch, LazyStackedTensorDict) and key not in batch.keys(True):
        return None
    rows = batch.unbind(0) if batch.batch_dims else (batch,)
    columns = [row.get(key, None) for row in rows]
    return None if any(column is None for column in columns) else columns


def read_mask(batch: TensorDictBase, strategy: str, width: int) -> Tensor:
    """Returns the tokens in a loss with a masking strategy, ``(B, width)``.

    ``"sft"``: the last response; ``"rlhf"``: all assistant tokens; ``"generic"``: all.
    """
    prompt = row_lengths(batch, PROMPT) if strategy == "sft" else None
    needs_attention_mask = strategy == "generic" or prompt is not None
    key = ATTENTION_MASK if needs_attention_mask else ASSISTANT_MASK
    mask = read(batch, key, padding_value=False)
    if mask is None:
        raise ConfigurationError(
            f"masking_strategy={strategy!r} needs the column {key!r}, and the batch "
            f"has none; give masking_strategy as GRPOLoss has it."
        )
    mask = mask.bool()
    if prompt is None:
        return mask
    full = row_lengths(batch, TOKENS)
    lengths = torch.full_like(prompt, width) if full is None else full
    position = torch.arange(width, device=mask.device)
    return mask & (position >= (width - lengths + prompt).to(mask.device).unsqueeze(-1))


def read_written(batch: TensorDictBase, mask: Tensor) -> Tensor:
    """Returns the mask's tokens of the policy; all without an assistant mask."""
    written = read(batch, ASSISTANT_MASK, padding_value=False)
    if written is None or written.shape != mask.shape:
        return mask
    return mask & written.bool()


def row_lengths(batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Returns the length of each row of a column, ``(B,)``; None if it is missing."""
    rows = rows_of(batch, key)
    return None if rows is None else torch.tensor([row.shape[0] for row in rows])


def read_advantage(batch: TensorDictBase, key: NestedKey, shape: torch.Size) -> Tensor:
    """Returns each token's advantage in a ``shape`` ``(B, T)``.

    The column is ``(B, 1, 1)`` or ``(B, T, 1)``, as in TorchRL's losses, or lacks the
    last dimensions.
    """
    value = read(batch, key, padding_value=0.0)
    if value is None:
        raise ConfigurationError(
            f"The batch has no advantage {key!r}; compute it first, for instance with "
            f"MCAdvantage."
        )
    flat = value.squeeze(-1) if value.ndim == 3 else value
    flat = flat.unsqueeze(-1) if flat.ndim == 1 else flat
    if tuple(flat.shape) not in ((shape[0], 1), tuple(shape)):
        raise ConfigurationError(
            f"The advantage {key!r} must have one value per sequence or per token, "
            f"(B, 1, 1) or (B, T, 1) with (B, T) = {tuple(shape)}, got "
            f"{tuple(value.shape)}."
        )
    return flat.expand(shape)


def check_finite(key: NestedKey, values: Tensor, mask: Tensor) -> None:
    """Refuses NaN and infinite values of the loss tokens in ``mask`` ``(B, T)``.

    Values are ``(B, T)``, or ``(B, 1)`` for each sequence; the error names their rows.
    """
    wrong = mask & ~values.isfinite()
    if not wrong.any():
        return
    rows = wrong.any(-1).nonzero().flatten().tolist()
    value = values.expand(mask.shape)[wrong][0].item()
    raise NotFiniteError(
        f"The column {key!r} is {value} in row {', '.join(map(str, rows[:8]))} of the "
        f"batch ({len(rows)} of {len(mask)}), and one such number makes every weight "
        f"NaN; leave these rows out, and check the parts of their rewards."
    )


def read_versions(
    batch: TensorDictBase, key: NestedKey, shape: torch.Size
) -> Tensor | None:
    """Returns the version of each token ``(B, T)``, -1 where unknown; None if missing.

    The column has versions of the response's tokens, at the end of the sequence, or a
    single version for the sequence.
    """
    value = read(batch, key, padding_value=-1)
    if value is None:
        return None
    value = value.reshape(shape[0], -1).long()
    missing = shape[1] - value.shape[1]
    if missing < 0:
        raise ConfigurationError(
            f"{key!r} has {value.shape[1]} versions for sequences of at most "
            f"{shape[1]} tokens."
        )
    if value.shape[1] == 1:
        return value.expand(shape)
    return torch.nn.functional.pad(value, (missing, 0), value=-1)


def write_rows(batch: TensorDictBase, key: NestedKey, values: Tensor) -> None:
    """Writes ``(B, T)`` values to a column; rows of a lazy stack keep their lengths.

    A nested tensor becomes rectangular: TorchRL's losses take none.
    """
    if not _is_ragged(batch, key):
        batch.set(key, values)
        return
    lengths, width = row_lengths(batch, key), values.shape[1]
    assert lengths is not None
    rows = [
        row[width - length :]
        for row, length in zip(values, lengths.tolist(), strict=True)
    ]
    batch.set(key, torch.nested.as_nested_tensor(rows, layout=torch.jagged))


def _is_ragged(batch: TensorDictBase, key: NestedKey) -> bool:
    """Returns whether a lazy stack, or its batch, has rows of different lengths."""
    try:
        return not isinstance(batch.get(key), Tensor)
    except RuntimeError:
        # TensorDict's error: they cannot be stacked.
        return True
