"""Loads what is trained, shards it over ranks with FSDP2, and saves it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_keywords
from torchrl_sglang.trainers.ranks import TrainerRanks

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""State of all ranks together, in the memory of the first one's host."""


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    lora: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Returns the model that is trained, in evaluation mode: without dropout.

    Args:
        model: a folder, a hub name, or a model of transformers, which is changed.
        device: where it is trained.
        dtype: of its weights. Passes are computed in bfloat16 on a GPU anyway.
        lora: arguments of PEFT's ``LoraConfig``, to train an adapter alone.
        gradient_checkpointing: compute activations again in the backward pass.
        trust_remote_code: run the code of a checkpoint.

    Raises:
        ConfigurationError: if ``lora`` is given and PEFT is not installed.
    """
    found: Any = model
    if not isinstance(model, nn.Module):
        found = AutoModelForCausalLM.from_pretrained(
            os.fspath(model), dtype=dtype, trust_remote_code=trust_remote_code
        )
    found = found.to(device)
    if lora is not None:
        found = _add_adapter(found, lora)
    found.eval()
    if gradient_checkpointing:
        found.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        if lora is not None:
            # Otherwise nothing that is checkpointed has a gradient.
            found.enable_input_require_grads()
        # Checkpointing is for models in training mode.
        _drop_nothing(found)
        found.train()
    return found


def _add_adapter(model: Any, lora: Mapping[str, Any]) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigurationError(
            f"lora={dict(lora)!r} needs PEFT: {error}. Install it with pip install "
            f"torchrl_sglang[lora]."
        ) from error
    check_keywords("lora", lora, LoraConfig)
    defaults = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**{**defaults, **lora}))


def _drop_nothing(model: nn.Module) -> None:
    """Switches dropout off, which would make other log-probs in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "activation_dropout", "dropout"):
            # Layers of transformers have shares of their own, too.
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def shard(model: nn.Module, ranks: TrainerRanks, device: torch.device) -> nn.Module:
    """Shards a model over the ranks with FSDP2, a group of parameters for each layer.

    On GPUs passes are computed in bfloat16, gradients added up in float32.
    """
    mesh = init_device_mesh(device.type, (ranks.size,))
    options: dict[str, Any] = {"mesh": mesh}
    if device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    kinds = getattr(model, "_no_split_modules", None) or ()
    for module in list(model.modules()):
        if type(module).__name__ in kinds:
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def scorer(model: nn.Module, tokenizer: Any, key: str = "log_probs") -> Any:
    """Returns the wrapper that computes a model's log-probs of given tokens."""
    # The trainer scores the very tokens that the engine wrote.
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        log_probs_key=key,
    )


def save_model(
    model: Any, policy: Any, folder: Path, ranks: TrainerRanks | None = None
) -> Path:
    """Writes a model as transformers reads it, with the policy's chat template.

    All ranks call this; the first one writes.

    Args:
        model: what was trained.
        policy: what has generated; ``None`` on other ranks.
        folder: to write to. It is there with everything in it, or not at all.
        ranks: of the trainer.
    """
    state = get_model_state_dict(model, options=WHOLE)
    if ranks is not None and not ranks.is_first:
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial, state_dict=state)
    policy.tokenizer.save_pretrained(partial)
    if policy.chat_template or policy.chat_template_name:
        # A copy: the policy's own stays as it is.
        tokenizer = AutoTokenizer.from_pretrained(partial)
        tokenizer.chat_template = policy.template.source
        tokenizer.save_pretrained(partial)
    _replace(partial, folder)
    return folder


def _replace(new: Path, old: Path) -> None:
    """Puts a folder in the place of another one."""
    aside = old.with_name(f"{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
