"""Triton's log-probs, entropies and gradients, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import NEEDS_GPU

from torchrl_sglang.objectives import token_kernels
from torchrl_sglang.objectives.support import Drawn
from torchrl_sglang.objectives.token_terms import token_terms

pytestmark = NEEDS_GPU

ROWS = 33


def expected(logits, tokens, temperatures, weights, entropy):
    """Returns log-probs, entropies and the gradient, by PyTorch's autograd."""
    leaf = logits.double().requires_grad_()
    values = (leaf / temperatures.double()[:, None]).log_softmax(-1)
    log_probs = values.gather(-1, tokens[:, None])[:, 0]
    entropies = -(values.exp() * values.clamp_min(-1e4)).sum(-1)
    total = log_probs @ weights[0].double()
    if entropy:
        total = total + entropies @ weights[1].double()
    total.backward()
    return log_probs.detach(), entropies.detach(), leaf.grad


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [96, 4096, 151_936])
def test_the_kernels(width, dtype, entropy):
    torch.manual_seed(0)
    with torch.device("cuda"):
        logits = (3 * torch.randn(ROWS, width)).to(dtype)
        tokens = torch.randint(50, width, (ROWS,))
        weights, temperatures = torch.randn(2, ROWS), 0.5 + torch.rand(ROWS)
        nothing = torch.zeros(0, dtype=torch.int64)
        counts = torch.zeros(ROWS, dtype=torch.int64)
    # A model can leave tokens out.
    logits[0, :50] = -torch.inf
    assert token_kernels.fits(logits)
    known = expected(logits, tokens, temperatures, weights, entropy)
    drawn = Drawn(temperatures=temperatures, counts=counts, ids=nothing)
    leaf = logits.clone().requires_grad_()
    # A step between: what is written over must not be a leaf.
    found = token_terms(leaf * 1, tokens, entropy=entropy, sampling=drawn)
    total = found[0] @ weights[0] + found[1] @ weights[1]
    total.backward()
    torch.testing.assert_close(found[0].double(), known[0], rtol=1e-5, atol=1e-5)
    if entropy:
        torch.testing.assert_close(found[1].double(), known[1], rtol=1e-5, atol=1e-4)
    error = (leaf.grad.double() - known[2]).abs().max()
    # The kernels compute in float32, of logits of up to 25 over a temperature.
    assert error < max(32 * torch.finfo(dtype).eps, 5e-5)


def test_what_they_cannot():
    assert not token_kernels.fits(torch.zeros(1, 2))
    with torch.device("cuda"):
        assert not token_kernels.fits(torch.zeros(1, 2, dtype=torch.float64))
        assert not token_kernels.fits(torch.zeros(4, 3).t())
        nothing = torch.zeros(0, 8, requires_grad=True)
        found, *_ = token_terms(nothing * 1, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert nothing.grad.shape == (0, 8)
