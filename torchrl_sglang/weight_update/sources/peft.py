"""Sources of PEFT models: whole weights with adapters merged, or an adapter alone.

PEFT merges a copy of one layer at a time, so the model does not change and no second
one exists. The weights are those that the model computes with now: a layer whose
adapters are disabled is sent without them, and a merged layer as it is.
"""

from __future__ import annotations

import copy
import math
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_sglang.backends.lora.payload import (
    check_kind,
    fits_servers,
    read_folder,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.wrapped_names import without_wrappers
from torchrl_sglang.types import ServerArgs
from torchrl_sglang.weight_update.sources.base import (
    Dtypes,
    Source,
    UserWeights,
    describe,
    gather,
    module_tensors,
    read_tensors,
    refuse_fsdp1,
    shrink,
    tensor_source,
)


def has_adapters(module: nn.Module) -> bool:
    """Returns whether PEFT has changed a module or a part of it."""
    # PEFT made such a module, so it is imported.
    return "peft" in sys.modules and any(
        isinstance(part, _adapted_types()) for part in module.modules()
    )


def _adapted_types() -> tuple[Any, ...]:
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return PeftModel, PeftMixedModel, BaseTunerLayer, AuxiliaryTrainingWrapper


def merge_while_reading(module: nn.Module) -> Source:
    """Makes a source of a model with its adapters merged, under the model's names."""
    _refuse_other_adapters(module)
    layers = dict(_adapted_layers(module))
    models = [
        f"{name}.".removeprefix(".")
        for name, part in module.named_modules()
        if isinstance(part, _adapted_types()[:2])
    ]
    tensors = {
        name: value
        for name, value in module_tensors(module).items()
        # A PEFT model holds tensors that its layers share, beside the base model.
        if not any(
            name.startswith(outer) and not name.startswith(f"{outer}base_model.model.")
            for outer in models
        )
        if _prefixes(name).isdisjoint(layers)
    }
    specs = {name: describe(name, value) for name, value in tensors.items()}
    rehearsed: set[Hashable] = set()
    for name, layer in layers.items():
        changes = _changes(layer)
        if changes and (kind := _kind(layer)) not in rehearsed:
            rehearsed.add(kind)
            _rehearse(name, layer)
        for inner, value in module_tensors(_outcome(layer)).items():
            spec = describe(f"{name}.{inner}", value)
            if changes:
                spec = replace(spec, identity=("merged", id(layer), inner))
            specs[spec.name] = spec

    def read(dtypes: Dtypes) -> Iterator[tuple[str, torch.Tensor]]:
        yield from read_tensors(tensors, dtypes)
        for name, layer in layers.items():
            yield from _read_layer(name, layer, dtypes)

    return Source(specs=specs, read=read, stable=False)


def _prefixes(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _refuse_other_adapters(module: nn.Module) -> None:
    models: Iterator[Any] = (
        part for part in module.modules() if isinstance(part, _adapted_types()[:2])
    )
    for model in models:
        for name in model.active_adapters:
            config = model.peft_config[name]
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            if config.is_prompt_learning or kind in ("ADAPTION_PROMPT", "XLORA"):
                raise ConfigurationError(
                    f"The adapter {name!r} of type {kind} is no change of weights, so "
                    f"it cannot be merged; train one that is, such as LoRA."
                )


def _adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the outermost layers that PEFT has replaced."""
    above: set[str] = set()
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _adapted_types()[2:]) and not above & _prefixes(name):
            above.add(name)
            yield name, part


def _is_wrapper(layer: nn.Module) -> bool:
    return isinstance(layer, _adapted_types()[3])


def _changes(layer: Any) -> bool:
    """Returns whether a layer computes with other weights than it holds."""
    if _is_wrapper(layer):
        adapter = getattr(layer, "token_adapter", None)
        return adapter is not None and _changes(adapter)
    return bool(layer.disable_adapters) == bool(layer.merged)


def _outcome(layer: Any) -> Any:
    """Returns the module whose names, types and shapes the merged layer has."""
    if hasattr(layer, "modules_to_save"):
        saved = layer.modules_to_save
        active = [name for name in layer.active_adapters if name in saved]
        unused = layer.disable_adapters or not active
        return layer.original_module if unused else saved[active[0]]
    return (layer.token_adapter if _is_wrapper(layer) else layer).get_base_layer()


def _kind(layer: Any) -> Hashable:
    variants = getattr(layer, "lora_variant", {})
    return (
        type(layer),
        type(_outcome(layer)),
        tuple(value.dtype for value in layer.parameters()),
        tuple((name, type(value)) for name, value in variants.items()),
    )


def _rehearse(name: str, layer: nn.Module) -> None:
    """Merges a blank copy of a layer: PEFT refuses some kinds of layers."""
    blank = {
        id(value): nn.Parameter(
            torch.zeros(value.shape, dtype=value.dtype, device=value.device),
            requires_grad=False,
        )
        for value in layer.parameters()
    }
    try:
        _merge(layer, blank)
    except Exception as error:
        raise ConfigurationError(
            f"PEFT cannot merge the adapters of layer {name} into its weights "
            f"({type(error).__name__}: {error})."
        ) from error


def _read_layer(
    name: str, layer: nn.Module, dtypes: Dtypes
) -> Iterator[tuple[str, torch.Tensor]]:
    dtypes = {
        inner: dtypes[f"{name}.{inner}"]
        for inner in module_tensors(_outcome(layer))
        if f"{name}.{inner}" in dtypes
    }
    if not dtypes:
        return
    if _changes(layer):
        merged = _merge_whole(layer)
        for inner, dtype in dtypes.items():
            # Popped, so that only the receiver holds the merged tensor.
            yield f"{name}.{inner}", shrink(merged.pop(inner), dtype)
        return
    for inner, value in read_tensors(module_tensors(_outcome(layer)), dtypes):
        yield f"{name}.{inner}", value
        del value


def _merge_whole(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the merged tensors of a layer; all ranks that hold it call this."""
    copies = {}
    for value in layer.parameters():
        gathered = gather(value, value.dtype)
        # PEFT merges in place, and gathering copies no tensor that is whole already.
        if describe("", gathered).identity == describe("", value).identity:
            gathered = gathered.clone()
        copies[id(value)] = nn.Parameter(gathered, requires_grad=False)
    module = _merge(layer, copies)
    return {name: value.detach() for name, value in module_tensors(module).items()}


@torch.no_grad()
def _merge(layer: nn.Module, parameters: dict[int, nn.Parameter]) -> Any:
    """Merges a copy of a layer with other parameters, given by the old ones' ids."""
    memo: dict[int, Any] = dict(parameters)
    memo.update({id(value): value for value in layer.buffers()})
    for part in layer.modules():
        # Hooks can hold anything.
        for name, value in vars(part).items():
            if name.startswith(("_forward", "_backward")) and "_hooks" in name:
                memo[id(value)] = OrderedDict()
    layer_copy: Any = copy.deepcopy(layer, memo)
    for part in layer_copy.modules():
        if hasattr(part, "merged_adapters"):
            # Some kinds of layers share one list.
            part.merged_adapters = list(part.merged_adapters)
    if _is_wrapper(layer_copy):
        layer_copy = layer_copy.token_adapter
    if layer_copy.disable_adapters:
        layer_copy.unmerge()
    elif hasattr(layer_copy, "unload_and_optionally_merge_module"):
        return layer_copy.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    else:
        layer_copy.merge()
    return layer_copy.get_base_layer()


def _adapter_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Returns an adapter's tensors under the names that PEFT saves them by.

    PEFT's own function finds none in layers that are wrapped.
    """
    adapter = re.compile(rf"(\.lora_[^.]+)\.{re.escape(name)}(?=\.|$)")
    tensors: dict[str, torch.Tensor] = {}
    for path, value in model.named_parameters(remove_duplicate=False):
        saved_name, count = adapter.subn(r"\1", without_wrappers(path))
        if count:
            tensors[saved_name] = value
    return tensors


def _more_than_adapter(model: Any, name: str) -> str | None:
    """Returns why a model computes something else than its base with an adapter."""
    for other, config in model.peft_config.items():
        try:
            # An adapter that is not active may have changed the base weights, too.
            initial = {"init_lora_weights": getattr(config, "init_lora_weights", True)}
            check_kind(_to_json(config.to_dict()) if other == name else initial)
        except ConfigurationError as error:
            return str(error)
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in path:
            return f"The model trains {without_wrappers(path)} beside the adapter."
    rslora = bool(getattr(model.peft_config[name], "use_rslora", False))
    for path, layer in _adapted_layers(model):
        problem = _layer_problem(layer, name, rslora=rslora)
        if problem is not None:
            return f"The layer {without_wrappers(path)} {problem}."
    return None


def _layer_problem(layer: Any, name: str, *, rslora: bool) -> str | None:
    """Returns how a layer differs from its base layer with an adapter over it."""
    if _is_wrapper(layer):
        unused = layer.disable_adapters or name not in layer.active_adapters
        return None if unused else "is trained whole"
    adapters = {
        key for kind in layer.adapter_layer_names for key in getattr(layer, kind)
    }
    active = [key for key in layer.active_adapters if key in adapters]
    problem = None
    if not {*layer.merged_adapters} <= {name}:
        problem = f"has the adapters {layer.merged_adapters} merged into its weights"
    elif active != [name] * (name in adapters):
        problem = f"computes with the adapters {active}, not with {name!r} alone"
    elif active and layer.disable_adapters:
        problem = "has its adapters disabled"
    elif active:
        rank, scaling = layer.r[name], layer.scaling[name]
        scale = layer.lora_alpha[name] / (math.sqrt(rank) if rslora else rank)
        if not math.isclose(scaling, scale):
            problem = f"scales the adapter by {scaling:g} instead of {scale:g}"
    return problem


def adapter_source(weights: UserWeights) -> Source:
    """Resolves the active adapter of a PEFT model, or a folder that PEFT has saved.

    Raises:
        ConfigurationError: if the model is not its base with that adapter over it.
    """
    if not isinstance(weights.value, (str, os.PathLike)):
        tensors, config = _active_adapter(weights)
    else:
        tensors, config = read_folder(weights.value)
        check_kind(config)
    return replace(tensor_source(tensors), adapter=config)


def _active_adapter(
    weights: UserWeights,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors and the configuration of a model's active adapter."""
    model = weights.peft_model
    if model is None:
        raise ConfigurationError(
            f"A {type(weights.value).__name__} has no LoRA adapter; give a model that "
            f"peft.get_peft_model() has made."
        )
    names = model.active_adapters
    if len(names) != 1:
        raise ConfigurationError(
            f"The model has {len(names)} active adapters, {names}; select the one to "
            f"send with model.set_adapter(name)."
        )
    problem = _more_than_adapter(model, names[0])
    if problem is not None:
        raise ConfigurationError(
            f"The adapter {names[0]!r} alone is not what the model computes with, so "
            f"nothing was sent. {problem} transport='auto' merges the adapter and "
            f"sends whole weights."
        )
    # Embeddings that the adapter changes are the base model's own, and served already.
    config = model.peft_config[names[0]].to_dict()
    return _adapter_tensors(model, names[0]), _to_json(config)


def trained_adapter(weights: UserWeights) -> Source | None:
    """Resolves the adapter of a model that trains nothing else, whole on this rank."""
    if weights.peft_model is None:
        return None
    try:
        source = adapter_source(weights)
    except ConfigurationError:
        return None
    refuse_fsdp1(weights.value)
    if any(isinstance(v, DTensor) for v in module_tensors(weights.peft_model).values()):
        # All of its ranks must decide alike, and only one sees the servers.
        return None
    identities = {spec.identity for spec in source.specs.values()}
    trained = (v for v in weights.peft_model.parameters() if v.requires_grad)
    alone = all(describe("", value).identity in identities for value in trained)
    return source if alone else None


def adapter_fits(source: Source, args: ServerArgs) -> bool:
    """Returns whether servers with these arguments take an adapter."""
    assert source.adapter is not None
    paths = (name.partition(".lora_")[0] for name in source.specs)
    modules = frozenset(path.rpartition(".")[2] for path in paths)
    return fits_servers(source.adapter, modules, args)


def _to_json(value: Any) -> Any:
    """Converts PEFT's configuration to the values of its JSON file."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_to_json(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    inner = getattr(value, "value", value)
    return inner if isinstance(inner, (str, int, float, type(None))) else str(inner)
