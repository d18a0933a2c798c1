"""Quantization of the served weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchrl_sglang.types import BLOCK_FP8, ServerArgs

BLOCK = [128, 128]
"""Supported ``weight_block_size`` of FP8 weight updates."""


def find_quantization(
    checkpoint: Mapping[str, Any] | None, args: ServerArgs
) -> str | None:
    """Returns ``ServerCapabilities.quantized``; the server's arguments come first."""
    config = _overridden(args) or checkpoint or {}
    method = config.get("quant_method")
    # Without blocks, SGLang quantises when it loads, and transposes the weights.
    if method == "fp8" and list(config.get("weight_block_size") or ()) == BLOCK:
        return BLOCK_FP8 if args.quantization in (None, "fp8") else args.quantization
    return args.quantization or (None if method is None else str(method))


def _overridden(args: ServerArgs) -> Mapping[str, Any]:
    try:
        data = json.loads(args.json_model_override_args or "{}")
    except ValueError:
        return {}
    config = data.get("quantization_config") if isinstance(data, dict) else None
    return config if isinstance(config, dict) else {}
