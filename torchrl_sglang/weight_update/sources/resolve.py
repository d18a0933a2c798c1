"""Resolves a module, state dict, TensorDict, pairs or exporter into a ``Source``.

:func:`open_weights` validates it against the served model for a transport to send.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.types import FusedParameter, ModelMetadata
from torchrl_sglang.weight_update.sources.base import (
    Source,
    Wanted,
    describe,
    gather,
    module_tensors,
    tensor_source,
)
from torchrl_sglang.weight_update.sources.peft import has_adapters, merge_while_reading
from torchrl_sglang.weight_update.sources.served import plan_names
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

_COLLECTED = (Mapping, Iterator, Sequence, AbstractSet, MappingView)
"""Hold their tensors, or can be read only once."""

_NO_WEIGHTS = (str, bytes, type)
"""Can be iterated over or called, and hold no weights."""

_REGISTER = "Give the model that is trained: SGLangWeightSyncScheme(engine, model)."


def open_weights(
    weights: Any,
    served: ModelMetadata,
    fused: Mapping[str, FusedParameter] | None = None,
) -> Weights:
    """Validates weights, or their source, against the served model."""
    source = weights if isinstance(weights, Source) else find_source(weights)
    plan: Mapping[str, tuple[TensorSpec, ...]]
    plan = {name: (spec,) for name, spec in source.specs.items()}
    if source.adapter is None:
        plan = plan_names(source.specs, served, fused)
        for spec in (source.specs[name] for name in plan):
            if spec.device.type not in ("cuda", "cpu"):
                raise ConfigurationError(
                    f"The weight {spec.name} is on {spec.device}; weights are sent "
                    f"from 'cuda' or 'cpu'."
                    + (" A tensor there has no values." * (spec.device.type == "meta"))
                )
            if spec.layout != torch.strided:
                raise ConfigurationError(
                    f"The weight {spec.name} is {spec.layout}; weights are sent as "
                    f"{torch.strided}: give its to_dense()."
                )

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        # Nothing here may hold a tensor while the next one is made.
        wanted = {name: parts[0].dtype for name, parts in plan.items()}
        for name, tensor in source.read(wanted):
            for spec in plan[name]:
                yield spec.name, _take(tensor, spec)
            del tensor

    return Weights(
        specs=tuple(spec for parts in plan.values() for spec in parts),
        read=read,
        device=_main_device(source.specs[name] for name in plan),
        stable=source.stable,
        adapter=source.adapter,
        peers=source.peers and source.peers.serving(served, fused),
    )


def _main_device(specs: Iterable[TensorSpec]) -> torch.device:
    """Returns the device that most bytes are sent from."""
    sizes: Counter[torch.device] = Counter()
    for spec in specs:
        device = spec.device
        if spec.mesh is not None and spec.mesh.device_type != device.type:
            # Shards on the host are gathered on their mesh's devices.
            index = torch.cuda.current_device()
            device = torch.device(spec.mesh.device_type, index)
        sizes[device] += spec.num_bytes
    return max(sizes, key=lambda device: sizes[device], default=torch.device("cpu"))


def _take(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.part is None:
        return tensor
    # A part is described in contiguous memory; this is a view where the tensor is.
    whole = tensor.contiguous()
    offset = whole.storage_offset() + spec.part.offset
    return whole.as_strided(spec.part.shape, spec.part.stride, offset)


def find_source(weights: Any, cache: ExporterCache | None = None) -> Source:
    """Resolves weights, without gathering or sending them.

    An iterator of pairs is used up; an exporter is run once to learn names and shapes,
    unless ``cache`` has them, and once for every update.
    """
    if isinstance(weights, LLMWrapperBase):
        kind, weights = type(weights).__name__, weights.model
        if not isinstance(weights, nn.Module):
            raise ConfigurationError(
                f"The {kind} that was given as weights is an inference wrapper around "
                f"a {type(weights).__name__}, and holds no weights itself. {_REGISTER}"
            )
    # A TensorDict of parameters is a module too, with its own names.
    if isinstance(weights, TensorDictBase):
        tensors = _collect(weights.flatten_keys(".").items(), weights)
        # A module's TensorDict holds its buffers too; most are computed, not trained.
        buffers = {n for n, v in tensors.items() if not isinstance(v, nn.Parameter)}
        computed = frozenset(buffers if len(buffers) < len(tensors) else ())
        return tensor_source(tensors, computed)
    if isinstance(weights, nn.Module):
        refuse_fsdp1(weights)
        if has_adapters(weights):
            return merge_while_reading(weights)
        return tensor_source(_collect(module_tensors(weights).items(), weights))
    if not isinstance(weights, _NO_WEIGHTS):
        cache = cache or ExporterCache()
        if isinstance(weights, _COLLECTED):
            items: Any = weights.items() if isinstance(weights, Mapping) else weights
            return tensor_source(_collect(items, weights))
        if isinstance(weights, Iterable):
            return cache.source(weights, lambda: weights)
        if callable(weights):
            return cache.source(weights, weights)
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


def refuse_fsdp1(module: nn.Module) -> None:
    """Raises :class:`ConfigurationError` for a model that FSDP1 has flattened."""
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ConfigurationError(
            "FullyShardedDataParallel (FSDP1) keeps parameters in flat pieces that "
            "cannot be gathered one by one; shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)."
        )


def _collect(items: Iterable[Any], given: Any) -> dict[str, torch.Tensor]:
    tensors = dict(read_pairs(lambda: items, given))
    if not tensors:
        raise empty_error(given)
    return tensors


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
    for name, spec in find_source(model).specs.items():
        if spec.identity not in seen and not spec.computed:
            seen.add(spec.identity)
            metadata[name] = (spec.dtype, spec.shape)
    return metadata


class ExporterCache:
    """Keeps what the last exporter yielded, so that it need not be run again to ask."""

    def __init__(self) -> None:
        self._exporter: Any = None
        self._specs: dict[str, TensorSpec] = {}

    def forget(self) -> None:
        """Makes the next update run the exporter once more."""
        self._exporter, self._specs = None, {}

    def source(self, exporter: Any, export: Callable[[], Any]) -> Source:
        """Makes a source of an exporter, running it where it is a new one."""
        # A bound method is another object every time it is looked up.
        equal = inspect.ismethod(exporter) and exporter == self._exporter
        if not self._specs or not (equal or exporter is self._exporter):
            specs: dict[str, TensorSpec] = {}
            for name, tensor in read_pairs(export, exporter):
                specs[name] = describe(name, tensor)
                del tensor
            if not specs:
                raise empty_error(exporter)
            self._exporter, self._specs = exporter, specs
        specs = self._specs

        def read(wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in read_pairs(export, exporter):
                _check_announced(tensor, name, specs.get(name))
                if name in wanted:
                    yield name, gather(tensor, wanted[name])
                del tensor

        return Source(specs=specs, read=read, stable=False)


def _check_announced(tensor: torch.Tensor, name: str, known: TensorSpec | None) -> None:
    integer = not tensor.dtype.is_floating_point
    before = known and (known.dtype, tuple(known.shape))
    if (
        known is None
        or known.shape != tensor.shape
        or known.dtype.is_floating_point == integer
    ):
        raise WeightMismatchError(
            f"The exporter of the weights yields {name} of {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, and yielded {before or 'no such tensor'} before."
        )


def read_pairs(
    export: Callable[[], Any], given: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the (name, tensor) pairs of an export, validated, holding none of them."""
    items = export()
    if isinstance(items, Mapping):
        items = items.items()
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
        raise ConfigurationError(
            f"A function that exports weights must return an iterator of (name, "
            f"tensor); {given!r} returned a {type(items).__name__}."
        )
    seen = set()
    iterator, end = iter(items), object()
    while True:
        # For each step alone: a suspended generator must leave no grad mode behind.
        with torch.no_grad():
            item = next(iterator, end)
        if item is end:
            return
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise ConfigurationError(
                f"An iterable of weights must yield (name, tensor), got a "
                f"{type(item).__name__}; model.parameters() has no names, "
                f"model.named_parameters() has."
            )
        name, value = item
        del item
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"The weight {name!r} is a {type(value).__name__}, not a tensor."
            )
        if name in seen:
            raise ConfigurationError(f"The weights hold {name!r} twice.")
        seen.add(name)
        yield name, value
        del value


def empty_error(given: Any) -> ConfigurationError:
    """Makes the error for weights without a tensor."""
    return ConfigurationError(
        f"The {type(given).__name__} that was given as weights has no parameter. "
        f"Is it the inference wrapper? Register the model that is trained."
    )
