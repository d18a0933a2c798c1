"""The norm of a gradient, of which each rank may hold a share, and its bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from torchrl_sglang.objectives.parts import scale_gradients

_TOO_SMALL = 1e-6
"""Added to a norm that is divided by, as in :func:`torch.nn.utils.clip_grad_norm_`."""


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scales gradients to a norm of at most ``limit``; returns the norm before.

    As :func:`torch.nn.utils.clip_grad_norm_`, which takes some 0.1 ms of Python for
    each parameter that FSDP2 shards, while the GPU waits: here the shards of a rank are
    read as plain tensors, all at once. All ranks that share the parameters call this.
    """
    parameters = list(parameters)
    shards, other_layouts, tensors = _split(parameters)
    norms = [_norm_of_shards(grads, group) for group, grads in shards.items()]
    if other_layouts:
        norms.append(cast(DTensor, get_total_norm(other_layouts)).full_tensor())
    if tensors or not norms:
        norms.append(get_total_norm(tensors))
    norm: Tensor = torch.stack([value.to(norms[0]) for value in norms]).norm()
    if limit is not None:
        factor = (limit / (norm + _TOO_SMALL)).clamp_max(1.0)
        scale_gradients(parameters, factor)
    return norm


def _split(
    parameters: Iterable[nn.Parameter],
) -> tuple[dict[dist.ProcessGroup, list[Tensor]], list[Tensor], list[Tensor]]:
    """Returns gradients: this rank's shards, by the ranks that have the others; those
    that are distributed in another way; and those that this rank has as a whole.
    """
    shards = defaultdict[dist.ProcessGroup, list[Tensor]](list)
    other_layouts, tensors = list[Tensor](), list[Tensor]()
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            # Each number is on one rank of a single group.
            if grad.device_mesh.ndim == 1 and type(grad.placements[0]) is Shard:
                shards[grad.device_mesh.get_group()].append(grad.to_local())
            else:
                other_layouts.append(grad)
        elif grad is not None:
            tensors.append(grad)
    return dict(shards), other_layouts, tensors


def _norm_of_shards(grads: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    # A rank can have nothing of some.
    norm = get_total_norm([grad for grad in grads if grad.numel()])
    kind = torch.promote_types(norm.dtype, torch.float32)
    total = norm.to(grads[0].device, kind).square()
    dist.all_reduce(total, group=group)
    return total.sqrt()
