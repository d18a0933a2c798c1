"""A bucket in memory: its tensors one after the other, as they are served."""

from __future__ import annotations

import torch

from torchrl_sglang.weight_update.buckets import Bucket
from torchrl_sglang.weight_update.sources.weights import NamedTensors

__all__ = ["flatten"]


def flatten(
    bucket: Bucket, tensors: NamedTensors, device: torch.device
) -> torch.Tensor:
    """Returns the bucket's bytes in new memory; copies cast and move in one step.

    On a GPU the copies may still be under way.

    Args:
        bucket: the layout.
        tensors: holds at least those of the bucket.
        device: where to.

    Returns:
        uint8 ``(bucket.num_bytes,)``.
    """
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    places = [
        flat[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
    ]
    # Into memory of the host, a copy must be done before it is read.
    torch._foreach_copy_(
        places,
        [tensors[spec.name].detach() for spec in bucket.specs],
        non_blocking=device.type == "cuda",
    )
    return flat
