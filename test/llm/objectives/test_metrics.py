"""Metrics against loops over sequences in plain Python."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from helpers.sampled_batches import Case, make_batch, make_case

from torchrl_sglang import OffPolicyCorrection, RolloutCorrectionConfig

SEEDS = range(6)


def metrics_of(config: RolloutCorrectionConfig | str, case: Case) -> dict[str, float]:
    correction = OffPolicyCorrection(
        config, masking_strategy="rlhf", consumer_version=4
    )
    correction(make_batch(case, "ragged"))
    found = correction.metrics
    assert all(name.startswith("rollout_corr/") for name in found)
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def log_ratios(case: Case) -> list[list[float]]:
    """Returns the log-ratios of the sequences that have tokens."""
    return [
        [a - b for a, b in zip(row.train, row.rollout, strict=True)]
        for row in case.rows
        if row.tokens
    ]


def compare(found: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6, rel=1e-6), name


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mismatch_of_the_policies(seed):
    case = make_case(seed)
    rows = log_ratios(case)
    every = [value for row in rows for value in row]
    filled = [row for row in case.rows if row.tokens]
    train = [-fmean(row.train) for row in filled]
    rollout = [-fmean(row.rollout) for row in filled]
    differences = [a - b for a, b in zip(train, rollout, strict=True)]
    expected = {
        "kl": -fmean(every),
        "k3_kl": fmean(math.exp(value) - 1 - value for value in every),
        "training_ppl": fmean(map(math.exp, train)),
        "training_log_ppl": fmean(train),
        "rollout_ppl": fmean(map(math.exp, rollout)),
        "rollout_log_ppl": fmean(rollout),
        "log_ppl_diff": fmean(differences),
        "log_ppl_abs_diff": fmean(map(abs, differences)),
        "log_ppl_diff_max": max(differences),
        "log_ppl_diff_min": min(differences),
        "ppl_ratio": fmean(map(math.exp, differences)),
        "chi2_token": fmean(math.exp(2 * value) for value in every) - 1,
        "chi2_seq": fmean(math.exp(2 * sum(row)) for row in rows) - 1,
        "unknown_masked_fraction": 0.0,
    }
    compare(metrics_of("disabled", case), expected)


@pytest.mark.parametrize("lower", [None, 0.6])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_importance_weights(seed, level, lower):
    case, upper = make_case(seed), 1.5
    raw = [[math.exp(value) for value in row] for row in log_ratios(case)]
    if level == "sequence":
        raw = [[math.prod(row)] * len(row) for row in raw]

    def applied(weight: float) -> float:
        if lower is None:
            return min(weight, upper)
        return weight if lower <= weight <= upper else 0.0

    rows = [[applied(weight) for weight in row] for row in raw]
    every = [weight for row in rows for weight in row]
    before = [weight for row in raw for weight in row]
    counted = [row[0] for row in raw] if level == "sequence" else before
    shown = before if level == "sequence" else every
    least = 1 / upper if lower is None else lower
    means = [fmean(row) for row in rows]
    squares = fmean(weight**2 for weight in every)
    expected = {
        "rollout_is_mean": fmean(every),
        "rollout_is_std": math.sqrt(max(squares - fmean(every) ** 2, 0)),
        "rollout_is_max": max(shown),
        "rollout_is_min": min(shown),
        "rollout_is_eff_sample_size": fmean(every) ** 2 / max(squares, 1e-16),
        "rollout_is_oob_ratio": fmean(
            a != b for a, b in zip(every, before, strict=True)
        ),
        "rollout_is_ratio_fraction_high": fmean(w > upper for w in counted),
        "rollout_is_ratio_fraction_low": fmean(w < least for w in counted),
        "rollout_is_seq_mean": fmean(means),
        "rollout_is_seq_std": stdev(means) if len(means) > 1 else 0.0,
        "rollout_is_seq_max": max(means),
        "rollout_is_seq_min": min(means),
        "rollout_is_seq_max_deviation": max(abs(mean - 1) for mean in means),
        "rollout_is_seq_fraction_high": fmean(fmean(row) > upper for row in raw),
        "rollout_is_seq_fraction_low": fmean(fmean(row) < least for row in raw),
    }
    threshold = upper if lower is None else (lower, upper)
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=threshold)
    compare(metrics_of(config, case), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_rejected(seed):
    case = make_case(seed)
    rows = log_ratios(case)
    token = [[value**2 / 2 for value in row] for row in rows]
    sequence = [-fmean(row) for row in rows]
    kept_token = [[value <= 0.1 for value in row] for row in token]
    kept_row = [math.log(0.8) <= -value <= math.log(1.25) for value in sequence]
    both = [
        [kept and whole for kept in row]
        for row, whole in zip(kept_token, kept_row, strict=True)
    ]
    every = [value for row in token for value in row]
    config = RolloutCorrectionConfig(
        rollout_rs="token_k2,seq_mean_k1", rollout_rs_threshold="0.1,1.25"
    )
    lengths = [len(row) for row in rows]
    dropped = [n for n, kept in zip(lengths, kept_row, strict=True) if not kept]
    expected = {
        "rollout_rs_token_k2_mean": fmean(every),
        "rollout_rs_token_k2_max": max(every),
        "rollout_rs_token_k2_min": min(every),
        "rollout_rs_token_k2_masked_fraction": 1
        - fmean(kept for row in kept_token for kept in row),
        "rollout_rs_token_k2_seq_masked_fraction": 1 - fmean(map(all, kept_token)),
        "rollout_rs_seq_mean_k1_mean": fmean(sequence),
        "rollout_rs_seq_mean_k1_max": max(sequence),
        "rollout_rs_seq_mean_k1_min": min(sequence),
        "rollout_rs_seq_mean_k1_masked_fraction": sum(dropped) / sum(lengths),
        "rollout_rs_seq_mean_k1_seq_masked_fraction": 1 - fmean(kept_row),
        "rollout_rs_masked_fraction": 1 - fmean(kept for row in both for kept in row),
        "rollout_rs_seq_masked_fraction": 1 - fmean(map(all, both)),
    }
    compare(metrics_of(config, case), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_else_was_dropped(seed):
    case = make_case(seed)
    config = RolloutCorrectionConfig(
        rollout_is=None, veto_threshold=0.5, dppo_threshold=0.05, max_staleness=2
    )
    ages = [version < 2 for row in case.rows for version in row.versions]
    vetoed = [min(row) < math.log(0.5) for row in log_ratios(case)]
    found = metrics_of(config, case)
    expected = {
        "stale_masked_fraction": fmean(ages),
        "veto_seq_masked_fraction": fmean(vetoed),
    }
    compare(found, expected)
    assert 0 <= found["dppo_masked_fraction"] < 1


def test_unknown_log_probs_are_counted():
    case = make_case(2, unknown=0.5)
    lost = [not math.isfinite(x) for row in case.rows for x in row.rollout]
    assert any(lost)
    found = metrics_of("decoupled_token_is", case)
    compare(found, {"unknown_masked_fraction": fmean(lost)})
    assert all(map(math.isfinite, found.values()))


def test_normalization_reports_its_factor():
    case = make_case(2)
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_batch_normalize=True
    )
    found = metrics_of(config, case)
    assert found["rollout_is_batch_norm_factor"] == found["rollout_is_mean"]


def test_metrics_wait_for_nothing_until_they_are_read():
    correction = OffPolicyCorrection("disabled", masking_strategy="rlhf")
    assert correction.metrics == {}
    correction(make_batch(make_case(0), "padded"))
    assert all(isinstance(x, torch.Tensor) for x in correction._metrics.values())
