"""The norm of gradients that ranks share; the oracle is PyTorch's of whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.torchrun import run_ranks

from torchrl_sglang.trainers.clipping import clip_gradients

PROGRAM = Path(__file__).with_name("clip_program.py")


@pytest.mark.slow
def test_shards_are_clipped_as_whole_gradients():
    run_ranks(PROGRAM, ranks=2)


def test_one_process():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    weights[0].grad = torch.tensor([3.0, 4.0])
    assert clip_gradients(weights, 1.0) == 5
    torch.testing.assert_close(weights[0].grad, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(clip_gradients(weights, None), torch.tensor(1.0))
