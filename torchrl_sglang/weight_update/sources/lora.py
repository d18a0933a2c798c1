"""The LoRA adapter that the caller trains, as PEFT saves it: tensors, configuration.

PEFT is needed only where a model of its own is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.backends.lora.payload import read_folder, why_not
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.weight_update.sources.tensors import (
    Source,
    describe,
    make_whole,
    read_tensors,
)

__all__ = [
    "adapter_from_folder",
    "adapter_from_model",
    "adapter_source",
    "is_peft_model",
    "is_plain_lora",
    "peft_model_in",
]


_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Ways in which PEFT begins an adapter and leaves the weights under it as they were."""


def is_peft_model(model: Any) -> bool:
    """Returns whether ``model`` is, or wraps, a model of PEFT; does not import PEFT."""
    return peft_model_in(model) is not None


def is_plain_lora(model: Any, server_args: Mapping[str, Any] | None = None) -> bool:
    """Returns whether all that ``model`` trains is one adapter that servers take.

    Args:
        model: anything that can be sent as weights.
        server_args: what the servers say about their own arguments; by default those of
            servers that take every rank and every module.
    """
    found = peft_model_in(model)
    if found is None or len(found.active_adapters) != 1:
        return False
    name = found.active_adapters[0]
    config = _plain(found.peft_config[name].to_dict())
    if config.get("init_lora_weights", True) not in _KEEPS_BASE:
        # It is nothing without the changed weights under it, which servers lack.
        return False
    of_adapter = re.compile(rf"([^.]+)\.lora_[^.]+\.{re.escape(name)}(\.|$)")
    modules = set()
    for path, parameter in found.named_parameters():
        place = of_adapter.search(path)
        if place is not None:
            modules.add(place[1])
        elif parameter.requires_grad:
            # It is trained too, and would stay behind.
            return False
    return why_not(config, modules, server_args or {}) is None


def adapter_source(given: Any) -> tuple[Source, dict[str, Any]]:
    """Returns the tensors of an adapter as a source, and its configuration.

    Args:
        given: a model of PEFT, or a wrapper around one; or a folder that PEFT has saved
            an adapter in.

    Raises:
        ConfigurationError: if it has no adapter.
    """
    if isinstance(given, (str, os.PathLike)):
        tensors, config = adapter_from_folder(given)
    else:
        tensors, config = _parts_of(given, None)
    return (
        Source(
            found={name: describe(tensor) for name, tensor in tensors.items()},
            read=lambda wanted: read_tensors(tensors, wanted),
            stable=True,
        ),
        config,
    )


def adapter_from_model(
    model: Any, adapter_name: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of a model's adapter.

    Sharded tensors are gathered, one at a time; all ranks call this together. The
    tensors share memory with the model's where they can.

    Args:
        model: a :class:`peft.PeftModel`, or a wrapper (of TorchRL, DDP or
            torch.compile) around one.
        adapter_name: which of its adapters. By default the active one.

    Raises:
        ConfigurationError: if it has none, or not this one, or several are active.

    Examples:
        >>> from peft import LoraConfig, get_peft_model
        >>> trained = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
        >>> tensors, config = adapter_from_model(trained)
        >>> config["r"], sorted(tensors)[0]
        (4, 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight')
    """
    tensors, config = _parts_of(model, adapter_name)
    whole = {name: make_whole(tensor, tensor.dtype) for name, tensor in tensors.items()}
    return whole, config


def _parts_of(
    model: Any, adapter_name: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns an adapter's tensors, as they are on this rank, and its configuration."""
    found = peft_model_in(model)
    if found is None:
        raise ConfigurationError(
            f"A {type(model).__name__} has no LoRA adapter; give a model that "
            f"peft.get_peft_model() has made."
        )
    from peft import get_peft_model_state_dict

    name = _name_of(found, adapter_name)
    # Embeddings that the adapter changes are the base model's own, and served already.
    tensors = get_peft_model_state_dict(
        found, adapter_name=name, save_embedding_layers=False
    )
    config = _plain(found.peft_config[name].to_dict())
    return tensors, config


def adapter_from_folder(
    path: str | os.PathLike[str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of an adapter that PEFT has saved.

    Args:
        path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ConfigurationError: if one of the files is missing or cannot be read.
    """
    return read_folder(path)


def peft_model_in(model: Any) -> Any:
    """Returns the model of PEFT that is, or is in, ``model``; or None."""
    while isinstance(model, nn.Module):
        if _is_peft(model):
            return model
        if isinstance(model, LLMWrapperBase):
            model = model.model
        else:
            # DDP, and torch.compile.
            model = getattr(model, "module", getattr(model, "_orig_mod", None))
    return None


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and any(
        kind.__module__.partition(".")[0] == "peft" for kind in type(model).__mro__
    )


def _name_of(model: Any, name: str | None) -> str:
    if name is None:
        active = model.active_adapters
        if len(active) != 1:
            raise ConfigurationError(
                f"The model has {len(active)} active adapters, {active}; say which one "
                f"is to be sent."
            )
        name = active[0]
    if name not in model.peft_config:
        raise ConfigurationError(
            f"The model has no adapter {name!r}; it has {sorted(model.peft_config)}."
        )
    return str(name)


def _plain(value: Any) -> Any:
    """Returns PEFT's configuration as its JSON file has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    inner = getattr(value, "value", value)
    return inner if isinstance(inner, (str, int, float, type(None))) else str(inner)
