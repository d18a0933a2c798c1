"""What weights servers hold, if not those of an unquantised checkpoint. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchrl_sglang.types import BLOCK_FP8, ServerArgs

BLOCK = [128, 128]
"""``weight_block_size`` of FP8 that weight updates can be encoded for."""


def find_quantization(
    checkpoint: Mapping[str, Any] | None, args: ServerArgs
) -> str | None:
    """Returns ``ServerCapabilities.quantized``.

    Args:
        checkpoint: ``quantization_config`` of the model's files.
        args: of the server, which may replace that.
    """
    config = _overridden(args) or checkpoint or {}
    method = config.get("quant_method")
    # Without blocks, SGLang quantises when it loads, and transposes the weights.
    if method == "fp8" and list(config.get("weight_block_size") or ()) == BLOCK:
        return BLOCK_FP8 if args.quantization in (None, "fp8") else args.quantization
    return args.quantization or (None if method is None else str(method))


def _overridden(args: ServerArgs) -> Mapping[str, Any]:
    try:
        found = json.loads(args.json_model_override_args or "{}")
    except ValueError:
        return {}
    config = found.get("quantization_config") if isinstance(found, dict) else None
    return config if isinstance(config, dict) else {}
