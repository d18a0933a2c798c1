"""Resolves a module, state dict, TensorDict, pairs or exporter into a ``Source``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import ModelMetadata
from torchrl_sglang.weight_update.sources.base import (
    Source,
    SourceCache,
    collect,
    module_tensors,
    refuse_fsdp1,
)
from torchrl_sglang.weight_update.sources.peft import has_adapters, merge_while_reading

_COLLECTED = (Mapping, Iterator, Sequence, AbstractSet, MappingView)
"""Hold their tensors, or can be read only once."""

_NO_WEIGHTS = (str, bytes, type)
"""Can be iterated over or called, and hold no weights."""

_REGISTER = "Give the model that is trained: SGLangWeightSyncScheme(engine, model)."


def find_source(weights: Any, cache: SourceCache | None = None) -> Source:
    """Resolves weights, without gathering or sending them.

    An iterator of pairs is used up; an exporter is run once to learn names and shapes,
    unless ``cache`` has them, and once for every update.
    """
    cache = cache or SourceCache()
    if isinstance(weights, LLMWrapperBase):
        kind, weights = type(weights).__name__, weights.model
        if not isinstance(weights, nn.Module):
            raise ConfigurationError(
                f"The {kind} that was given as weights is an inference wrapper around "
                f"a {type(weights).__name__}, and holds no weights itself. {_REGISTER}"
            )
    # A TensorDict of parameters is a module too, with its own names.
    if isinstance(weights, TensorDictBase):
        tensors = collect(weights.flatten_keys(".").items(), weights)
        # A module's TensorDict holds its buffers too; most are computed, not trained.
        buffers = {n for n, v in tensors.items() if not isinstance(v, nn.Parameter)}
        computed = frozenset(buffers if len(buffers) < len(tensors) else ())
        return cache.tensors(tensors, computed)
    if isinstance(weights, nn.Module):
        refuse_fsdp1(weights)
        if has_adapters(weights):
            return merge_while_reading(weights)
        return cache.tensors(collect(module_tensors(weights).items(), weights))
    if not isinstance(weights, _NO_WEIGHTS):
        if isinstance(weights, _COLLECTED):
            items: Any = weights.items() if isinstance(weights, Mapping) else weights
            return cache.tensors(collect(items, weights))
        if isinstance(weights, Iterable):
            return cache.exporter(weights, lambda: weights)
        if callable(weights):
            return cache.exporter(weights, weights)
    raise _no_weights_error(weights)


def _no_weights_error(weights: Any) -> ConfigurationError:
    kind, advice = type(weights).__name__, ""
    if isinstance(weights, RLSGLangEngine):
        advice = f" This one is the engine that they are sent to. {_REGISTER}"
    if isinstance(weights, (str, os.PathLike)):
        kind = f"{kind} {os.fspath(weights)!r}"
        advice = (
            " If PEFT has saved an adapter in this folder, give the scheme "
            "transport='lora'; otherwise load the model, and give it."
        )
    return ConfigurationError(
        f"Weights are a module, a state dict, a TensorDict, an iterable of (name, "
        f"tensor) or a function that returns one, got {kind}.{advice}"
    )


def get_model_metadata(model: Any) -> ModelMetadata:
    """Returns name -> (dtype, shape) of a model's parameters; tied ones appear once.

    Args:
        model: anything that can be sent as weights.

    Examples:
        >>> import torch
        >>> metadata = get_model_metadata(torch.nn.Linear(2, 3))
        >>> metadata["weight"]
        (torch.float32, torch.Size([3, 2]))
    """
    identities = set()
    metadata: ModelMetadata = {}
    for name, spec in find_source(model).specs.items():
        if spec.identity not in identities and not spec.computed:
            identities.add(spec.identity)
            metadata[name] = (spec.dtype, spec.shape)
    return metadata
