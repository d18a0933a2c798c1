"""Models to measure with, which need no download, and engines that serve them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_sglang.cli.interrupts import uninterrupted

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

__all__ = ["BUILT_IN", "SHAPES", "closing", "save_model", "start_engine"]

SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
    }
    for name, hidden, intermediate, layers, heads, kv_heads, tied, vocabulary in (
        ("0.5b", 896, 4864, 24, 14, 2, True, 151_936),
        ("7b", 3584, 18_944, 28, 28, 4, False, 152_064),
    )
}
"""Configurations of Qwen2.5; the server makes up the weights."""

SMALL_MODELS: dict[str, dict[str, Any]] = {
    # Head sizes that the kernels of a GPU support, too.
    "tiny": {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2},
    # Parameters enough for a link to show its bandwidth.
    "35m": {"hidden_size": 768, "num_layers": 4, "num_heads": 12, "num_kv_heads": 4},
}
"""Models with random weights."""

BUILT_IN = (*SMALL_MODELS, *SHAPES)


def save_model(
    name: str, folder: str | Path, *, device: str = "cpu"
) -> tuple[str, dict[str, Any]]:
    """Writes a built-in model; returns its folder and arguments of its server."""
    import torch
    from transformers import Qwen2Config

    from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer, save_tiny_model

    if name in SMALL_MODELS:
        # SGLang's kernels for GPUs take bfloat16.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return str(save_tiny_model(folder, **SMALL_MODELS[name], dtype=dtype)), {}
    config = Qwen2Config(
        **SHAPES[name],
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=32_768,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return str(folder), {"load_format": "dummy"}


@contextlib.contextmanager
def start_engine(model: str, *, device: str, **options: Any) -> Iterator[AsyncSGLang]:
    """Starts an engine for a built-in model, a folder or a hub name, and stops it."""
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    with tempfile.TemporaryDirectory(prefix="torchrl_sglang_bench_") as folder:
        if model in BUILT_IN and not os.path.isdir(model):
            model, needed = save_model(model, folder, device=device)
            options = {**needed, **options}
        engine = AsyncSGLang.from_pretrained(model, device=device, **options)
        with closing(engine):
            yield engine


@contextlib.contextmanager
def closing(engine: AsyncSGLang) -> Iterator[AsyncSGLang]:
    """Shuts the engine down at the end of the block, undisturbed by signals."""
    try:
        yield engine
    finally:
        with uninterrupted():
            engine.shutdown()
