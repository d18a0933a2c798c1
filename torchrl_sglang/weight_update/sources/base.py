"""``Source``: named tensors described now and read lazily.

Sharded tensors are gathered, and exported tensors made, one after the other, so nothing
may hold a tensor after it was yielded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.weight_update.weights import TensorSpec

Dtypes: TypeAlias = Mapping[str, torch.dtype]
"""Name in the source -> served type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserWeights:
    """The caller's weights, and the modules in them.

    Wrappers are opened here and nowhere else.
    """

    value: Any = None
    """A module, a state dict, pairs, an exporter, or a folder."""
    innermost: nn.Module | None = None
    """The module inside all wrappers; ``None`` without a module."""
    peft_model: Any = None
    """The PEFT model that is, or is wrapped in, the module; or ``None``."""
    is_copy: bool = False
    """Whether this is another rank than 0 of DistributedDataParallel."""


def unwrap(weights: Any) -> UserWeights:
    """Finds the modules in weights, from the outside in."""
    module, innermost, peft_model, is_copy = weights, None, None, False
    while isinstance(module, nn.Module):
        innermost = module
        if peft_model is None and _is_peft_model(module):
            peft_model = module
        if isinstance(module, DistributedDataParallel):
            is_copy = is_copy or dist.get_rank(module.process_group) != 0
        if isinstance(module, LLMWrapperBase):
            module = module.model
        else:
            # DDP, and torch.compile.
            module = getattr(module, "module", getattr(module, "_orig_mod", None))
    return UserWeights(
        value=weights, innermost=innermost, peft_model=peft_model, is_copy=is_copy
    )


