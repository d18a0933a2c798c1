"""LoRA adapters of models."""

from __future__ import annotations

from typing import Any

import torch

from torchrl_sglang.weight_update.sources.base import unwrap
from torchrl_sglang.weight_update.sources.peft import adapter_source


def adapter_from_model(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns a model's active adapter as PEFT saves it."""
    source = adapter_source(unwrap(model))
    dtypes = {name: spec.dtype for name, spec in source.specs.items()}
    return dict(source.read(dtypes)), dict(source.adapter)
