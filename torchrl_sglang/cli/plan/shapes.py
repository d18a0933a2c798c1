"""Sizes of a model from its configuration, without its weights."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model; numbers of values, not bytes."""

    name: str
    """Name or folder, as given to a run."""
    parameters: int
    """Number of parameters; shared parameters count once."""
    layers: int
    """Number of decoder layers."""
    largest_layer: int
    """Parameters of the largest layer, which FSDP2 gathers as a group."""
    largest_parameter: int
    """Values of the largest parameter."""
    linear_features: int
    """Inputs and outputs of all linear layers but the head, in total: the number of
    parameters of an adapter of rank 1."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention heads of a layer."""
    kv_heads: int
    """Heads of keys and values, which servers share among their GPUs."""
    attention: int
    """Width of all heads of a layer together."""
    normed: int
    """Width of queries and keys with their own norm; 0 without."""
    mlp: int
    """Width of a layer's MLP for a token."""
    experts_per_token: int
    """Experts of a token; 0 without experts."""
    vocabulary: int
    """Number of tokens, and of logits."""
    cache: int
    """Values of a token in the KV cache, in all layers together."""
    positions: int
    """Longest sequence of the model."""

    @property
    def matrices(self) -> int:
        """Parameters that multiply each token, but for the head."""
        return self.layers * self.largest_layer

    @property
    def head(self) -> int:
        """Parameters of the head, which multiply the tokens of responses."""
        return self.vocabulary * self.hidden

    @property
    def outside_layers(self) -> int:
        """Number of parameters outside the transformer layers."""
        return max(self.parameters - self.matrices, 0)


def read_shape(model: Any, *, trust_remote_code: bool = False) -> Shape:
    """Returns the sizes of a model; its modules are made without memory.

    Parameters are counted by instantiating the model on PyTorch's meta device, so no
    table of architectures is needed.

    Args:
        model: a folder, a hub name, a ``config.json``, or a configuration of
            transformers.
        trust_remote_code: run the code of a checkpoint.

    Raises:
        ConfigurationError: if there is no such model, or it is not a language model.
    """
    from transformers import PretrainedConfig

    config, name = model, getattr(model, "name_or_path", "") or "MODEL"
    if not isinstance(model, PretrainedConfig):
        config, name = _load(str(model), trust_remote_code), str(model)
        if os.path.isfile(name):
            # A run takes the folder.
            name = os.path.dirname(name) or "."
    modules = _instantiate(config, name, trust_remote_code)
    return _shape_of(name, _text_config(config), modules)


def _load(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    from torchrl_sglang.backends.launch.server_command import check_local_model

    if not os.path.exists(model):
        check_local_model(model)
        _check_hub(model)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Values of a wrong type raise errors of many kinds.
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigurationError(
            f"The configuration of {model!r} cannot be read: {reason}. Give a folder "
            f"with a config.json, that file, or a name on the hub."
        ) from error


def _check_hub(model: str) -> None:
    """Raises :class:`ConfigurationError` if a required hub does not answer.

    Transformers would try for half a minute.
    """
    from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        try:
            get_session().head(hf_hub_url(model, "config.json"), timeout=10.0)
        except Exception as error:
            # Versions of the hub's client have errors of several libraries.
            raise ConfigurationError(
                f"There is no folder {model!r}, nor is a model of that name on this "
                f"machine, and the hub cannot be reached: {error}. Check the name, or "
                f"give a folder with a config.json."
            ) from error


def _instantiate(config: Any, name: str, trust_remote_code: bool) -> Any:
    """Returns the modules on the meta device, where tensors have no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError) as error:
        raise ConfigurationError(
            f"{name!r} is no causal language model that transformers knows: {error}"
        ) from error


def _text_config(config: Any) -> Any:
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


def _shape_of(name: str, config: Any, model: Any) -> Shape:
    layers = _layers_of(model)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    hidden = _need(name, config, "hidden_size")
    heads = _need(name, config, "num_attention_heads")
    head = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = _experts_per_token(config)
    return Shape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(layers),
        largest_layer=max(counts),
        largest_parameter=max(p.numel() for p in model.parameters()),
        linear_features=_linear_features(model),
        hidden=hidden,
        heads=heads,
        # A latent vector belongs to a single head, for any number of heads.
        kv_heads=1 if getattr(config, "kv_lora_rank", None) else kv_heads,
        attention=heads * head,
        normed=_normed_width(model, (heads + kv_heads) * head),
        mlp=_mlp_width(config, hidden, experts),
        experts_per_token=experts,
        vocabulary=_need(name, config, "vocab_size"),
        cache=_cache_values(config, len(layers), kv_heads, head),
        positions=getattr(config, "max_position_embeddings", None) or 0,
    )


def _layers_of(model: Any) -> list[Any]:
    """Returns FSDP2's separately sharded modules, as in ``trainers.models``."""
    kinds = getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    # An unrepeated part, such as an embedding, is not a layer.
    names = Counter(type(module).__name__ for module in blocks)
    layers = [module for module in blocks if names[type(module).__name__] > 1]
    return layers or blocks or [model]


def _linear_features(model: Any) -> int:
    from torch import nn

    head = model.get_output_embeddings()
    return sum(
        module.in_features + module.out_features
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    )


def _normed_width(model: Any, width: int) -> int:
    names = (name.rpartition(".")[2] for name, _ in model.named_modules())
    return width if "q_norm" in names else 0


def _need(name: str, config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"The configuration of {name!r} has no {field}, which its memory follows "
            f"from; plan knows decoders with one kind of layer."
        )
    return value


def _first_of(config: Any, names: tuple[str, ...]) -> int:
    return next((v for n in names if isinstance(v := getattr(config, n, None), int)), 0)


def _experts_per_token(config: Any) -> int:
    experts = _first_of(
        config, ("num_experts", "num_local_experts", "n_routed_experts")
    )
    if experts < 2:
        return 0
    return _first_of(config, ("num_experts_per_tok", "top_k_experts", "moe_top_k")) or 1


def _mlp_width(config: Any, hidden: int, experts: int) -> int:
    """Returns the MLP width for a token; with experts, of the chosen experts."""
    dense = _first_of(config, ("intermediate_size", "ffn_dim", "n_inner"))
    if not experts:
        return dense or 4 * hidden
    width = _first_of(config, ("moe_intermediate_size",)) or dense
    shared = _first_of(config, ("shared_expert_intermediate_size",))
    shared = shared or width * _first_of(config, ("n_shared_experts",))
    return experts * width + shared


def _cache_values(config: Any, layers: int, kv_heads: int, head: int) -> int:
    """Returns the values of a token in the KV cache.

    A key and a value for each head of each layer; with multi-head latent attention
    (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) the compressed vector
    and the rotated part of the key. Layers with a recurrent state instead have no part
    in it; those with a sliding window count as if they had none.
    """
    kinds: Any = getattr(config, "layer_types", None)
    if isinstance(kinds, (list, tuple)):
        layers = sum("attention" in str(kind) for kind in kinds) - sum(
            str(kind).startswith("linear") for kind in kinds
        )
    latent = getattr(config, "kv_lora_rank", None)
    if latent:
        return int(layers * (latent + (getattr(config, "qk_rope_head_dim", 0) or 0)))
    return 2 * layers * kv_heads * head
