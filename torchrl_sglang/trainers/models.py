"""Loads the trained model, shards it over ranks with FSDP2, and saves it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.packing import dropouts
from torchrl_sglang.support.checks import check_count, check_keywords
from torchrl_sglang.trainers.ranks import TrainerRanks


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    lora: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    ranks: TrainerRanks | None = None,
) -> Any:
    """Returns the model that is trained, in evaluation mode: without dropout.

    Several ranks share it: the first one reads the checkpoint into its host's memory,
    and each gets its part, layer by layer. All of them call this.

    Args:
        model: a folder, a hub name, or a model of transformers, which is changed.
        device: device of the model.
        dtype: type of its weights. Passes are computed in bfloat16 on a GPU anyway.
        attn_implementation: attention of transformers, such as ``"sdpa"``. Defaults to
            its own choice, or the given model's.
        lora: arguments of PEFT's ``LoraConfig``, to train an adapter alone.
        gradient_checkpointing: compute activations again in the backward pass.
        trust_remote_code: run the code of a checkpoint.
        ranks: ranks of the trainer. Defaults to this process alone.
    """
    ranks = ranks or TrainerRanks()
    loaded: Any = model
    if not isinstance(model, nn.Module):
        options: dict[str, Any] = {
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
        }
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        name = os.fspath(model)
        loaded = ranks.first(lambda: _read(name, options))
        if loaded is None:
            loaded = _without_memory(name, options)
    elif attn_implementation is not None:
        loaded.set_attn_implementation(attn_implementation)
    if ranks.size == 1:
        loaded = loaded.to(device)
    if lora is not None:
        loaded = _add_adapter(loaded, lora)
    loaded.eval()
    if gradient_checkpointing:
        # Earlier releases of transformers have it under the second name alone.
        enable = getattr(loaded, "activation_checkpointing_enable", None)
        (enable or loaded.gradient_checkpointing_enable)({"use_reentrant": False})
        if lora is not None:
            # Otherwise nothing that is checkpointed has a gradient.
            loaded.enable_input_require_grads()
        # Checkpointing is for models in training mode.
        _drop_nothing(loaded)
        loaded.train()
    return loaded if ranks.size == 1 else shard(loaded, ranks, device)


def _read(name: str, options: Mapping[str, Any]) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(name, **options)
    except OSError as error:
        raise ConfigurationError(
            f"model={name!r} cannot be loaded: {error} Give a folder with config.json "
            f"and weights, or a name on the hub."
        ) from error
    except (ImportError, ValueError) as error:
        attention = options.get("attn_implementation")
        if attention is None:
            raise
        raise ConfigurationError(
            f"{name} cannot be loaded with attn_implementation={attention!r}: {error} "
            f"Give 'sdpa' or 'eager', or leave it out."
        ) from error


def _without_memory(name: str, options: Mapping[str, Any]) -> Any:
    """Returns a model whose weights have shapes and no values."""
    config = AutoConfig.from_pretrained(
        name, trust_remote_code=options["trust_remote_code"]
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


def identify(model: str | os.PathLike[str] | nn.Module) -> str:
    """Returns the name by which a resumed run recognises its model.

    The name of a folder is its path without links.
    """
    if isinstance(model, nn.Module):
        return "given"
    name = os.fspath(model)
    return os.path.realpath(name) if os.path.isdir(name) else name


def check_adapter(lora: Mapping[str, Any]) -> None:
    """Raises :class:`.ConfigurationError` if no adapter can be made."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigurationError(
            f"lora={dict(lora)!r} needs PEFT: {error}. Install it with "
            f"pip install peft."
        ) from error
    aliases = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    check_keywords("lora", lora, LoraConfig, aliases)
    # PEFT finds it when the adapter is made.
    check_count("r of lora", lora.get("r", 8))
    try:
        LoraConfig(**lora)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"lora={dict(lora)!r} makes no adapter: {error}. See PEFT's LoraConfig."
        ) from error


