"""Models of several kinds, and learners of them, for one rank or several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import lazy_stack
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from helpers.learner_batches import make_row
from torchrl_sglang import CorrectedGRPOLoss
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer
from torchrl_sglang.trainers.learner import Learner
from torchrl_sglang.trainers.models import load_model, scorer
from torchrl_sglang.trainers.ranks import TrainerRanks

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""An odd number, so that ranks have unequal parts."""

MODELS: dict[str, Any] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, mlp_only_layers=[])
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    ),
}

CASES: dict[str, dict[str, Any]] = {
    "tied": {"gradient_checkpointing": True},
    "qwen3_moe": {},
    "mixtral": {},
    "lora": {"lora": {"r": 4}},
    "lora_half": {"lora": {"r": 4}, "dtype": torch.bfloat16},
}
"""Kind of a run -> arguments of ``load_model``."""


def save_models(folder: Path) -> None:
    """Writes a model for each case."""
    tokenizer = make_tiny_tokenizer()
    for number, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        make().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def model_of(folder: Path, case: str) -> Path:
    return folder / (case if case in MODELS else "tied")


def batch_of(step: int, ranks: TrainerRanks) -> Any:
    """Returns a rank's share of a batch."""
    rows = [make_row(100 * step + number, 1.0, 3 + number % 5) for number in range(8)]
    generator = torch.Generator().manual_seed(step)
    for row in rows:
        row["advantage"] = torch.randn(1, 1, generator=generator)
    return lazy_stack(rows[ranks.rank :: ranks.size])


def make_learner(folder: Path, case: str, ranks: TrainerRanks) -> Learner:
    """Returns a learner with a divergence from the model before."""
    path = model_of(folder, case)
    torch.manual_seed(5)
    load = partial(load_model, path, device=torch.device("cpu"), ranks=ranks)
    model = load(**CASES[case])
    loss = CorrectedGRPOLoss(
        scorer(model, AutoTokenizer.from_pretrained(path)),
        clip_epsilon=(0.99, 99.0),
        entropy_bonus=False,
        kl_to_ref_coeff=0.1,
    )
    reference = "adapter" if "lora" in CASES[case] else load().requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return Learner(
        loss,
        # Small gradients are not blown up, so that only their sums are compared.
        torch.optim.AdamW(trained, lr=0.01, eps=1e-2),
        reference=reference,
        clip_grad_norm=0.5,
        max_tokens_per_pass=24,
        ranks=ranks,
    )
