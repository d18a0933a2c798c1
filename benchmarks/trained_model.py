"""A model with random weights, as a trainer has it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_sglang.cli.bench.models import save_model


def make_trained_model(name: str, device: str) -> Any:
    """Returns a model in float32 that checkpoints its activations.

    Args:
        name: of a model, as for ``bench``.
        device: where it is trained.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, _ = save_model(name, folder)
        config = AutoConfig.from_pretrained(path)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Which is for models in training mode; these have no dropout.
    return model.train()
