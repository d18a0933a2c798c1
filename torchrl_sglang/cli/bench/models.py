"""Loads, models without a download, and engines for them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_sglang.cli.interrupts import uninterrupted
from torchrl_sglang.cli.options import engine_arguments

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

FLAGS_VARIABLE = "TORCHRL_SGLANG_BENCH_FLAGS"
"""Environment variable with further flags of ``bench``'s servers."""

FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)
SHAPES: dict[str, tuple[int, ...]] = {
    "0.5b": (896, 4864, 24, 151_936, 14, 2, True),
    "3b": (2048, 11_008, 36, 151_936, 16, 2, True),
    "7b": (3584, 18_944, 28, 152_064, 28, 4, False),
}
"""Qwen2.5's values of these fields; the server generates the weights."""

SMALL_MODELS: dict[str, dict[str, Any]] = {
    # Head sizes that GPU kernels support, too.
    "tiny": {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2},
    # Enough parameters for the bandwidth of a link.
    "35m": {"hidden_size": 768, "num_layers": 4, "num_heads": 12, "num_kv_heads": 4},
}
"""Models with random weights."""

MIXTURE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "vocab_size": 151_936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""A third of the layers of Qwen3-30B-A3B; the server generates the weights."""

BUILT_IN = (*SMALL_MODELS, *SHAPES, "moe")


def option(default: int, text: str) -> Any:
    """Declares a field with an option of the command line."""
    return dataclasses.field(default=default, metadata={"help": text})


def save_model(
    name: str, folder: str | Path, *, device: str = "cpu"
) -> tuple[str, dict[str, Any]]:
    """Writes a built-in model; returns its folder and arguments of its server."""
    import torch
    from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

    from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer, save_tiny_model

    if name in SMALL_MODELS:
        # SGLang's kernels for GPUs take bfloat16.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return str(save_tiny_model(folder, **SMALL_MODELS[name], dtype=dtype)), {}
    shared = {"max_position_embeddings": 32_768, "dtype": "bfloat16"}
    config: PretrainedConfig
    if name in SHAPES:
        fields = dict(zip(FIELDS, SHAPES[name], strict=True))
        config = Qwen2Config(**fields, **shared)
        config.architectures = ["Qwen2ForCausalLM"]
    else:
        config = Qwen3MoeConfig(**MIXTURE, **shared)
        config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return str(folder), {"load_format": "dummy"}


def server_arguments() -> dict[str, Any]:
    """Returns the flags in :data:`FLAGS_VARIABLE` as keyword arguments."""
    return engine_arguments(shlex.split(os.environ.get(FLAGS_VARIABLE, "")))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Workload; each field is a command-line option."""

    prompts: int = option(64, "prompts of one round")
    prompt_tokens: int = option(64, "length of a prompt")
    new_tokens: int = option(64, "length of a response")
    concurrency: int = option(1, "concurrent callers")
    repeats: int = option(5, "rounds that count, after one that does not")


@contextlib.contextmanager
def start_engine(model: str, *, device: str, **options: Any) -> Iterator[AsyncSGLang]:
    """Starts an engine for a built-in model, a folder or a hub name, and stops it."""
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    if device == "cuda":
        options = {**server_arguments(), **options}
    with tempfile.TemporaryDirectory(prefix="torchrl_sglang_bench_") as folder:
        if model in BUILT_IN and not os.path.isdir(model):
            model, needed = save_model(model, folder, device=device)
            options = {**needed, **options}
        engine = AsyncSGLang.from_pretrained(model, device=device, **options)
        try:
            yield engine
        finally:
            with uninterrupted():
                engine.shutdown()
