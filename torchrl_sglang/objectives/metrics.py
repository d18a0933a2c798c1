"""Metrics of off-policy correction, under verl's names.

Values are scalars on the device of the inputs; nothing waits for it. Sequences without
tokens do not count. Names lack verl's prefix ``rollout_corr/``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_sglang.objectives import formulas
from torchrl_sglang.objectives.config import Rejection
from torchrl_sglang.objectives.formulas import (
    SAFETY_BOUND,
    Level,
    masked_mean,
    masked_sum,
)
from torchrl_sglang.objectives.statistics import (
    Statistic,
    largest,
    mean,
    moments,
    sample_deviation,
    share,
    smallest,
)


def mismatch_statistics(
    train: Tensor, rollout: Tensor, mask: Tensor
) -> dict[str, Statistic]:
    r"""Measures how far the trainer's policy is from the rollout policy.

    ``kl`` and ``k3_kl`` estimate KL(pi_rollout || pi_train) as the means of
    :math:`-\log r` and :math:`r - 1 - \log r`. ``*_ppl`` are means over sequences of
    the perplexity, ``*_log_ppl`` of its logarithm, ``log_ppl_*diff*`` of the difference
    of both, and ``ppl_ratio`` of their ratio. ``chi2_token`` and ``chi2_seq`` are
    :math:`E[r^2] - 1` for tokens and for sequences.

    ``train`` and ``rollout`` are log-probs ``(B, T)``; with an empty mask every metric
    is finite.

    Examples:
        >>> train, rollout = torch.tensor([[-1.0, -9.0]]), torch.tensor([[-2.0, -9.0]])
        >>> mask = torch.tensor([[True, False]])
        >>> metrics = mismatch_statistics(train, rollout, mask)
        >>> metrics["kl"].value, metrics["log_ppl_diff"].value
        (tensor(-1.), tensor(-1.))
    """
    rows = mask.any(-1)
    ratio = torch.where(mask, train - rollout, 0)
    limited = ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    total = masked_sum(ratio, mask, -1).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    train_mean = masked_mean(train, mask, -1)
    rollout_mean = masked_mean(rollout, mask, -1)
    difference = rollout_mean - train_mean
    return {
        "training_ppl": mean((-train_mean).exp(), rows),
        "training_log_ppl": mean(-train_mean, rows),
        "rollout_ppl": mean((-rollout_mean).exp(), rows),
        "rollout_log_ppl": mean(-rollout_mean, rows),
        "kl": mean(-ratio, mask),
        "k3_kl": mean(limited.expm1() - limited, mask),
        "log_ppl_diff": mean(difference, rows),
        "log_ppl_abs_diff": mean(difference.abs(), rows),
        "log_ppl_diff_max": largest(difference, rows),
        "log_ppl_diff_min": smallest(difference, rows),
        "ppl_ratio": mean(difference.exp(), rows),
        "chi2_token": _chi2(limited, mask),
        "chi2_seq": _chi2(total, rows),
    }


def weight_statistics(
    raw: Tensor,
    weights: Tensor,
    mask: Tensor,
    level: Level,
    bounds: tuple[float | None, float],
) -> dict[str, Statistic]:
    r"""Describes importance weights.

    ``rollout_is_{mean,std}`` and ``rollout_is_eff_sample_size``, the share :math:`(E
    w)^2 / E w^2`, describe the applied weights before normalization;
    ``rollout_is_{max,min}`` too, or at sequence level the weights before truncation.
    ``rollout_is_ratio_fraction_{high,low}`` are the shares of weights above the upper
    and below the lower bound before truncation, TIS having the reciprocal of the upper
    bound as lower bound. ``rollout_is_oob_ratio`` is the share of tokens whose weight
    was changed. ``rollout_is_seq_*`` are the same for the means over sequences, and
    ``rollout_is_seq_max_deviation`` is their largest distance from 1.

    ``raw`` and ``weights``, ``(B, T)``, are before and after truncation to ``bounds``,
    a lower bound or None and an upper bound.

    Examples:
        >>> raw, mask = torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]])
        >>> weights = formulas.truncate(raw, 2.0)
        >>> metrics = weight_statistics(raw, weights, mask, "token", (None, 2.0))
        >>> metrics["rollout_is_mean"].value, metrics["rollout_is_oob_ratio"].value
        (tensor(1.5000), tensor(0.5000))
        >>> metrics["rollout_is_eff_sample_size"].value
        tensor(0.9000)
    """
    upper = bounds[1]
    lower = 1 / upper if bounds[0] is None else bounds[0]
    rows = mask.any(-1)
    shown = raw if level == "sequence" else weights
    # Shares of sequences, not of their tokens, if a sequence has a common weight.
    values, counted = (raw.amax(-1), rows) if level == "sequence" else (raw, mask)
    sequence, raw_sequence = masked_mean(weights, mask, -1), masked_mean(raw, mask, -1)
    return {
        "rollout_is_mean": mean(weights, mask),
        "rollout_is_std": moments(weights, mask, _deviation),
        "rollout_is_max": largest(shown, mask),
        "rollout_is_min": smallest(shown, mask),
        "rollout_is_eff_sample_size": moments(weights, mask, _sample_size),
        "rollout_is_oob_ratio": share(raw != weights, mask),
        "rollout_is_ratio_fraction_high": share(values > upper, counted),
        "rollout_is_ratio_fraction_low": share(values < lower, counted),
        "rollout_is_seq_mean": mean(sequence, rows),
        "rollout_is_seq_std": sample_deviation(sequence, rows),
        "rollout_is_seq_max": largest(sequence, rows),
        "rollout_is_seq_min": smallest(sequence, rows),
        "rollout_is_seq_max_deviation": largest((sequence - 1).abs(), rows),
        "rollout_is_seq_fraction_high": share(raw_sequence > upper, rows),
        "rollout_is_seq_fraction_low": share(raw_sequence < lower, rows),
    }


def rejection_statistics(
    rejection: Rejection, log_ratio: Tensor, keep: Tensor, mask: Tensor
) -> dict[str, Statistic]:
    """Describes the tokens dropped by a criterion of rejection sampling.

    The names begin with ``rollout_rs_`` and the criterion's name: ``_mean``, ``_max``
    and ``_min`` of the statistic, ``_masked_fraction`` of dropped tokens and
    ``_seq_masked_fraction`` of sequences with a dropped token.

    ``keep`` has the remaining tokens; all tensors are ``(B, T)``.
    """
    values = formulas.rejection_statistic(
        log_ratio, mask, rejection.aggregate, rejection.estimator
    )
    if rejection.aggregate != "token":
        values, counted = values.squeeze(-1), mask.any(-1)
    else:
        counted = mask
    prefix = f"rollout_rs_{rejection.name}"
    return {
        f"{prefix}_mean": mean(values.expand_as(counted), counted),
        f"{prefix}_max": largest(values, counted),
        f"{prefix}_min": smallest(values, counted),
        **dropped_statistics(prefix, keep, mask),
    }


def dropped_statistics(prefix: str, keep: Tensor, mask: Tensor) -> dict[str, Statistic]:
    """Shares of the dropped tokens and of the sequences with a dropped token.

    Examples:
        >>> keep, mask = torch.tensor([[True, False]]), torch.tensor([[True, True]])
        >>> dropped_statistics("all", keep, mask)["all_masked_fraction"].value
        tensor(0.5000)
    """
    dropped = mask & ~keep
    return {
        f"{prefix}_masked_fraction": share(dropped, mask),
        f"{prefix}_seq_masked_fraction": share(dropped.any(-1), mask.any(-1)),
    }


def _chi2(log_ratio: Tensor, mask: Tensor) -> Statistic:
    """Mean of the squared ratio, minus 1."""

    def chi2(total: Tensor, _: Tensor, count: Tensor) -> Tensor:
        return total / count.clamp_min(1) - 1

    return moments((2 * log_ratio).exp(), mask, chi2)


def _deviation(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    count = count.clamp_min(1)
    return (squares / count - (total / count).square()).clamp_min(0).sqrt()


def _sample_size(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """Square of the mean, divided by the mean of the squares."""
    count = count.clamp_min(1)
    return (total / count).square() / (squares / count).clamp_min(1e-16)
