"""The tensors of one update, and the buckets that they are sent in.

A bucket is a flat run of bytes without gaps. The server rebuilds it from names, types
and shapes alone (``FlattenedTensorBucket`` in
``sglang/srt/weight_sync/tensor_bucket.py``) and views each tensor in place, which needs
an offset that is a multiple of its item size. Largest item size first gives that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrl_sglang.errors import WeightMismatchError
from torchrl_sglang.types import ModelMetadata, TensorPart

NamedTensors: TypeAlias = dict[str, torch.Tensor]

SMALL_SHARE = 8
"""Buckets of small tensors are smaller by this factor: they are held beside the others
until they are full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Describes one tensor without its values, in a source and on a server."""

    name: str
    """Name in the source; in :class:`Weights`, the one that servers take."""
    dtype: torch.dtype
    """Type in the source; in :class:`Weights`, the served one."""
    shape: torch.Size
    """Shape over all ranks together."""
    device: torch.device = field(default=torch.device("cpu"), compare=False)
    """Device on which the source holds the tensor."""
    layout: torch.layout = field(default=torch.strided, compare=False)
    """How its memory holds it: sparse ones cannot be sent."""
    identity: Hashable = field(default_factory=object, compare=False)
    """Key that is equal for tensors that share memory, such as tied weights."""
    computed: bool = field(default=False, compare=False)
    """Whether the tensor may be a buffer that is computed, not trained."""
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
    """Device of most bytes."""
    stable: bool
    """Tensors stay as they are until the update has ended. Tensors of a source that is
    not stable must be released before the next bucket is read."""
    adapter: Mapping[str, Any] | None = None
    """PEFT's configuration where the tensors are a LoRA adapter, not whole weights."""
    quantized: str | None = None
    """Format for which the weights are encoded."""
    ranks: Any = None
    """The ranks that hold the weights together (:class:`.Ranks`); ``None`` for one."""
    memory: object = None
    """The same object for weights in the same memory; ``None``: unknown, or all tensors
    have to be read."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that are sent together."""

    specs: tuple[TensorSpec, ...]
    """The tensors, in the order of their bytes."""
    offsets: tuple[int, ...]
    """Byte at which each one begins."""
    num_bytes: int
    """Size of all tensors."""
    small: bool
    """Whether the tensors are below ``small_below``, see :func:`plan_buckets`."""

    def view(self, flat: torch.Tensor) -> NamedTensors:
        """Returns the tensors as views of the bucket's bytes."""
        return {
            spec.name: flat[offset : offset + spec.num_bytes]
            .view(spec.dtype)
            .view(spec.shape)
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        }


def plan_buckets(
    specs: Iterable[TensorSpec], max_bytes: int, small_below: int = 0
) -> list[Bucket]:
    """Groups tensors into buckets of at most ``max_bytes``, in the order of ``specs``.

    A larger tensor has a bucket to itself. Tensors below ``small_below`` bytes have
    smaller buckets of their own.
    """
    buckets: list[Bucket] = []
    groups: dict[bool, list[TensorSpec]] = {False: [], True: []}
    limits = {False: max_bytes, True: max_bytes // SMALL_SHARE}
    room = dict(limits)
    for spec in specs:
        small = spec.num_bytes < small_below
        if groups[small] and spec.num_bytes > room[small]:
            buckets.append(_lay_out(groups[small], small))
            groups[small], room[small] = [], limits[small]
        groups[small].append(spec)
        room[small] -= spec.num_bytes
    return buckets + [
        _lay_out(group, small) for small, group in groups.items() if group
    ]


def _lay_out(group: list[TensorSpec], small: bool) -> Bucket:
    specs = sorted(group, key=lambda spec: -spec.dtype.itemsize)
    *offsets, end = accumulate((spec.num_bytes for spec in specs), initial=0)
    return Bucket(
        specs=tuple(specs), offsets=tuple(offsets), num_bytes=end, small=small
    )


def read_all(weights: Weights) -> NamedTensors:
    """Reads weights that stay as they are; they may still have to be cast."""
    shapes = {spec.name: spec.shape for spec in weights.specs}
    tensors: NamedTensors = {}
    for name, value in weights.read():
        _check_shape(name, value, shapes)
        tensors[name] = value
    if tensors.keys() != shapes.keys():
        raise _ended_early([name for name in shapes if name not in tensors])
    return tensors


def read_buckets(
    weights: Weights, max_bytes: int, small_below: int = 0
) -> Iterator[tuple[Bucket, NamedTensors]]:
    """Reads weights bucket by bucket; the tensors may still have to be cast."""
    shapes = {spec.name: spec.shape for spec in weights.specs}
    source = weights.read()
    held: NamedTensors = {}
    for bucket in plan_buckets(weights.specs, max_bytes, small_below):
        names = [spec.name for spec in bucket.specs]
        while not held.keys() >= set(names):
            item = next(source, None)
            if item is None:
                raise _ended_early(names)
            name, value = item
            _check_shape(name, value, shapes)
            held[name] = value
            del item, value
        tensors = {name: held.pop(name) for name in names}
        yield bucket, tensors
        if not weights.stable:
            # The generator is suspended while the next tensors are made.
            tensors.clear()
    # An exporter runs to its end, with whatever collectives it still has.
    deque(source, maxlen=0)


def _check_shape(
    name: str, value: torch.Tensor, shapes: Mapping[str, torch.Size]
) -> None:
    if value.shape != shapes.get(name):
        raise WeightMismatchError(
            f"The source of the weights yields {name} of {tuple(value.shape)}, "
            f"and announced {shapes.get(name, 'no such tensor')}."
        )


def _ended_early(names: Iterable[str]) -> WeightMismatchError:
    return WeightMismatchError(
        f"The source of the weights ended before it had yielded {list(names)}."
    )


def flatten(
    bucket: Bucket, tensors: NamedTensors, device: torch.device
) -> torch.Tensor:
    """Copies a bucket into new memory, uint8 ``(bucket.num_bytes,)``.

    Copies cast and move in one step. On a GPU they may still be in flight.
    """
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    targets = bucket.view(flat)
    torch._foreach_copy_(
        list(targets.values()),
        [tensors[name].detach() for name in targets],
        # Host memory is read as soon as this returns.
        non_blocking=device.type == "cuda",
    )
    return flat
