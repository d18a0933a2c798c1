"""A rank whose gradients are clipped: compared with PyTorch's own clipping of all."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from torchrl_sglang.trainers.clipping import clip_gradients
from torchrl_sglang.trainers.ranks import find_trainer_ranks


class Model(nn.Module):
    """Shards of other sizes on each rank, one of them empty, and what has none."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Sequential(
            nn.Linear(7, 5), nn.Linear(5, 3).double(), nn.Linear(3, 1).double()
        )
        self.whole = nn.Linear(2, 2)
        self.idle = nn.Parameter(torch.zeros(3))


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def fill(model, scale):
    """Gradients that are the same numbers however the model is held."""
    generator = torch.Generator().manual_seed(0)
    for name, each in model.named_parameters():
        if name == "idle":
            continue
        numbers = torch.randn(each.shape, generator=generator).to(each.dtype) * scale
        each.grad = numbers
        if isinstance(each, DTensor):
            own = each.detach().clone()
            each.grad = own
            whole = DTensor.from_local(
                numbers, own.device_mesh, run_check=False
            ).redistribute(placements=own.placements)
            own.to_local().copy_(whole.to_local())


def check(model, mesh, layout):
    expected = copy.deepcopy(model)
    for each in model.sharded:
        fully_shard(each, mesh=mesh)
    for scale, limit in ((10.0, 0.5), (1e-3, 0.5), (1.0, None), (torch.nan, 1.0)):
        fill(expected, scale)
        fill(model, scale)
        bound = torch.inf if limit is None else limit
        norm = clip_grad_norm_(expected.parameters(), bound)
        found = clip_gradients(model.parameters(), limit)
        torch.testing.assert_close(
            found.double(), norm.double(), equal_nan=True, msg=f"{layout} {scale}"
        )
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            if other.grad is None:
                assert one.grad is None
                continue
            torch.testing.assert_close(full(one.grad), other.grad, equal_nan=True)
    # A fully sharded one has no row of some matrices, and others have.
    return any(not each.to_local().numel() for each in model.sharded.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = find_trainer_ranks()
    empty = check(Model(), init_device_mesh("cpu", (ranks.size,)), "shards")
    assert any(ranks.gather(empty))
    names = ("copies", "shards")
    mesh = init_device_mesh("cpu", (2, ranks.size // 2), mesh_dim_names=names)
    check(Model(), mesh, "copies of shards")
    ranks.end()
