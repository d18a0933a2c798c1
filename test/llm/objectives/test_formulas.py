"""Formulas against loops over tokens in plain Python."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch

from torchrl_sglang.objectives import formulas

SEEDS = range(8)


def make(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[list[float]]]:
    """Returns log-ratios, a mask, and the masked values of each row.

    What is masked is NaN or infinite; rows may be empty.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = torch.randint(1, 7, (2,), generator=generator).tolist()
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.6
    junk = torch.where(values > 0, torch.nan, torch.inf)
    rows = [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]
    return torch.where(mask, values, junk), mask, rows


def spread(rows: list[list[float]], mask: torch.Tensor, fill: float = 0) -> list:
    """Puts the values of each row back to the places of the mask."""
    result = []
    for row, kept in zip(rows, mask.tolist(), strict=True):
        values = iter(row)
        result.append([next(values) if inside else fill for inside in kept])
    return result


def close(actual: torch.Tensor, expected: object) -> None:
    expected = torch.tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_means_and_extremes(seed):
    values, mask, rows = make(seed)
    every = [value for row in rows for value in row]
    close(formulas.masked_sum(values, mask), sum(every))
    close(formulas.masked_mean(values, mask), fmean(every) if every else 0.0)
    close(formulas.masked_sum(values, mask, -1), [float(sum(row)) for row in rows])
    close(
        formulas.masked_mean(values, mask, -1),
        [fmean(row) if row else 0.0 for row in rows],
    )
    close(
        formulas.masked_max(values, mask, -1),
        [max(row, default=-math.inf) for row in rows],
    )
    close(
        formulas.masked_min(values, mask, -1),
        [min(row, default=math.inf) for row in rows],
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights(seed):
    log_ratio, mask, rows = make(seed)
    tokens = [[math.exp(value) for value in row] for row in rows]
    sequences = [[math.exp(sum(row))] * len(row) for row in rows]
    close(formulas.importance_weights(log_ratio, mask, "token"), spread(tokens, mask))
    close(
        formulas.importance_weights(log_ratio, mask, "sequence"),
        spread(sequences, mask),
    )


def test_extreme_log_ratios_are_limited():
    log_ratio = torch.tensor([[100.0, -200.0, -torch.inf]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = formulas.importance_weights(log_ratio, mask, "token")
    assert weights.isfinite().all()
    close(weights.log(), [[20.0, -20.0, -20.0]])
    sequence = formulas.importance_weights(log_ratio, mask, "sequence")
    close(sequence.log(), [[-20.0] * 3])
    assert formulas.divergence(log_ratio, "k3").isfinite().all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_normalized_weights(seed, level):
    log_ratio, mask, rows = make(seed)
    weights = formulas.importance_weights(log_ratio, mask, level)
    normalized = formulas.normalize_weights(weights, mask, level)
    if level == "token":
        every = [math.exp(value) for row in rows for value in row]
    else:
        every = [math.exp(sum(row)) for row in rows if row]
    mean = fmean(every) if every else 1.0
    close(normalized, (weights / mean).tolist())


def test_weights_that_are_all_zero_stay_zero():
    weights, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    assert not formulas.normalize_weights(weights, mask, "token").any()


def value_of(estimator: str, log_ratio: float) -> float:
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return math.exp(log_ratio) - 1 - log_ratio


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregate", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rejection(seed, aggregate, estimator):
    log_ratio, mask, rows = make(seed)
    values = [[value_of(estimator, value) for value in row] for row in rows]
    combine = {"seq_sum": sum, "seq_mean": fmean, "seq_max": max}
    low, high = (0.5, 1.7) if estimator == "k1" else (0.0, 0.6)

    def accepted(value: float) -> bool:
        if estimator == "k1":
            return low <= math.exp(-value) <= high
        return value <= high

    if aggregate == "token":
        expected = [[accepted(value) for value in row] for row in values]
    else:
        expected = [
            [accepted(combine[aggregate](row))] * len(row) if row else []
            for row in values
        ]
    keep = formulas.rejection_mask(log_ratio, mask, aggregate, estimator, (low, high))
    assert keep.tolist() == spread(expected, mask, fill=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_veto(seed):
    log_ratio, mask, rows = make(seed)
    expected = [[all(math.exp(v) >= 0.4 for v in row)] * len(row) for row in rows]
    keep = formulas.veto_mask(log_ratio, mask, 0.4)
    assert keep.tolist() == spread(expected, mask, fill=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_binary_total_variation(seed):
    _, mask, _ = make(seed)
    generator = torch.Generator().manual_seed(seed)
    train, rollout = torch.rand((2, *mask.shape), generator=generator).log()
    advantage = torch.randn(mask.shape, generator=generator)
    keep = formulas.binary_total_variation_mask(
        train, rollout, advantage, mask, (0.1, 0.3)
    )
    for index in torch.cartesian_prod(*map(torch.arange, mask.shape)).view(-1, 2):
        at = tuple(index.tolist())
        moved = math.exp(train[at]) - math.exp(rollout[at])
        dropped = moved > 0.3 if advantage[at] > 0 else moved < -0.1
        assert keep[at].item() == (mask[at].item() and not dropped)


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
