"""The tensors of one update: what a source resolves to and a transport sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrl_sglang.types import ModelMetadata, TensorPart

__all__ = ["NamedTensors", "TensorSpec", "Weights", "specs_of"]

NamedTensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Describes one tensor without its values, in a source and on a server."""

    name: str
    """Name in the source; in :class:`Weights`, the one that servers take."""
    dtype: torch.dtype
    """Its type; in :class:`Weights`, the served one."""
    shape: torch.Size
    """Over all ranks together."""
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    """Where the source holds it."""
    identity: Hashable = field(default_factory=object, compare=False)
    """Equal for tensors that share memory, such as tied weights."""
    computed: bool = field(default=False, compare=False)
    """It may be a buffer that is computed, not trained."""
    mesh: DeviceMesh | None = field(default=None, compare=False)
    """The ranks that hold it as a DTensor; ``None`` if this rank holds it whole."""
    part: TensorPart | None = field(default=None, compare=False)
    """The piece of the source's tensor that is sent; ``None`` for all of it."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Everything that one update sends, validated against the served model."""

    specs: tuple[TensorSpec, ...]
    """Served names, types and shapes, in the order of :attr:`read`."""
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Yields each tensor, gathered, under its served name, on any device and of any
    floating-point type. Can be called once per update."""
    device: torch.device
    """Where most bytes are."""
    stable: bool
    """Tensors stay as they are until the update has ended. Those of a source that is
    not stable must be released before the next bucket is read."""
    adapter: Mapping[str, Any] | None = None
    """PEFT's configuration where the tensors are a LoRA adapter, not whole weights."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, as they are sent."""
        return sum(spec.num_bytes for spec in self.specs)


def specs_of(metadata: ModelMetadata) -> dict[str, TensorSpec]:
    """Describes tensors of these types and shapes."""
    return {
        name: TensorSpec(name=name, dtype=dtype, shape=torch.Size(shape))
        for name, (dtype, shape) in metadata.items()
    }
