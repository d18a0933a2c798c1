"""Groups tensors into buckets, the unit in which weights are sent.

A bucket is a flat run of bytes without gaps. The server rebuilds it from names, types
and shapes alone (``FlattenedTensorBucket`` in
``sglang/srt/weight_sync/tensor_bucket.py``) and views each tensor in place, which needs
an offset that is a multiple of its item size. Largest item size first gives that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from torchrl_sglang.errors import WeightMismatchError
from torchrl_sglang.weight_update.weights import NamedTensors, TensorSpec, Weights

__all__ = ["Bucket", "flatten", "plan_buckets", "read_buckets"]

SMALL_SHARE = 8
"""Buckets of small tensors are smaller by this factor: they are held beside the others
until they are full."""


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
    """Its tensors are below ``small_below``, see :func:`plan_buckets`."""

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
    left = dict(limits)
    for spec in specs:
        small = spec.num_bytes < small_below
        if groups[small] and spec.num_bytes > left[small]:
            buckets.append(_lay_out(groups[small], small))
            groups[small], left[small] = [], limits[small]
        groups[small].append(spec)
        left[small] -= spec.num_bytes
    return buckets + [
        _lay_out(group, small) for small, group in groups.items() if group
    ]


def _lay_out(group: list[TensorSpec], small: bool) -> Bucket:
    specs = sorted(group, key=lambda spec: -spec.dtype.itemsize)
    *offsets, end = accumulate((spec.num_bytes for spec in specs), initial=0)
    return Bucket(
        specs=tuple(specs), offsets=tuple(offsets), num_bytes=end, small=small
    )


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
                raise WeightMismatchError(
                    f"The source of the weights ended before it had yielded {names}."
                )
            name, value = item
            if value.shape != shapes.get(name):
                raise WeightMismatchError(
                    f"The source of the weights yields {name} of {tuple(value.shape)}, "
                    f"and announced {shapes.get(name, 'no such tensor')}."
                )
            held[name] = value
            del item, value
        tensors = {name: held.pop(name) for name in names}
        yield bucket, tensors
        if not weights.stable:
            # This generator is suspended while the next tensors are made.
            tensors.clear()
    # An exporter runs to its end, with whatever collectives it still has.
    deque(source, maxlen=0)


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
