"""What is known of tensors before they are made: the basis of every source.

A source lists what it holds, without values, and yields the tensors when they are sent.
Tensors that are spread over ranks are gathered, and those of an exporter are made, one
after the other; nobody may hold on to one that was yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "Described",
    "Source",
    "Wanted",
    "describe",
    "make_whole",
    "module_tensors",
    "read_tensors",
    "shrink",
]

Wanted: TypeAlias = Mapping[str, torch.dtype]
"""Name in the source -> type that it is served in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """One tensor of a source, without its values."""

    dtype: torch.dtype
    """Its type."""
    shape: torch.Size
    """Its shape, of all ranks together."""
    device: torch.device = field(default=torch.device("cpu"))
    """Where it is."""
    identity: Hashable = field(default_factory=object)
    """Equal for tensors that are the same memory, such as tied weights."""
    computed: bool = False
    """It may be a buffer that is computed and not trained."""
    mesh: DeviceMesh | None = None
    """The ranks that hold it together; ``None`` if this one holds it whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Named tensors that can be sent."""

    found: dict[str, Described]
    """What there is, in the order in which it is read."""
    read: Callable[[Wanted], Iterator[tuple[str, torch.Tensor]]]
    """Yields those that are wanted, whole."""
    stable: bool
    """They exist already, and stay as they are while they are sent."""


def describe(tensor: torch.Tensor, *, computed: bool = False) -> Described:
    """Returns what is known of a tensor, without holding its values."""
    mesh = None
    dtype, shape, device = tensor.dtype, tensor.shape, tensor.device
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        tensor = tensor._local_tensor
    return Described(
        dtype=dtype,
        shape=shape,
        device=device,
        identity=_identity(tensor),
        computed=computed,
        mesh=mesh,
    )


def _identity(tensor: torch.Tensor) -> Hashable:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        # A subclass without memory of its own.
        return object()
    # As long as such a reference lives, no other storage is given the same identity.
    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return reference, tensor.storage_offset(), tensor.shape, tensor.stride()


def make_whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathers a tensor that is spread over ranks; all of them call this.

    Args:
        tensor: any tensor; one that is whole is returned as it is.
        dtype: type that it is served in. What gets smaller is cast before it travels.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: Any = shrink(tensor.detach(), dtype)
    # Shards that were moved to the host can only be gathered on their mesh's devices.
    device = tensor.device_mesh.device_type
    if part.device.type != device:
        part = part.to(device)
    whole: torch.Tensor = part.full_tensor()
    return whole


def shrink(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a floating-point tensor where that makes it smaller."""
    smaller = dtype.itemsize < tensor.dtype.itemsize
    return tensor.to(dtype) if smaller and tensor.is_floating_point() else tensor


def read_tensors(
    tensors: Mapping[str, torch.Tensor], wanted: Wanted
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields those tensors that are wanted, whole."""
    for name, tensor in tensors.items():
        if name in wanted:
            yield name, make_whole(tensor, wanted[name])


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and saved buffers of a module; tied ones under every name."""
    tensors: dict[str, torch.Tensor] = dict(
        module.named_parameters(remove_duplicate=False)
    )
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".removeprefix(".")] = buffer
    return tensors
