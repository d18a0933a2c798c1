"""Checks of where results are written to, before anything is generated.

TensorDict and torch refuse with errors of their own. These would come when the
responses are there and paid for, and take them along.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection

from torchrl_sglang.errors import ConfigurationError

__all__ = ["check_device", "check_target"]


def check_device(device: torch.device) -> None:
    """Checks that tensors can be put on a device here.

    Raises:
        ConfigurationError: if there is none of this name.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device={str(device)!r} cannot hold the results here: {error}. Give one "
            f"that this process has, or leave it out for the input's."
        ) from error


def check_target(
    target: TensorDictBase, keys: Iterable[NestedKey], shape: Sequence[int]
) -> None:
    """Checks that containers of a batch can be written under these keys.

    Args:
        target: what is written to.
        keys: where.
        shape: batch shape of the results.

    Raises:
        ConfigurationError: if ``target`` is no TensorDict, is locked or does not have
            the shape, or if something below it that is written to does so.

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
