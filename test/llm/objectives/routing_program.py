"""Routing replayed on a sharded model: ``torchrun routing_program.py FOLDER``.

Each rank has a sequence of its own. What the model makes of it, and the gradient over
all ranks, are those of the model that is not sharded.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from torchrl_sglang import replay_routing
from torchrl_sglang.trainers.models import load_model, shard
from torchrl_sglang.trainers.ranks import find_trainer_ranks


def run(model, ids, experts):
    """Returns logits of two passes, whose backward passes follow together."""
    with replay_routing(model) as replay:
        outputs = []
        for tokens, each in zip(ids.chunk(2, 1), experts.chunk(2, 1), strict=True):
            with replay.using(each):
                outputs.append(model(tokens).logits)
        sum(each.log_softmax(-1)[..., 5].sum() for each in outputs).backward()
        assert replay.flipped > 0.5
    return torch.cat(outputs, 1).detach()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks, folder, cpu = find_trainer_ranks(), sys.argv[1], torch.device("cpu")
    generator = torch.Generator().manual_seed(ranks.rank)
    ids = torch.randint(3, 90, (1, 24), generator=generator)
    layers = AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers
    first = torch.randint(0, 7, (1, 24, layers, 1), generator=generator)
    experts = torch.cat([first, first + 1], -1).to(torch.int8)
    alone = load_model(folder, device=cpu)
    wanted = run(alone, ids, experts)
    model = shard(
        load_model(folder, device=cpu, gradient_checkpointing=True), ranks, cpu
    )
    assert ranks.size > 1
    torch.testing.assert_close(run(model, ids, experts), wanted, atol=1e-4, rtol=1e-4)
    own = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = own[name].grad
        gradient = torch.zeros_like(own[name]) if gradient is None else gradient
        dist.all_reduce(gradient)
        found = parameter.grad.full_tensor() * ranks.size
        torch.testing.assert_close(found, gradient, atol=1e-4, rtol=1e-3)
    ranks.end()
