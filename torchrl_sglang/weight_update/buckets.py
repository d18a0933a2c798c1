"""Parameter specifications to aligned buckets: pure.

A bucket is one flat run of bytes in which tensors lie one after the other. The server
rebuilds them from names, types and shapes alone (``FlattenedTensorBucket`` in
``sglang/srt/weight_sync/tensor_bucket.py``), so there are no gaps, and a tensor can be
viewed in place only where its offset is a multiple of its item size. Largest items
first keeps both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchrl_sglang.errors import ConfigurationError

__all__ = ["Bucket", "TensorSpec", "plan_buckets"]

SMALL_SHARE = 8
"""A bucket of small tensors is smaller than others by this factor: they are held until
it is full, beside the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor, without its values."""

    name: str
    """Parameter name, as the server's loader takes it."""
    dtype: torch.dtype
    """Type that it is sent in."""
    shape: torch.Size
    """Its shape."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that travel together."""

    specs: tuple[TensorSpec, ...]
    """The tensors, in the order in which they lie."""
    offsets: tuple[int, ...]
    """Byte at which each one begins."""
    num_bytes: int
    """Size of them all."""
    small: bool
    """Each of them is too small to travel by itself at the speed of a link."""


def plan_buckets(
    specs: Iterable[TensorSpec], max_bytes: int, small_below: int = 0
) -> list[Bucket]:
    """Returns buckets of at most ``max_bytes``; a larger tensor has one to itself.

    Every tensor of a bucket comes before all those of the next one that are of the
    same kind, small or not, so that whoever reads the tensors in order never has to
    hold more than a bucket of each kind.

    Args:
        specs: tensors with distinct names.
        max_bytes: target size, in bytes.
        small_below: tensors smaller than that, in bytes, travel among themselves, in
            buckets of an eighth of the size.

    Raises:
        ConfigurationError: if ``max_bytes`` is not positive.

    Examples:
        >>> half = TensorSpec(name="a", dtype=torch.float16, shape=torch.Size([3]))
        >>> full = TensorSpec(name="b", dtype=torch.float32, shape=torch.Size([2]))
        >>> (bucket,) = plan_buckets([half, full], max_bytes=1024)
        >>> [spec.name for spec in bucket.specs], bucket.offsets, bucket.num_bytes
        (['b', 'a'], (0, 8), 14)
    """
    if max_bytes <= 0:
        raise ConfigurationError(
            f"bucket_bytes={max_bytes} is not a size; give a positive number of bytes."
        )
    buckets: list[Bucket] = []
    groups: dict[bool, list[TensorSpec]] = {False: [], True: []}
    room = {False: max_bytes, True: max_bytes // SMALL_SHARE}
    left = dict(room)
    for spec in specs:
        small = spec.num_bytes < small_below
        if groups[small] and spec.num_bytes > left[small]:
            buckets.append(_lay_out(groups[small], small))
            groups[small], left[small] = [], room[small]
        groups[small].append(spec)
        left[small] -= spec.num_bytes
    return buckets + [
        _lay_out(group, small) for small, group in groups.items() if group
    ]


def _lay_out(group: list[TensorSpec], small: bool) -> Bucket:
    # Item sizes are powers of two, so in falling order every offset is aligned.
    ordered = sorted(group, key=lambda spec: -spec.dtype.itemsize)
    offsets, end = [], 0
    for spec in ordered:
        offsets.append(end)
        end += spec.num_bytes
    return Bucket(
        specs=tuple(ordered), offsets=tuple(offsets), num_bytes=end, small=small
    )
