"""``Source``: named tensors described now and read lazily.

Sharded tensors are gathered, and exported ones made, one after the other, so nothing
may hold a tensor after it was yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchrl_sglang.weight_update.weights import TensorSpec

Wanted: TypeAlias = Mapping[str, torch.dtype]
"""Name in the source -> served type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Named tensors that can be sent, under the caller's names."""

    specs: dict[str, TensorSpec]
    """Name -> description, in the order in which tensors are read."""
    read: Callable[[Wanted], Iterator[tuple[str, torch.Tensor]]]
    """Yields the wanted tensors, gathered."""
    stable: bool
    """The tensors exist already, and stay as they are while they are sent."""
    adapter: Mapping[str, Any] | None = None
    """PEFT's configuration where the tensors are a LoRA adapter."""
    peers: Any = None
    """The ranks that hold the tensors together (:class:`.Peers`); None for one."""


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
    whole: torch.Tensor = shard.full_tensor()
    return whole


def shrink(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a floating-point tensor where that makes it smaller."""
    smaller = dtype.itemsize < tensor.dtype.itemsize
    return tensor.to(dtype) if smaller and tensor.is_floating_point() else tensor


def read_tensors(
    tensors: Mapping[str, torch.Tensor], wanted: Wanted
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the wanted tensors, gathered."""
    for name, tensor in tensors.items():
        if name in wanted:
            yield name, gather(tensor, wanted[name])


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
        read=lambda wanted: read_tensors(tensors, wanted),
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
