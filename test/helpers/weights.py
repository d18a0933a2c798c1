"""Weights as updates send them."""

from __future__ import annotations

from typing import Any

from torchrl_sglang.types import FusedParameter, ModelMetadata
from torchrl_sglang.weight_update.sources import served as sources
from torchrl_sglang.weight_update.sources.base import Source
from torchrl_sglang.weight_update.sources.resolve import find_source
from torchrl_sglang.weight_update.sources.served import ServedTensors
from torchrl_sglang.weight_update.weights import Weights


def open_weights(
    weights: Any, served: ModelMetadata, fused: dict[str, FusedParameter] | None = None
) -> Weights:
    """Resolves weights, and validates them against these tensors."""
    source = weights if isinstance(weights, Source) else find_source(weights)
    model = ServedTensors(metadata=served, fused=fused or {})
    return sources.open_weights(source, model if source.adapter is None else None)
