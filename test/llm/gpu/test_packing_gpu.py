"""PyTorch's kernel for sequences of different lengths, against each of them alone."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import NEEDS_GPU, new_model
from helpers.log_probs import score
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from torchrl_sglang.objectives import attention
from torchrl_sglang.objectives.packing import (
    attention_bounds,
    packed_terms,
    prepare_packing,
)
from torchrl_sglang.objectives.tree import plan_tree

pytestmark = NEEDS_GPU

LENGTHS = (300, 17, 1, 900, 64)


TREE = [
    *(list(range(300)), list(range(100)), [*range(250), *range(400, 700)]),
    *([*range(250), *range(400, 650), 9], list(range(800, 1800)), [7]),
]
"""Sequences with common prefixes."""


def bounds_of(kind):
    """Returns the number of tokens of a row, and the boundaries in it."""
    if kind == "tree":
        lengths = torch.tensor([len(row) for row in TREE])
        ids = torch.tensor([token for row in TREE for token in row]).unsqueeze(-1)
        tree = plan_tree(ids.cuda(), lengths.cuda())
        bounds = attention_bounds("q", tree.segments) | attention_bounds(
            "k", tree.paths
        )
        return len(tree.nodes), bounds | {"path_nodes": tree.path_nodes}
    return sum(LENGTHS), attention_bounds("q", torch.tensor(LENGTHS, device="cuda"))


def attend(inputs, window, bounds):
    """Returns the output and the gradients of the inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    output, _ = attention.packed_attention(
        nn.Identity(), *leaves, None, sliding_window=window, **bounds
    )
    output.float().square().sum().backward()
    return [output.detach(), *(each.grad for each in leaves)]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("kind", ["sequences", "tree"])
def test_the_kernel(monkeypatch, window, heads, kind):
    torch.manual_seed(0)
    kernel = attention._kernel()
    assert kernel is not None
    used = []
    monkeypatch.setattr(
        attention,
        "_kernel",
        lambda: lambda *args, **given: used.append(1) or kernel(*args, **given),
    )
    tokens, bounds = bounds_of(kind)
    inputs = [
        torch.randn(1, count, tokens, 64, device="cuda") for count in (4, heads, heads)
    ]
    expected = attend(inputs, window, bounds)
    assert not used
    found = attend([each.bfloat16() for each in inputs], window, bounds)
    assert used
    for each, other in zip(found, expected, strict=True):
        assert (each.float() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("packing", [True, "tree"])
def test_log_probs_of_a_model_are_those_of_each_sequence_alone(packing):
    model = new_model(0).cuda()
    sequences = [torch.randint(3, 90, (each,)) for each in LENGTHS]
    sequences += [torch.cat([sequences[0][:250], each]) for each in sequences[1:]]
    with torch.no_grad():
        expected = [score(model, each) for each in sequences]
        assert prepare_packing(model, packing) == ""
        tokens = pad_sequence(sequences, True, 0, "left").cuda()
        real = pad_sequence([torch.ones_like(s) for s in sequences], True, 0, "left")
        real = real.cuda()
        tree = packing == "tree"
        found = packed_terms(model, tokens, real, real, tree=tree).log_prob
    torch.cuda.synchronize()
    gap = (found.cpu() - pad_sequence(expected, True, 0, "left")).abs()
    assert gap.max() < 0.1
    assert gap.sum() / real.sum() < 0.02
