"""Formulas at extreme values, and with unknown versions.

``test_gradients.py`` compares every formula with loops over tokens.
"""

from __future__ import annotations

import torch

from torchrl_sglang.objectives import formulas


def close(actual: torch.Tensor, expected: object) -> None:
    expected = torch.tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


def test_extreme_log_ratios_are_limited():
    log_ratio = torch.tensor([[100.0, -200.0, -torch.inf]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = formulas.importance_weights(log_ratio, mask, "token")
    assert weights.isfinite().all()
    close(weights.log(), [[20.0, -20.0, -20.0]])
    sequence = formulas.importance_weights(log_ratio, mask, "sequence")
    close(sequence.log(), [[-20.0] * 3])
    assert formulas.divergence(log_ratio, "k3").isfinite().all()


def test_weights_that_are_all_zero_stay_zero():
    weights = torch.zeros(2, 2)
    assert not formulas.divide_by_mean(weights, weights.mean()).any()


def test_staleness():
    versions = torch.tensor([[0, 1, 2, 3, -1]])
    mask = torch.tensor([[True, True, True, False, True]])
    kept = formulas.staleness_mask(versions, mask, 1)
    assert kept.tolist() == [[False, True, True, False, False]]
    # An unknown version is too old for every bound.
    kept = formulas.staleness_mask(versions, mask, -5)
    assert kept.tolist() == [[True, True, True, False, False]]


def test_interpolation_follows_the_versions():
    train = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0]])
    rollout = torch.tensor([[-3.0, -3.0, -3.0, -3.0, -3.0]])
    versions = torch.tensor([[5, 4, 2, -1, 6]])
    found = formulas.interpolate_proximal(train, rollout, versions, 5)
    shares = [0, 1 / 2, 3 / 4, 0, 0]
    close(found, [[-3 + 2 * share for share in shares]])