def _add_adapter(model: Any, lora: Mapping[str, Any]) -> Any:
    check_adapter(lora)
    from peft import LoraConfig, get_peft_model

    defaults = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    try:
        return get_peft_model(model, LoraConfig(**{**defaults, **lora}))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"lora={dict(lora)!r} makes no adapter of this model: {error}"
        ) from error


def _drop_nothing(model: nn.Module) -> None:
    """Switches dropout off, which would make other log-probs in training mode."""
    for module in model.modules():
        for name in dropouts(module):
            setattr(module, name, 0.0)


def shard(
    model: nn.Module,
    ranks: TrainerRanks,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shards a model of transformers over two or more ranks with FSDP2, by layers.

    All get the first rank's weights, layer by layer, so that no rank has the whole
    model on its GPU; the others can give one without memory, on the device ``"meta"``.
    Weights stay in their type, and gradients are added up in float32. Passes are
    computed in ``compute_dtype``, by default bfloat16 on GPUs.
    """
    mesh = init_device_mesh(device.type, (ranks.size,))
    options: dict[str, Any] = {"mesh": mesh}
    if compute_dtype is None and device.type == "cuda":
        compute_dtype = torch.bfloat16
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32
        )
    kinds = getattr(model, "_no_split_modules", None) or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    receive = _Receiver(model, device)
    for module in (*layers, model):
        receive(module)
        fully_shard(module, **options)
    return model


class _Receiver:
    """Gives modules the tensors of the first rank, on a device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = model.named_parameters(remove_duplicate=False)
        counts = Counter(id(value) for _, value in named)
        self._tied = {key for key, count in counts.items() if count > 1}
        self._received: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._device = device
        self._done: set[nn.Module] = set()

    def __call__(self, module: nn.Module) -> None:
        """Replaces the tensors of a module and of its parts; all ranks call it."""
        for part in module.modules():
            if part in self._done:
                continue
            self._done.add(part)
            # Some models hold tensors that are neither parameters nor buffers.
            kinds: Any = part._parameters, part._buffers, vars(part)
            for tensors in kinds:
                for name, value in list(tensors.items()):
                    if isinstance(value, torch.Tensor):
                        tensors[name] = self._receive(value)

    def _receive(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) in self._received:
            return self._received[id(value)][1]
        if dist.get_rank() == 0:
            new = value.detach().to(self._device, copy=True).contiguous()
        else:
            new = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        dist.broadcast(new, 0)
        if isinstance(value, nn.Parameter):
            new = nn.Parameter(new, requires_grad=value.requires_grad)
        if id(value) in self._tied:
            self._received[id(value)] = value, new
        return new


def share_tokenizer(policy: Any, ranks: TrainerRanks) -> Any:
    """Returns the first rank's policy's tokenizer, on all of them. It can pad."""
    tokenizer: Any = ranks.share(None if policy is None else policy.tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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

    All ranks call this; the first one, which has the policy, writes the whole folder or
    nothing.
    """
    options = StateDictOptions(
        # Tensor by tensor, to the memory of the first rank's host.
        full_state_dict=True,
        cpu_offload=True,
        ignore_frozen_params=hasattr(model, "peft_config"),
    )
    state = get_model_state_dict(model, options=options)
    if ranks is not None and not ranks.is_first:
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    with _without_progress_bars():
        model.save_pretrained(partial, state_dict=state)
    policy.tokenizer.save_pretrained(partial)
    if policy.chat_template or policy.chat_template_name:
        # A copy: the policy's own stays as it is.
        tokenizer = AutoTokenizer.from_pretrained(partial)
        tokenizer.chat_template = policy.template.source
        tokenizer.save_pretrained(partial)
    _replace(partial, folder)
    return folder


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Leaves out transformers' bars, of which a run would have one a checkpoint."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _replace(new: Path, old: Path) -> None:
    """Puts a folder in the place of another one."""
    aside = old.with_name(f"{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
