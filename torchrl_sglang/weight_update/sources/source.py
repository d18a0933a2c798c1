"""What the caller calls weights to tensors under served names, checked before they go.

A module, a state dict, a TensorDict, pairs of (name, tensor) or something that exports
such pairs: each becomes a :class:`~.tensors.Source`. ``names.py`` says what is sent of
it, and the result is what a transport reads.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.types import FusedParameter, ModelMetadata
from torchrl_sglang.weight_update.buckets import TensorSpec
from torchrl_sglang.weight_update.sources.names import Target, plan_names
from torchrl_sglang.weight_update.sources.peft import has_adapters, merge_while_reading
from torchrl_sglang.weight_update.sources.tensors import (
    Described,
    Source,
    Wanted,
    describe,
    make_whole,
    module_tensors,
    read_tensors,
)
from torchrl_sglang.weight_update.sources.weights import Weights

__all__ = [
    "Remembered",
    "check_metadata",
    "find_source",
    "get_model_metadata",
    "open_weights",
]


_HELD = (Mapping, Iterator, Sequence, AbstractSet, MappingView)
"""What is collected: it holds its tensors, or can be read only once."""

_NEITHER = (str, bytes, type)
"""What can be iterated over or called, and is no weights."""


@dataclass(kw_only=True, slots=True)
class Remembered:
    """The exporter that was read last, and what it yielded."""

    exporter: Any = None
    """What was given as weights."""
    found: dict[str, Described] | None = None
    """What it yielded; ``None`` if it has to be asked again."""

    def forget(self) -> None:
        """Has the next update ask the exporter again."""
        self.exporter, self.found = None, None


def open_weights(
    weights: Any,
    served: ModelMetadata,
    fused: Mapping[str, FusedParameter] | None = None,
) -> Weights:
    """Returns what an update sends, checked against the served model.

    Args:
        weights: a source, or what :func:`find_source` takes.
        served: name -> (dtype, shape) of every parameter of the served model.
        fused: name in the module -> what the loader takes of it, where they differ.

    Raises:
        WeightMismatchError: see :func:`.plan_names`.
        ConfigurationError: see :func:`find_source`, or if the weights are on a device
            that nothing is sent from.
    """
    source = weights if isinstance(weights, Source) else find_source(weights)
    plan = plan_names(source.found, served, fused)
    for name, tensor in source.found.items():
        if name in plan and tensor.device.type not in ("cuda", "cpu"):
            raise ConfigurationError(
                f"The weight {name} is on {tensor.device}; weights are sent from "
                f"'cuda' or 'cpu'."
                + (" A tensor there has no values." * (tensor.device.type == "meta"))
            )
    targets = [target for part in plan.values() for target in part]
    return Weights(
        specs=tuple(
            TensorSpec(name=target.name, dtype=target.dtype, shape=target.shape)
            for target in targets
        ),
        read=lambda: _read(source, plan),
        device=_main_device(source.found[name] for name in plan),
        stable=source.stable,
    )


def _main_device(tensors: Iterable[Described]) -> torch.device:
    """Returns where most bytes are to be sent from."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.device
        if tensor.mesh is not None and tensor.mesh.device_type != device.type:
            # Shards on the host that are gathered on their mesh's devices.
            index = torch.cuda.current_device()
            device = torch.device(tensor.mesh.device_type, index)
        size = tensor.shape.numel() * tensor.dtype.itemsize
        sizes[device] = sizes.get(device, 0) + size
    return max(sizes, key=lambda device: sizes[device])


