"""The LoRA adapter of a PEFT model, or of a folder that PEFT has saved it in."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from torchrl_sglang.backends.base import fits_servers, read_folder
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.weight_update.sources.base import (
    Source,
    tensor_source,
    wrapped,
)

__all__ = [
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
    return fits_servers(config, modules, server_args or {})


def adapter_source(given: Any) -> Source:
    """Resolves the active adapter of a PEFT model, or a folder that PEFT has saved."""
    if isinstance(given, (str, os.PathLike)):
        tensors, config = read_folder(given)
        return dataclasses.replace(tensor_source(tensors), adapter=config)
    found = peft_model_in(given)
    if found is None:
        raise ConfigurationError(
            f"A {type(given).__name__} has no LoRA adapter; give a model that "
            f"peft.get_peft_model() has made."
        )
    active = found.active_adapters
    if len(active) != 1:
        raise ConfigurationError(
            f"The model has {len(active)} active adapters, {active}; select the one to "
            f"send with model.set_adapter(name)."
        )
    from peft import get_peft_model_state_dict

    # Embeddings that the adapter changes are the base model's own, and served already.
    tensors = get_peft_model_state_dict(
        found, adapter_name=active[0], save_embedding_layers=False
    )
    config = _to_json(found.peft_config[active[0]].to_dict())
    return dataclasses.replace(tensor_source(tensors), adapter=config)


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
