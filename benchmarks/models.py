"""Models to measure with: real shapes, no weights, nothing to download."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

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


def save_shapes(name: str, folder: str | Path) -> str:
    """Writes a configuration and a tokenizer; the server fills in random weights."""
    config = Qwen2Config(
        **SHAPES[name],
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=32_768,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def server_arguments() -> dict[str, Any]:
    """Returns what this machine's server needs, from SGLANG_BUNDLE_FLAGS."""
    arguments: dict[str, Any] = {}
    name = ""
    for word in shlex.split(os.environ.get("SGLANG_BUNDLE_FLAGS", "")):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            arguments[name] = True
        else:
            arguments[name] = word
    return arguments
