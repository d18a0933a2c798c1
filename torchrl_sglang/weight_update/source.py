"""What the caller calls weights to (name, tensor), checked against the served model.

A module, a state dict, a flat or nested TensorDict or an iterator of (name, tensor):
all become a list of tensors under the names that the server's loader takes, each
storage once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.types import ModelMetadata

__all__ = ["NamedTensors", "get_model_metadata", "named_tensors", "to_served_names"]

NamedTensors: TypeAlias = dict[str, torch.Tensor]
"""Parameter name -> tensor, in load order."""

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and wrappers put before the names of a module inside."""

_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
"""Buffers that no checkpoint holds and no loader takes."""

_LISTED = 8
"""How many names an error lists of each kind."""


def named_tensors(weights: Any) -> NamedTensors:
    """Returns the tensors of ``weights`` under the names that it gives them.

    Args:
        weights: an :class:`~torch.nn.Module` (parameters only, tied ones once), a
            wrapper of TorchRL around one, a mapping, a flat or nested
            :class:`~tensordict.TensorDict`, or an iterable of (name, tensor).

    Raises:
        ConfigurationError: if it is none of these, or holds no tensor.
    """
    if isinstance(weights, LLMWrapperBase):
        return named_tensors(weights.model)
    found: dict[str, Any]
    if isinstance(weights, nn.Module):
        found = dict(weights.named_parameters())
    elif isinstance(weights, TensorDictBase):
        found = dict(weights.flatten_keys(".").items())
    elif isinstance(weights, Mapping):
        found = dict(weights)
    elif isinstance(weights, Iterable) and not isinstance(weights, (str, bytes)):
        found = dict(_pairs(weights))
    else:
        raise ConfigurationError(
            f"Weights are a module, a state dict, a TensorDict or an iterable of "
            f"(name, tensor), got {type(weights).__name__}."
        )
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"The weight {name!r} is a {type(value).__name__}, not a tensor."
            )
    if not found:
        raise ConfigurationError(
            f"The {type(weights).__name__} that was given as weights has no parameter. "
            f"Is it the inference wrapper? Register the model that is trained."
        )
    # A TensorDict of a module holds its buffers too, which are computed, not trained.
    is_td = isinstance(weights, TensorDictBase)
    parameters = [
        name for name in found if is_td and isinstance(found[name], nn.Parameter)
    ]
    return {
        name: found[name].detach()
        for name in parameters or found
        if not name.endswith(_COMPUTED)
    }


def _pairs(items: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2):
            raise ConfigurationError(
                f"An iterable of weights yields (name, tensor), got a "
                f"{type(item).__name__}; model.parameters() has no names, "
                f"model.named_parameters() has."
            )
        yield item


def get_model_metadata(model: Any) -> ModelMetadata:
    """Returns name -> (dtype, shape) of a model's parameters; tied ones appear once.

    Args:
        model: anything that can be sent as weights.

    Examples:
        >>> metadata = get_model_metadata(torch.nn.Linear(2, 3))
        >>> metadata["weight"]
        (torch.float32, torch.Size([3, 2]))
    """
    return {
        name: (value.dtype, value.shape) for name, value in named_tensors(model).items()
    }


def to_served_names(found: NamedTensors, served: ModelMetadata) -> NamedTensors:
    """Returns ``found`` under the served model's names, in its order, checked.

    A prefix that every name has (of a wrapper, DDP or torch.compile) is taken off. A
    tensor that the served model does not list is left out if it is another name of
    one that it does (tied weights).

    Raises:
        WeightMismatchError: if tensors are missing, unexpected or of another shape; the
            message lists them all.
    """
    renamed = _strip_prefixes(found, served)
    missing = [name for name in served if name not in renamed]
    listed = {value.data_ptr() for name, value in renamed.items() if name in served} - {
        0
    }
    unexpected = [
        name
        for name, value in renamed.items()
        if name not in served and value.data_ptr() not in listed
    ]
    shapes = [
        f"{name}: {tuple(renamed[name].shape)}, served {tuple(shape)}"
        for name, (_, shape) in served.items()
        if name in renamed and renamed[name].shape != shape
    ]
    kinds = [
        f"{name}: {renamed[name].dtype}, served {dtype}"
        for name, (dtype, _) in served.items()
        if name in renamed
        and renamed[name].is_floating_point() != dtype.is_floating_point
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}"
        + (", ..." if len(names) > _LISTED else "")
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("of another kind", kinds),
        )
        if names
    ]
    if problems:
        raise WeightMismatchError(
            f"The weights do not fit the served model; nothing was sent. "
            f"{'; '.join(problems)}. Send the model that the server was started with."
        )
    return {name: renamed[name] for name in served}


def _strip_prefixes(found: NamedTensors, served: ModelMetadata) -> NamedTensors:
    """Takes off common prefixes as long as that makes more names known."""
    names = list(found)
    while True:
        known = sum(name in served for name in names)
        if known == len(names):
            break
        for prefix in _PREFIXES:
            if all(name.startswith(prefix) for name in names):
                shorter = [name.removeprefix(prefix) for name in names]
                if sum(name in served for name in shorter) >= known:
                    names = shorter
                    break
        else:
            break
    return dict(zip(names, found.values(), strict=True))
