"""Formulas of off-policy correction: tensors in, tensors out.

All arguments of shape ``(B, T)`` hold a row per sequence and a column per token.
``mask`` is bool and True for the loss tokens; values elsewhere are ignored.
``log_ratio`` is ``log pi_train - log pi_rollout`` of each token, where ``pi_train`` is
the trainer's policy and ``pi_rollout`` the sampling policy.

Nothing here has a gradient: weights and masks change the contribution of samples, not
the objective.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]
"""Level of an importance weight."""

Estimator = Literal["k1", "k2", "k3"]
"""Estimators of a divergence; see :func:`divergence`."""

Aggregate = Literal["token", "seq_sum", "seq_mean", "seq_max"]
"""Scope of a statistic of rejection sampling."""

SAFETY_BOUND = 20.0
"""Largest exponent, an absolute log-ratio: e^20 is 4.9e8. verl's value."""


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sums the values of the mask, over everything or over a dimension."""
    # Selected, not multiplied: NaN times zero is NaN.
    selected = torch.where(mask, values, 0)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Averages the values of the mask; zero where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp_min(1)


def masked_max(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Largest value of the mask; minus infinity where the mask is empty."""
    selected = torch.where(mask, values, -torch.inf)
    return selected.amax() if dim is None else selected.amax(dim)


def importance_weights(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    r"""Importance weights of tokens, or of sequences.

    Token level: :math:`w_t = r_t = \pi_{train}(t) / \pi_{rollout}(t)`, biased, of low
    variance. Sequence level: :math:`w_t = \prod_s r_s` for every token of the sequence,
    unbiased, of a variance growing with the length. Log-ratios are limited to
    ``SAFETY_BOUND``, 20, before they are exponentiated. As in verl's
    ``compute_rollout_correction_weights``.

    Weights are ``(B, T)``, as the arguments, and zero outside of the mask.

    Examples:
        >>> log_ratio = torch.tensor([[2.0, 0.5, 9.0]]).log()
        >>> mask = torch.tensor([[True, True, False]])
        >>> importance_weights(log_ratio, mask, "token")
        tensor([[2.0000, 0.5000, 0.0000]])
        >>> importance_weights(log_ratio, mask, "sequence")
        tensor([[1., 1., 0.]])
    """
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, -1).unsqueeze(-1).expand_as(mask)
    weights = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    return torch.where(mask, weights, 0)


def truncate(weights: Tensor, upper: float, lower: float | None = None) -> Tensor:
    r"""Truncates importance weights (TIS), or zeroes those out of range (IcePop).

    Without ``lower``, :math:`\min(w, upper)`. With it, :math:`w` where
    :math:`lower \le w \le upper` and zero elsewhere; the tokens stay in the
    denominator of the loss. TIS: Yao et al., 2025,
    https://fengyao.notion.site/off-policy-rl; IcePop: as in verl and OpenRLHF.

    Examples:
        >>> truncate(torch.tensor([0.25, 1.0, 4.0]), 2.0)
        tensor([0.2500, 1.0000, 2.0000])
        >>> truncate(torch.tensor([0.25, 1.0, 4.0]), 2.0, 0.5)
        tensor([0., 1., 0.])
    """
    if lower is None:
        return weights.clamp(max=upper)
    inside = (weights >= lower) & (weights <= upper)
    return torch.where(inside, weights, 0)


def divide_by_mean(weights: Tensor, mean: Tensor) -> Tensor:
    """Divides weights by their mean, unless it is below 1e-8."""
    return torch.where(mean > 1e-8, weights / mean.clamp_min(1e-8), weights)


