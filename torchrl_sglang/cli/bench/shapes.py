"""Models to measure with: real shapes, and nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["BUILT_IN", "SHAPES", "SMALL_MODELS", "save_model", "save_shapes"]

SHAPES: dict[str, dict[str, Any]] = {
    # Shapes of Qwen2.5, from the config.json that its authors publish.
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151_936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152_064,
    },
}
"""Models of which only the configuration is written; the server makes up weights."""

SMALL_MODELS: dict[str, dict[str, Any]] = {
    # Heads that the kernels of a GPU take, too.
    "tiny": {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2},
    # Parameters enough for a link to show its rate.
    "35m": {"hidden_size": 768, "num_layers": 4, "num_heads": 12, "num_kv_heads": 4},
}
"""Models whose weights are written, random as they are."""

BUILT_IN = (*SMALL_MODELS, *SHAPES)


def save_shapes(name: str, folder: str | Path) -> str:
    """Writes a configuration and a tokenizer; the server fills in random weights."""
    from transformers import Qwen2Config

    from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

    config = Qwen2Config(
        **SHAPES[name],
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=32_768,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def save_model(
    name: str, folder: str | Path, *, half: bool = False
) -> tuple[str, dict[str, Any]]:
    """Writes a built-in model and returns where it is, with what its server needs.

    Args:
        name: one of :data:`BUILT_IN`.
        folder: where to write it.
        half: in bfloat16, which is what SGLang's kernels for GPUs take.
    """
    if name in SHAPES:
        return save_shapes(name, folder), {"load_format": "dummy"}
    import torch

    from torchrl_sglang.testing.tiny_model import save_tiny_model

    dtype = torch.bfloat16 if half else torch.float32
    return str(save_tiny_model(folder, **SMALL_MODELS[name], dtype=dtype)), {}
