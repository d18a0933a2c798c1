"""Writes the table of ``guides/arrangements.rst`` from the formulas of ``plan``.

    PYTHONPATH=. python docs/source/arrangement_table.py

``test/llm/cli/test_arrangement_table.py`` fails where the page says something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from torchrl_sglang.cli.plan.arrange import Arrangement, Cluster, arrange
from torchrl_sglang.cli.plan.memory import GIB, Workload
from torchrl_sglang.cli.plan.shapes import Shape, read_shape

PAGE = Path(__file__).with_name("guides") / "arrangements.rst"
BEGIN, END = ".. begin: arrangement_table.py", ".. end"

GPUS = (1, 2, 4, 8, 16, 32, 64)
MEMORIES = (80, 139)
"""GiB of an H100 or A100, and of an H200."""


def _qwen2(*sizes: int, tied: bool = False) -> PretrainedConfig:
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
        *("num_attention_heads", "num_key_value_heads"),
    )
    given: dict[str, Any] = dict(zip(names, sizes, strict=True))
    return Qwen2Config(**given, tie_word_embeddings=tied)


MODELS: dict[str, PretrainedConfig] = {
    "Qwen2.5 0.5B": _qwen2(896, 4864, 24, 151_936, 14, 2, tied=True),
    "Qwen2.5 1.5B": _qwen2(1536, 8960, 28, 151_936, 12, 2, tied=True),
    "Qwen2.5 3B": _qwen2(2048, 11_008, 36, 151_936, 16, 2, tied=True),
    "Qwen2.5 7B": _qwen2(3584, 18_944, 28, 152_064, 28, 4),
    "Llama 3 8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        vocab_size=128_256,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Qwen2.5 14B": _qwen2(5120, 13_824, 48, 152_064, 40, 8),
    "Qwen3 30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        vocab_size=151_936,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
    ),
    "Qwen2.5 32B": _qwen2(5120, 27_648, 64, 152_064, 40, 8),
    "Llama 3 70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        vocab_size=128_256,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def cell(shape: Shape, gpus: int, memory: int) -> str:
    """Returns what a reader is told of a model on so many GPUs."""
    cluster = Cluster(gpus=gpus, memory=memory * GIB)
    for work, mark in ((Workload(), ""), (Workload(lora=16), "LoRA ")):
        found = arrange(shape, cluster, work)
        if isinstance(found, Arrangement):
            size = "" if found.tp_size == 1 else f" x {found.tp_size}"
            both = f"{found.ranks} + {found.replicas}{size}"
            if found.place == "colocated":
                both = f"{found.ranks} = {found.replicas}{size}"
            return f"{mark}{both}, {found.trainer.peak / GIB:.0f}"
    return "none"


def make_table(memory: int) -> Iterator[str]:
    """Yields the lines of a table."""
    yield f".. list-table:: GPUs of {memory} GiB"
    yield "   :header-rows: 1"
    yield "   :class: figures"
    yield ""
    yield "   * - model"
    yield from (f"     - {count}" for count in GPUS)
    for name, config in MODELS.items():
        shape = read_shape(config)
        yield f"   * - {name}"
        yield from (f"     - {cell(shape, count, memory)}" for count in GPUS)
    yield ""


def make_page(text: str) -> str:
    """Returns the page with the tables of today's formulas."""
    before, _, rest = text.partition(f"{BEGIN}\n")
    after = rest.partition(f"{END}\n")[2]
    tables = "\n".join(line for memory in MEMORIES for line in make_table(memory))
    return f"{before}{BEGIN}\n\n{tables}\n{END}\n{after}"


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
