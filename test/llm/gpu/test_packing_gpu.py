"""PyTorch's kernel for sequences of different lengths, against each of them alone."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import NEEDS_GPU, new_model
from helpers.log_probs import score
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from torchrl_sglang.objectives import attention
from torchrl_sglang.objectives.packing import packed_terms, prepare_packing

pytestmark = NEEDS_GPU

LENGTHS = (300, 17, 1, 900, 64)


def attend(inputs, window):
    """Returns the output and the gradients of the inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    bounds = torch.tensor((0, *LENGTHS), device="cuda").cumsum(0).int()
    output, _ = attention.packed_attention(
        nn.Identity(),
        *leaves,
        None,
        sliding_window=window,
        cu_seq_lens_q=bounds,
        max_length_q=max(LENGTHS),
    )
    output.float().square().sum().backward()
    return [output.detach(), *(each.grad for each in leaves)]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [4, 2])
def test_the_kernel(monkeypatch, window, heads):
    torch.manual_seed(0)
    kernel = attention._kernel()
    assert kernel is not None
    used = []
    monkeypatch.setattr(
        attention,
        "_kernel",
        lambda: lambda *args, **given: used.append(1) or kernel(*args, **given),
    )
    inputs = [
        torch.randn(1, count, sum(LENGTHS), 64, device="cuda")
        for count in (4, heads, heads)
    ]
    expected = attend(inputs, window)
    assert not used
    found = attend([each.bfloat16() for each in inputs], window)
    assert used
    for each, other in zip(found, expected, strict=True):
        assert (each.float() - other).norm() < 0.02 * other.norm()


def test_log_probs_of_a_model_are_those_of_each_sequence_alone():
    model = new_model(0).cuda()
    sequences = [torch.randint(3, 90, (each,)) for each in LENGTHS]
    with torch.no_grad():
        expected = [score(model, each) for each in sequences]
        assert prepare_packing(model, True) == ""
        tokens = pad_sequence(sequences, True, 0, "left").cuda()
        real = pad_sequence([torch.ones_like(s) for s in sequences], True, 0, "left")
        found = packed_terms(model, tokens, real.cuda(), real.cuda()).log_prob
    torch.cuda.synchronize()
    gap = (found.cpu() - pad_sequence(expected, True, 0, "left")).abs()
    assert gap.max() < 0.1
    assert gap.sum() / real.sum() < 0.02
