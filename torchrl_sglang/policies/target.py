"""Checks the output TensorDict and device before anything is generated.

TensorDict and torch would raise only afterwards, and the responses would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection

from torchrl_sglang.errors import ConfigurationError

__all__ = ["check_device", "check_target"]


def check_device(device: torch.device) -> None:
    """Raises :class:`ConfigurationError` unless this process has the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device={str(device)!r} is not available in this process: {error}. Give "
            f"another one, or leave it out for the input's device."
        ) from error


def check_target(
    target: TensorDictBase, keys: Iterable[NestedKey], shape: Sequence[int]
) -> None:
    """Raises :class:`ConfigurationError` unless results can be written under ``keys``.

    ``target`` and its nested TensorDicts must be unlocked and fit ``shape``, the batch
    shape of the results.
    """
    if not isinstance(target, TensorDictBase):
        raise ConfigurationError(
            f"The results are written to a TensorDict, got a {type(target).__name__}."
        )
    _check(target, "The TensorDict to write to", shape)
    above = {
        key[:end]
        for key in keys
        if not isinstance(key, str)
        for end in range(1, len(key))
    }
    for key in sorted(above, key=len):
        found = target.get(key, None)
        if found is None:
            continue
        if not is_tensor_collection(found):
            raise ConfigurationError(
                f"The results are written below {key}, and the TensorDict to write to "
                f"has a {type(found).__name__} there; write under other keys."
            )
        _check(found, f"The TensorDict to write to at {key}", shape)


def _check(target: TensorDictBase, what: str, shape: Sequence[int]) -> None:
    if target.is_locked:
        raise ConfigurationError(
            f"{what} is locked; unlock it with unlock_(), or have a new one made with "
            f"inplace=False."
        )
    batch = tuple(target.batch_size)
    if batch != tuple(shape)[: len(batch)]:
        raise ConfigurationError(
            f"{what} has the batch size {batch}, and the results have {tuple(shape)}; "
            f"give one of this size, or none."
        )
