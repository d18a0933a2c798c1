"""Servers with block-FP8 linear layers, which weight updates fill.

SGLang reads the block configuration of a checkpoint from the model's configuration; for
a bfloat16 checkpoint, ``--json-model-override-args`` adds it. The servers begin with
random weights (``--load-format dummy``), which need no FP8 checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_sglang.backends.client.model_info import load_model_config
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import FP8_BLOCK

QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
"""Entry of a model's configuration, as in the checkpoints of DeepSeek-V3."""

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of ``model_type`` whose linear layers the encoding supports."""

_SET = ("quantization", "load_format")
"""Arguments of a server with ``rollout_dtype="fp8"``."""


UNFILLED = (
    "They were started with rollout_dtype='fp8' and hold random weights; send them the "
    "trainer's with SGLangWeightSyncScheme."
)
"""Reason why they do not generate before the first weight update."""


def rollout_arguments(
    rollout_dtype: str, model: str, given: Mapping[str, Any], device: str | None
) -> dict[str, Any]:
    """Returns the checked arguments of servers with this type of weights."""
    if rollout_dtype != "fp8":
        raise ConfigurationError(
            f"rollout_dtype={rollout_dtype!r} is not 'fp8'; give that, or leave it out "
            f"for the checkpoint's own type."
        )
    trusted = bool(given.get("trust_remote_code"))
    config = load_model_config(model, trusted, given.get("revision"))
    return block_fp8_arguments(config, given, device)


def block_fp8_arguments(
    config: Any, given: Mapping[str, Any], device: str | None
) -> dict[str, Any]:
    """Returns the checked arguments of servers for this configuration."""
    if device == "cpu":
        raise ConfigurationError(
            "rollout_dtype='fp8' is for servers on GPUs: SGLang has no FP8 kernels for "
            "this CPU. Leave it out."
        )
    for name in _SET:
        if given.get(name) is not None:
            raise ConfigurationError(
                f"{name}={given[name]!r} does not go with rollout_dtype='fp8', which "
                f"sets it; leave one of the two out."
            )
    text = config.get_text_config()
    if getattr(config, "quantization_config", None):
        raise ConfigurationError(
            "rollout_dtype='fp8' is for a checkpoint in bfloat16, and this one is "
            "quantised already; leave rollout_dtype out."
        )
    if text.model_type not in FAMILIES:
        raise ConfigurationError(
            f"rollout_dtype='fp8' knows the layers of {', '.join(FAMILIES)}, and this "
            f"model is a {text.model_type!r}; leave rollout_dtype out."
        )
    tp_size = int(given.get("tp_size") or 1)
    if problem := _misfit(text, tp_size):
        fitting = [n for n in range(1, tp_size) if not _misfit(text, n)]
        remedy = f"give tp_size={fitting[-1]}" if fitting else "leave rollout_dtype out"
        raise ConfigurationError(
            f"rollout_dtype='fp8' with tp_size={tp_size}: {problem}, which is no "
            f"multiple of a block's {FP8_BLOCK}; {remedy}."
        )
    overrides = json.loads(given.get("json_model_override_args") or "{}")
    return {
        "quantization": "fp8",
        "load_format": "dummy",
        "json_model_override_args": json.dumps(
            {**overrides, "quantization_config": dict(QUANTIZATION)}
        ),
    }


def _misfit(text: Any, tp_size: int) -> str | None:
    """Returns the first size on a rank that is not a multiple of a block.

    The rule of SGLang's ``Fp8LinearMethod.validate_block_quant_shapes``.
    """
    for name, size, parts in _sizes(text, tp_size):
        if size % parts or size // parts % FP8_BLOCK:
            share = f" / {parts}" if parts > 1 else ""
            return f"the {name} is {size}{share}"
    return None


def _sizes(text: Any, tp_size: int) -> Iterator[tuple[str, int, int]]:
    """Yields name, size and number of parts of dimensions with whole blocks."""
    heads = int(text.num_attention_heads)
    width = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    yield "width of all query heads", heads * width, tp_size
    # Heads are copied where there are fewer than ranks.
    yield "width of all key heads", kv_heads * width, min(tp_size, kv_heads)
    experts = getattr(text, "moe_intermediate_size", None)
    yield "intermediate size", int(text.intermediate_size), tp_size
    if experts:
        yield "intermediate size of an expert", int(experts), tp_size
    if shared := getattr(text, "shared_expert_intermediate_size", None):
        yield "intermediate size of the shared expert", int(shared), tp_size
