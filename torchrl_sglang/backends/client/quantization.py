"""Quantization of the served weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchrl_sglang.types import BLOCK_FP8, FP8_BLOCK, ServerArgs


def find_quantization(
    checkpoint: Mapping[str, Any] | None, args: ServerArgs
) -> str | None:
    """Returns ``ServerCapabilities.quantized``; the server's arguments come first."""
    config = _overridden(args) or checkpoint or {}
    method = config.get("quant_method")
    # Without blocks, SGLang quantises when it loads, and transposes the weights.
    blocks = list(config.get("weight_block_size") or ())
    if method == "fp8" and blocks == [FP8_BLOCK, FP8_BLOCK]:
        return BLOCK_FP8 if args.quantization in (None, "fp8") else args.quantization
    return args.quantization or (None if method is None else str(method))


def _overridden(args: ServerArgs) -> Mapping[str, Any]:
    try:
        data = json.loads(args.json_model_override_args or "{}")
    except ValueError:
        return {}
    config = data.get("quantization_config") if isinstance(data, dict) else None
    return config if isinstance(config, dict) else {}