def _is_peft_model(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and any(
        kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Named tensors that can be sent, under the caller's names."""

    specs: dict[str, TensorSpec]
    """Name -> description, in the order in which tensors are read."""
    read: Callable[[Dtypes], Iterator[tuple[str, torch.Tensor]]]
    """Yields the tensors with these names, gathered."""
    stable: bool
    """The tensors exist already, and stay as they are while they are sent."""
    adapter: Mapping[str, Any] | None = None
    """PEFT's configuration where the tensors are a LoRA adapter."""
    origin: UserWeights = UserWeights()
    """The caller's weights."""
    ranks: Any = None
    """The ranks that hold the tensors together (:class:`.Ranks`); ``None``: this rank
    holds them whole."""
    memory: object = None
    """The same object for sources whose tensors are in the same memory, contiguous;
    ``None``: unknown."""


def describe(name: str, tensor: torch.Tensor, *, computed: bool = False) -> TensorSpec:
    """Describes a tensor, without holding its values."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    identity: Hashable
    try:
        # While such a reference lives, no other storage gets the same identity.
        reference = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
        identity = reference, local.storage_offset(), local.shape, local.stride()
    except (RuntimeError, TypeError):
        # A subclass without its own memory, or that refuses the operation.
        identity = object()
    return TensorSpec(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        device=tensor.device,
        layout=local.layout,
        identity=identity,
        computed=computed,
        mesh=tensor.device_mesh if isinstance(tensor, DTensor) else None,
    )


def gather(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathers a DTensor, cast first where that is smaller; all its ranks call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shard: Any = shrink(tensor.detach(), dtype)
    # Shards that were offloaded to the host are gathered on their mesh's devices.
    device = tensor.device_mesh.device_type
    if shard.device.type != device:
        shard = shard.to(device)
    full: torch.Tensor = shard.full_tensor()
    return full


def shrink(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a floating-point tensor where that makes it smaller."""
    smaller = dtype.itemsize < tensor.dtype.itemsize
    return tensor.to(dtype) if smaller and tensor.is_floating_point() else tensor


def read_tensors(
    tensors: Mapping[str, torch.Tensor], dtypes: Dtypes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that ``dtypes`` names, gathered."""
    for name, tensor in tensors.items():
        if name in dtypes:
            yield name, gather(tensor, dtypes[name])


def tensor_source(
    tensors: Mapping[str, torch.Tensor], computed: frozenset[str] = frozenset()
) -> Source:
    """Makes a source of tensors that exist."""
    specs = {
        name: describe(name, value, computed=name in computed)
        for name, value in tensors.items()
    }
    return Source(
        specs=specs,
        read=lambda dtypes: read_tensors(tensors, dtypes),
        stable=all(spec.mesh is None for spec in specs.values()),
    )


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Collects parameters and saved buffers of a module; tied ones under every name."""
    tensors: dict[str, torch.Tensor] = dict(
        module.named_parameters(remove_duplicate=False)
    )
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".removeprefix(".")] = buffer
    return tensors


def refuse_fsdp1(module: nn.Module) -> None:
    """Raises :class:`ConfigurationError` for a model that FSDP1 has flattened."""
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ConfigurationError(
            "FullyShardedDataParallel (FSDP1) keeps parameters in flat pieces that "
            "cannot be gathered one by one; shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)."
        )


def collect(items: Iterable[Any], owner: Any) -> dict[str, torch.Tensor]:
    """Collects the (name, tensor) pairs of ``owner``, which has some."""
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for item in items:
            name, value = _check_pair(item, tensors)
            tensors[name] = value
    if not tensors:
        raise _empty_error(owner)
    return tensors


class SourceCache:
    """Descriptions of the latest tensors, which hold none of them.

    Those of an exporter, so that it is not run to get them, and those of tensors that
    stay in their memory, which are thousands in a mixture of experts.
    """

    def __init__(self) -> None:
        self._exporter: Any = None
        self._specs: dict[str, TensorSpec] = {}
        self._memory: tuple[Any, ...] | None = None
        self._described: dict[str, TensorSpec] = {}
        self.plan: Any = None
        """What :func:`.open_weights` made of the latest tensors."""

    def forget(self) -> None:
        """Makes the next update run the exporter once more."""
        self._exporter, self._specs = None, {}

    def tensors(
        self,
        tensors: Mapping[str, torch.Tensor],
        computed: frozenset[str] = frozenset(),
    ) -> Source:
        """Makes a source of tensors that exist."""
        memory = _memory_of(tensors, computed)
        if memory is None:
            return tensor_source(tensors, computed)
        if memory != self._memory:
            self._described = tensor_source(tensors, computed).specs
            self._memory = memory
        return Source(
            specs=self._described,
            read=lambda dtypes: read_tensors(tensors, dtypes),
            stable=True,
            memory=self._described,
        )

    def exporter(self, exporter: Any, export: Callable[[], Any]) -> Source:
        """Makes a source of an exporter, running it where it is a new one."""
        # A bound method is another object every time it is looked up.
        equal = inspect.ismethod(exporter) and exporter == self._exporter
        if not self._specs or not (equal or exporter is self._exporter):
            specs: dict[str, TensorSpec] = {}
            for name, tensor in read_pairs(export, exporter):
                specs[name] = describe(name, tensor)
                del tensor
            if not specs:
                raise _empty_error(exporter)
            self._exporter, self._specs = exporter, specs
        specs = self._specs

        def read(dtypes: Dtypes) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in read_pairs(export, exporter):
                _check_announced(tensor, name, specs.get(name))
                if name in dtypes:
                    yield name, gather(tensor, dtypes[name])
                del tensor

        return Source(specs=specs, read=read, stable=False)


def _memory_of(
    tensors: Mapping[str, torch.Tensor], computed: frozenset[str]
) -> tuple[Any, ...] | None:
    """Returns a key of the tensors' memory, if each is whole and contiguous in it."""
    values = tensors.values()
    try:
        if any(isinstance(v, DTensor) or not v.is_contiguous() for v in values):
            return None
        facts = [(v.data_ptr(), v.shape, v.dtype) for v in values]
    except (RuntimeError, TypeError):
        # A subclass without its own memory, or that refuses the operation.
        return None
    return list(tensors), computed, facts


def _check_announced(tensor: torch.Tensor, name: str, spec: TensorSpec | None) -> None:
    integer = not tensor.dtype.is_floating_point
    if (
        spec is None
        or spec.shape != tensor.shape
        or spec.dtype.is_floating_point == integer
    ):
        announced = "no such tensor" if spec is None else (spec.dtype, (*spec.shape,))
        raise WeightMismatchError(
            f"The exporter of the weights yields {name} of {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, and yielded {announced} before."
        )


def read_pairs(
    export: Callable[[], Any], owner: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the (name, tensor) pairs of an export, validated, holding none of them."""
    items = export()
    if isinstance(items, Mapping):
        items = items.items()
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
        raise ConfigurationError(
            f"A function that exports weights must return an iterator of (name, "
            f"tensor); {owner!r} returned a {type(items).__name__}."
        )
    names: set[str] = set()
    iterator, end = iter(items), object()
    while True:
        # For each step alone: a suspended generator must leave no grad mode behind.
        with torch.no_grad():
            item = next(iterator, end)
        if item is end:
            return
        name, value = _check_pair(item, names)
        del item
        names.add(name)
        yield name, value
        del value


def _check_pair(item: Any, names: Container[str]) -> tuple[str, torch.Tensor]:
    """Checks an item of weights, of which there are some names."""
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        raise ConfigurationError(
            f"An iterable of weights must yield (name, tensor), got a "
            f"{type(item).__name__}; model.parameters() has no names, "
            f"model.named_parameters() has."
        )
    name, value = item
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"The weight {name!r} is a {type(value).__name__}, not a tensor."
        )
    if name in names:
        raise ConfigurationError(f"The weights hold {name!r} twice.")
    return name, value


def _empty_error(weights: Any) -> ConfigurationError:
    """Makes the error for weights without a tensor."""
    return ConfigurationError(
        f"The {type(weights).__name__} that was given as weights has no parameter. "
        f"Is it the inference wrapper? Register the model that is trained."
    )