def _read(
    source: Source, plan: Mapping[str, tuple[Target, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    # Nothing here may hold a tensor while the next one is made.
    wanted = {name: targets[0].dtype for name, targets in plan.items()}
    for name, tensor in source.read(wanted):
        for target in plan[name]:
            yield target.name, _take(tensor, target)
        del tensor


def _take(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    part = target.part
    if part is None:
        return tensor
    # A part is described as it lies in contiguous memory; this is a view where it is.
    whole = tensor.contiguous()
    offset = whole.storage_offset() + part.offset
    return whole.as_strided(part.shape, part.stride, offset)


def find_source(weights: Any, remembered: Remembered | None = None) -> Source:
    """Returns what there is to send, without sending or gathering it.

    Args:
        weights: one of

            - an :class:`~torch.nn.Module`, or a wrapper of TorchRL around one. Its
              tensors may be DTensors; adapters of PEFT are merged as they are sent;
            - a mapping, or a flat or nested :class:`~tensordict.TensorDict`;
            - a sequence or an iterator of (name, tensor). An iterator is used up, and
              all of its tensors exist at once;
            - an exporter: a function without arguments that returns such an iterator,
              or an object that gives a new one whenever it is iterated over. It is run
              through once to learn names and shapes, and then once for every update,
              with one bucket of its tensors alive at a time.
        remembered: what a sender knows of an exporter from its last update.

    Raises:
        ConfigurationError: if it is none of these, or holds no tensor.
    """
    if isinstance(weights, LLMWrapperBase):
        kind, weights = type(weights).__name__, weights.model
        if not isinstance(weights, nn.Module):
            raise ConfigurationError(
                f"The {kind} that was given as weights is an inference wrapper around "
                f"a {type(weights).__name__}, and holds no weights itself. Register "
                f"the model that is trained with sender.register_model(model)."
            )
    # A TensorDict of parameters is a module, too, with names of its own.
    if isinstance(weights, TensorDictBase):
        return _from_tensordict(weights)
    if isinstance(weights, nn.Module):
        return _from_module(weights)
    if isinstance(weights, _HELD) and not isinstance(weights, _NEITHER):
        items: Any = weights.items() if isinstance(weights, Mapping) else weights
        return _from_tensors(_collect(items, weights))
    if isinstance(weights, Iterable) and not isinstance(weights, _NEITHER):
        return _from_exporter(weights, lambda: weights, remembered)
    if callable(weights) and not isinstance(weights, _NEITHER):
        return _from_exporter(weights, weights, remembered)
    if isinstance(weights, RLSGLangEngine):
        raise ConfigurationError(
            f"The {type(weights).__name__} that was given as weights is the engine "
            f"that they are sent to. Register the model that is trained with "
            f"sender.register_model(model)."
        )
    if isinstance(weights, (str, os.PathLike)):
        raise ConfigurationError(
            f"Weights are no path, got {type(weights).__name__} "
            f"{os.fspath(weights)!r}. If PEFT has saved an adapter in this folder, "
            f"give the scheme transport='lora'; otherwise load the model, and give it."
        )
    raise ConfigurationError(
        f"Weights are a module, a state dict, a TensorDict, an iterable of (name, "
        f"tensor) or a function that returns one, got {type(weights).__name__}."
    )


def _from_module(module: nn.Module) -> Source:
    for part in module.modules():
        if isinstance(part, FullyShardedDataParallel):
            raise ConfigurationError(
                "FullyShardedDataParallel (FSDP1) keeps parameters in flat pieces that "
                "cannot be gathered one by one; shard the model with "
                "torch.distributed.fsdp.fully_shard (FSDP2)."
            )
    if has_adapters(module):
        return merge_while_reading(module)
    tensors = module_tensors(module)
    if not tensors:
        raise _nothing(module)
    return _from_tensors(tensors)


def _from_tensordict(weights: TensorDictBase) -> Source:
    tensors = _collect(weights.flatten_keys(".").items(), weights)
    # That of a module holds its buffers too, of which most are computed, not trained.
    trained = any(isinstance(value, nn.Parameter) for value in tensors.values())
    computed = {
        name
        for name, value in tensors.items()
        if trained and not isinstance(value, nn.Parameter)
    }
    return _from_tensors(tensors, computed)


def _from_tensors(
    tensors: Mapping[str, torch.Tensor], computed: AbstractSet[str] = frozenset()
) -> Source:
    found = {
        name: describe(value, computed=name in computed)
        for name, value in tensors.items()
    }
    return Source(
        found=found,
        read=lambda wanted: read_tensors(tensors, wanted),
        stable=all(value.mesh is None for value in found.values()),
    )


def _from_exporter(
    exporter: Any, export: Callable[[], Any], remembered: Remembered | None
) -> Source:
    remembered = remembered or Remembered()
    found = remembered.found
    if found is None or not _is_same(exporter, remembered.exporter):
        found = {}
        for name, tensor in _pairs(export, exporter):
            found[name] = describe(tensor)
            del tensor
        if not found:
            raise _nothing(exporter)
        remembered.exporter, remembered.found = exporter, found
    known = found

    def read(wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _pairs(export, exporter):
            _check_announced(name, tensor, known)
            if name in wanted:
                yield name, make_whole(tensor, wanted[name])
            del tensor

    return Source(found=known, read=read, stable=False)


def _is_same(exporter: Any, other: Any) -> bool:
    # A bound method is another object every time it is asked for.
    return exporter is other or (inspect.ismethod(exporter) and exporter == other)


def _check_announced(
    name: str, tensor: torch.Tensor, found: Mapping[str, Described]
) -> None:
    known = found.get(name)
    if (
        known is None
        or known.shape != tensor.shape
        or known.dtype.is_floating_point != tensor.dtype.is_floating_point
    ):
        before = None if known is None else (known.dtype, tuple(known.shape))
        raise WeightMismatchError(
            f"The exporter of the weights yields {name} of {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, and yielded {before or 'no such tensor'} before."
        )


def _pairs(export: Callable[[], Any], given: Any) -> Iterator[tuple[str, torch.Tensor]]:
    items = export()
    if isinstance(items, Mapping):
        items = items.items()
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
        raise ConfigurationError(
            f"A function that exports weights returns an iterator of (name, tensor), "
            f"{given!r} returned a {type(items).__name__}."
        )
    seen = set()
    iterator, end = iter(items), object()
    while True:
        # Around each step by itself: a generator that is paused leaves no mode behind.
        with torch.no_grad():
            item = next(iterator, end)
        if item is end:
            return
        name, value = _check_pair(item)
        del item
        if name in seen:
            raise ConfigurationError(f"The weights hold {name!r} twice.")
        seen.add(name)
        yield name, value
        del value


def _check_pair(item: Any) -> tuple[str, torch.Tensor]:
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        raise ConfigurationError(
            f"An iterable of weights yields (name, tensor), got a "
            f"{type(item).__name__}; model.parameters() has no names, "
            f"model.named_parameters() has."
        )
    name, value = item
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"The weight {name!r} is a {type(value).__name__}, not a tensor."
        )
    return name, value


def _collect(items: Iterable[Any], given: Any) -> dict[str, torch.Tensor]:
    tensors = dict(_pairs(lambda: items, given))
    if not tensors:
        raise _nothing(given)
    return tensors


def _nothing(given: Any) -> ConfigurationError:
    return ConfigurationError(
        f"The {type(given).__name__} that was given as weights has no parameter. "
        f"Is it the inference wrapper? Register the model that is trained."
    )


def get_model_metadata(model: Any) -> ModelMetadata:
    """Returns name -> (dtype, shape) of a model's parameters; tied ones appear once.

    Args:
        model: anything that can be sent as weights.

    Examples:
        >>> metadata = get_model_metadata(torch.nn.Linear(2, 3))
        >>> metadata["weight"]
        (torch.float32, torch.Size([3, 2]))
    """
    seen = set()
    metadata: ModelMetadata = {}
    for name, tensor in find_source(model).found.items():
        if tensor.identity not in seen and not tensor.computed:
            seen.add(tensor.identity)
            metadata[name] = (tensor.dtype, tensor.shape)
    return metadata


def check_metadata(
    metadata: ModelMetadata,
    served: ModelMetadata,
    fused: Mapping[str, FusedParameter] | None = None,
) -> None:
    """Checks names and shapes of weights before there are any.

    Raises:
        WeightMismatchError: see :func:`.plan_names`.
    """
    found = {
        name: Described(dtype=dtype, shape=torch.Size(shape))
        for name, (dtype, shape) in metadata.items()
    }
    plan_names(found, served, fused)