def divergence(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    r"""Estimates KL(pi_rollout || pi_train) from each sampled token.

    With :math:`r = \pi_{train} / \pi_{rollout}`: k1 is :math:`-\log r`, k2 is
    :math:`\frac12 \log^2 r`, k3 is :math:`r - 1 - \log r`. Schulman, 2020,
    http://joschu.net/blog/kl-approx.html.

    Log-ratios, of any shape, are limited to ``SAFETY_BOUND``, 20.

    Examples:
        >>> log_ratio = torch.tensor([0.0, 1.0])
        >>> [divergence(log_ratio, kind).tolist()[1] for kind in ("k1", "k2")]
        [-1.0, 0.5]
        >>> round(divergence(log_ratio, "k3")[1].item(), 4)
        0.7183
    """
    log_ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.expm1() - log_ratio


def rejection_statistic(
    log_ratio: Tensor, mask: Tensor, aggregate: Aggregate, estimator: Estimator
) -> Tensor:
    """Divergence of each token, or its sum, mean or maximum over the sequence.

    It is ``(B, T)`` for ``"token"``, ``(B, 1)`` otherwise; zero for an empty sequence.

    Examples:
        >>> log_ratio, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]])
        >>> rejection_statistic(log_ratio, mask, "seq_sum", "k2")
        tensor([[2.5000]])
        >>> rejection_statistic(log_ratio, mask, "seq_max", "k2")
        tensor([[2.]])
    """
    values = divergence(log_ratio, estimator)
    if aggregate == "token":
        return values
    if aggregate == "seq_sum":
        return masked_sum(values, mask, -1).unsqueeze(-1)
    if aggregate == "seq_mean":
        return masked_mean(values, mask, -1).unsqueeze(-1)
    largest = masked_max(values, mask, -1)
    return torch.where(mask.any(-1), largest, 0).unsqueeze(-1)


def rejection_mask(
    log_ratio: Tensor,
    mask: Tensor,
    aggregate: Aggregate,
    estimator: Estimator,
    bounds: tuple[float, float],
) -> Tensor:
    r"""Tokens kept by rejection sampling.

    k2 and k3 keep a token, or a sequence, whose divergence is at most ``bounds[1]``. k1
    keeps it if the ratio is in ``bounds``: the token's :math:`r` (``token``), the
    product :math:`\prod_t r_t` (``seq_sum``, masked importance sampling), or the
    geometric mean :math:`(\prod_t r_t)^{1/T}` (``seq_mean``). verl bounds :math:`1/r`
    instead, which is equivalent if the lower bound is the reciprocal of the upper
    bound.

    The result is bool ``(B, T)``, False outside of the mask.

    Examples:
        >>> log_ratio = torch.tensor([[3.0, 1.0], [1.1, 1.0]]).log()
        >>> mask = torch.tensor([[True, True], [True, True]])
        >>> rejection_mask(log_ratio, mask, "token", "k1", (0.5, 2.0)).tolist()
        [[False, True], [True, True]]
        >>> rejection_mask(log_ratio, mask, "seq_sum", "k1", (0.5, 2.0)).tolist()
        [[False, False], [True, True]]
    """
    statistic = rejection_statistic(log_ratio, mask, aggregate, estimator)
    if estimator == "k1":
        lower, upper = map(math.log, bounds)
        return mask & (-statistic >= lower) & (-statistic <= upper)
    return mask & (statistic <= bounds[1])


def veto_mask(log_ratio: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Tokens of the sequences in which no token's ratio is below a threshold.

    A single token of tiny probability for the trainer is a sign of corrupted data, such
    as tokens sampled with other weights. As slime's ``rs_veto_threshold``, 1e-4.

    The result is bool ``(B, T)``, False outside of the mask.

    Examples:
        >>> log_ratio = torch.tensor([[1e-5, 1.0], [1.0, 1e-5]]).log()
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> veto_mask(log_ratio, mask, 1e-4).tolist()
        [[False, False], [True, False]]
    """
    smallest = -masked_max(-log_ratio, mask, -1).unsqueeze(-1)
    return mask & (smallest >= math.log(threshold))


def binary_total_variation_mask(
    train: Tensor,
    rollout: Tensor,
    advantage: Tensor,
    mask: Tensor,
    bounds: tuple[float, float],
) -> Tensor:
    r"""Tokens kept by DPPO with the binary total variation.

    The total variation between the two policies, reduced to "this token" and "any other
    token", is :math:`|\pi_{train} - \pi_{rollout}|`, a difference of probabilities. A
    token is dropped if it exceeds a bound in the direction that the update would
    increase: :math:`\pi_{train} - \pi_{rollout} > high` with a positive advantage, and
    :math:`\pi_{rollout} - \pi_{train} > low` otherwise. As ``dppo_mask_low`` and
    ``dppo_mask_high`` of prime-rl, 0.2 there.

    ``train`` and ``rollout`` are log-probs, and bounds are ``(low, high)``. The result
    is bool ``(B, T)``, False outside of the mask.

    Examples:
        >>> train = torch.tensor([[0.9, 0.9]]).log()
        >>> rollout = torch.tensor([[0.5, 0.5]]).log()
        >>> advantage, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]])
        >>> keep = binary_total_variation_mask(
        ...     train, rollout, advantage, mask, (0.2, 0.2)
        ... )
        >>> keep.tolist()
        [[False, True]]
    """
    low, high = bounds
    difference = train.exp() - rollout.exp()
    dropped = torch.where(advantage > 0, difference > high, difference < -low)
    return mask & ~dropped


def staleness_mask(versions: Tensor, mask: Tensor, oldest: int) -> Tensor:
    """Tokens of the mask whose weights are at least of the version ``oldest``.

    Versions are integers ``(B, T)``; a negative version is unknown, and never recent
    enough.

    Examples:
        >>> versions = torch.tensor([[3, 4, 5, -1]])
        >>> staleness_mask(versions, torch.ones(1, 4, dtype=torch.bool), 4).tolist()
        [[False, True, True, False]]
    """
    return mask & (versions >= max(oldest, 0))


def interpolate_proximal(
    train: Tensor, rollout: Tensor, versions: Tensor, version: int
) -> Tensor:
    r"""Approximates the log-probs of the proximal policy without a forward pass.

    .. math::

        \log \pi_{prox} = \log \pi_{rollout}
            + \alpha (\log \pi_{train} - \log \pi_{rollout}), \qquad
        \alpha = \frac{v - v_t}{v + 1 - v_t}

    :math:`v` is the version at the start of the training step, :math:`v + 1` its
    result, and :math:`v_t` the version of the token's weights. A token of version
    :math:`v` was sampled by the proximal policy itself (:math:`\alpha = 0`). AReaL's
    log-linear approximation (``docs/en/algorithms/prox_approx.md`` there).

    ``train`` and ``rollout`` are log-probs ``(B, T)``; an unknown version, negative,
    counts as ``version``.

    Examples:
        >>> train, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -2.0]])
        >>> interpolate_proximal(train, rollout, torch.tensor([[5, 4]]), 5)
        tensor([[-2.0000, -1.5000]])
    """
    lag = (version - versions).clamp_min(0)
    alpha = torch.where(versions < 0, 0, lag).to(train.dtype)
    return torch.lerp(rollout, train, alpha / (alpha + 1))
