"""The LoRA adapter of a PEFT model, or of a folder that PEFT has saved it in.

PEFT is imported only where one of its models is given.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_sglang.backends.base import read_folder, why_not
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.weight_update.sources.base import (
    Source,
    gather,
    tensor_source,
    wrapped,
)

__all__ = [
    "adapter_from_model",
    "adapter_source",
    "is_plain_lora",
    "peft_model_in",
]

_KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which PEFT leaves the base weights unchanged."""


def is_plain_lora(model: Any, server_args: Mapping[str, Any] | None = None) -> bool:
    """Returns whether ``model`` trains nothing but one adapter that servers take.

    Without ``server_args``, of servers that take every rank and every module.
    """
    found = peft_model_in(model)
    if found is None or len(found.active_adapters) != 1:
        return False
    name = found.active_adapters[0]
    config = _to_json(found.peft_config[name].to_dict())
    if config.get("init_lora_weights", True) not in _KEEPS_BASE:
        # It needs the changed base weights, which servers lack.
        return False
    adapter = re.compile(rf"([^.]+)\.lora_[^.]+\.{re.escape(name)}(\.|$)")
    modules = set()
    for path, parameter in found.named_parameters():
        module = adapter.search(path)
        if module is not None:
            modules.add(module[1])
        elif parameter.requires_grad:
            # It is trained too, and would not be sent.
            return False
    return why_not(config, modules, server_args or {}) is None


def adapter_source(given: Any) -> Source:
    """Resolves the adapter of a PEFT model, or of a folder that PEFT has saved."""
    if isinstance(given, (str, os.PathLike)):
        tensors, config = read_folder(given)
    else:
        tensors, config = _parts_of(given, None)
    source = tensor_source(tensors)
    return dataclasses.replace(source, adapter=config)


def adapter_from_model(
    model: Any, adapter_name: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns a model's adapter, by default the active one, as PEFT saves it.

    Sharded tensors are gathered, one at a time; all ranks call this together.

    Examples:
        >>> from peft import LoraConfig, get_peft_model
        >>> trained = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
        >>> tensors, config = adapter_from_model(trained)
        >>> config["r"], sorted(tensors)[0]
        (4, 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight')
    """
    tensors, config = _parts_of(model, adapter_name)
    return {name: gather(value, value.dtype) for name, value in tensors.items()}, config


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
    active, names = found.active_adapters, sorted(found.peft_config)
    if adapter_name is None and len(active) != 1:
        raise ConfigurationError(
            f"The model has {len(active)} active adapters, {active}; select the one to "
            f"send with model.set_adapter(name)."
        )
    name = active[0] if adapter_name is None else adapter_name
    if name not in names:
        raise ConfigurationError(f"The model has no adapter {name!r}; it has {names}.")
    from peft import get_peft_model_state_dict

    # Embeddings that the adapter changes are the base model's own, and served already.
    tensors = get_peft_model_state_dict(
        found, adapter_name=name, save_embedding_layers=False
    )
    return tensors, _to_json(found.peft_config[name].to_dict())


def peft_model_in(model: Any) -> Any:
    """Returns the PEFT model that is, or is wrapped in, ``model``; or None."""
    for module in wrapped(model):
        if hasattr(module, "peft_config") and any(
            kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__
        ):
            return module
    return None


def _to_json(value: Any) -> Any:
    """Converts PEFT's configuration to the values of its JSON file."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_to_json(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    inner = getattr(value, "value", value)
    return inner if isinstance(inner, (str, int, float, type(None))) else str(inner)
