"""Applies a configuration of off-policy correction to log-probs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives import formulas
from torchrl_sglang.objectives.config import RolloutCorrectionConfig
from torchrl_sglang.objectives.metrics import (
    dropped_statistics,
    mismatch_statistics,
    rejection_statistics,
    weight_statistics,
)
from torchrl_sglang.objectives.parts import LossRanks
from torchrl_sglang.objectives.statistics import Statistic, of_all_ranks, share

PREFIX = "rollout_corr/"
"""Prefix of verl's names of metrics."""

WEIGHT_MEAN = f"{PREFIX}rollout_is_batch_norm_factor"
"""Metric that divides weights with ``rollout_is_batch_normalize``."""

NOT_SCORED = (
    "The batch has no token whose log-probs are known, although the policy wrote some, "
    "so that nothing can be learnt from it; generate with "
    "SGLangWrapper(..., return_log_probs=True)."
)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A batch of sampled tokens; all tensors are ``(B, T)``."""

    rollout: Tensor
    """Log-probs of the rollout policy; NaN or infinite if unknown."""
    mask: Tensor
    """bool: the loss tokens."""
    advantage: Tensor
    """Advantage of each token; only DPPO reads its sign."""
    train: Tensor | None = None
    """Log-probs of the trainer's policy; NaN or infinite if unknown."""
    versions: Tensor | None = None
    """Integer: the weight version of each token's policy; negative if unknown."""
    version: int | None = None
    """Version of the trainer's weights at the start of the step."""
    written: Tensor | None = None
    """bool: the unmasked tokens of the policy; None: equal to the loss tokens."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Inputs of a loss after correction; all tensors are ``(B, T)``."""

    old: Tensor
    """Log-probs of the old policy, the base of the loss's ratio."""
    weights: Tensor
    """Non-negative factor of the advantage, before the division by its mean."""
    keep: Tensor
    """bool: the tokens left in the loss and in its denominator."""
    kept_share: Statistic
    """Share of the sequences with a remaining token."""
    statistics: dict[str, Statistic]
    """verl's name -> metric."""

    def of_all_ranks(self, ranks: LossRanks) -> Corrected:
        """Returns this rank's tokens, with the means of the batch of all ranks."""
        kept_share, *reduced = of_all_ranks(
            [self.kept_share, *self.statistics.values()], ranks
        )
        named = dict(zip(self.statistics, reduced, strict=True))
        return replace(self, kept_share=kept_share, statistics=named)


def correct(config: RolloutCorrectionConfig, sampled: Sampled) -> Corrected:
    """Returns the weights, the mask and the old policy of a correction.

    Tokens with an unknown, NaN or infinite log-prob are dropped: they have no ratio.
    TorchRL's losses mask such tokens, too. Raises :class:`.ConfigurationError` if an
    input of a method is missing.

    Examples:
        >>> sampled = Sampled(
        ...     rollout=torch.tensor([[0.1, 0.5, torch.nan]]).log(),
        ...     train=torch.tensor([[0.4, 0.5, 0.5]]).log(),
        ...     mask=torch.tensor([[True, True, True]]),
        ...     advantage=torch.ones(1, 3),
        ... )
        >>> corrected = correct(
        ...     RolloutCorrectionConfig.preset("decoupled_token_is"), sampled
        ... )
        >>> corrected.weights, corrected.keep.tolist()
        (tensor([[2., 1., 0.]]), [[True, True, False]])
    """
    _check_present(config, sampled)
    scored = sampled.mask & sampled.rollout.isfinite()
    if sampled.train is not None:
        scored = scored & sampled.train.isfinite()
    train = sampled.rollout if sampled.train is None else sampled.train
    # The trainer's log-probs may be bfloat16.
    dtype = torch.promote_types(train.dtype, sampled.rollout.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    train = torch.where(scored, train, 0).to(dtype)
    rollout = torch.where(scored, sampled.rollout, 0).to(dtype)
    old = _old_policy(config, sampled, train, rollout)
    # In decoupled mode, an approximated old policy replaces the trainer's.
    compared = old if config.proximal == "interpolated" else train
    log_ratio = compared - rollout
    metrics = dropped_statistics("unknown", scored, sampled.mask)
    if sampled.train is not None:
        metrics |= mismatch_statistics(compared, rollout, scored)
    weights, statistics = _weights(config, log_ratio, scored)
    metrics |= statistics
    keep, statistics = _keep(config, sampled, log_ratio, scored)
    metrics |= statistics
    if config.dppo_bounds is not None:
        inside = formulas.binary_total_variation_mask(
            compared, rollout, sampled.advantage, scored, config.dppo_bounds
        )
        weights = torch.where(inside, weights, 0)
        metrics |= dropped_statistics("dppo", inside, scored)
    if config.rejected == "zeroed":
        weights, keep = torch.where(keep, weights, 0), scored
    return Corrected(
        old=old,
        weights=torch.where(keep, weights, 0),
        keep=keep,
        kept_share=share(keep.any(-1), torch.ones_like(keep[:, 0])),
        statistics={PREFIX + name: statistic for name, statistic in metrics.items()},
    )


def scale_advantage(
    advantage: Tensor, corrected: Corrected, aggregation: str
) -> Tensor:
    """Returns the advantage, ``(B, T)`` or ``(B, 1)``, for a corrected ``GRPOLoss``.

    The clipped objective is proportional to the advantage, so weights may multiply
    either. ``"prompt_mean"`` divides by all sequences, although sequences without
    remaining tokens do not count: the others are scaled.
    """
    scaled = torch.where(corrected.keep, advantage * corrected.weights, 0)
    mean = corrected.statistics.get(WEIGHT_MEAN)
    if mean is not None:
        scaled = formulas.divide_by_mean(scaled, mean.value)
    if aggregation == "prompt_mean":
        total, count = corrected.kept_share.terms.to(scaled.dtype)
        scaled = scaled * count / total.clamp_min(1)
    return scaled


def _check_present(config: RolloutCorrectionConfig, sampled: Sampled) -> None:
    """Refuses a batch without an input of a method."""
    if config.needs_train_log_probs and sampled.train is None:
        raise ConfigurationError(
            f"{config!r} compares the trainer's log-probs with the rollout's, "
            f"and the batch has none; give actor_network, or write them into the batch."
        )
    if config.needs_versions and sampled.versions is None:
        raise ConfigurationError(
            "max_staleness and proximal='interpolated' need the version of each token, "
            "and the batch has none under version_key. An AsyncLLMCollector writes "
            "'token_policy_version'. For batches of other collectors, generate with "
            "SGLangWrapper(..., return_generation_info=True) and give "
            "version_key=('generation_info', 'weight_version') and "
            "consumer_version=int(engine.weight_version)."
        )
    if config.needs_versions and sampled.version is None:
        raise ConfigurationError(
            "max_staleness and proximal='interpolated' need the version of the "
            "trainer's weights; set consumer_version after each update."
        )
    if config.needs_versions:
        _check_count(sampled)


def _check_count(sampled: Sampled) -> None:
    """Refuses tokens newer than the trainer: their version counter differs."""
    assert sampled.versions is not None
    assert sampled.version is not None
    if not sampled.mask.numel():
        return
    newest = torch.where(sampled.mask, sampled.versions, -1).max()
    if newest > sampled.version:
        raise ConfigurationError(
            f"A token has version {int(newest)}, and consumer_version is "
            f"{sampled.version}. No token is newer than the trainer's weights, so that "
            f"these are two counts. collector.policy_version goes with the "
            f"column 'token_policy_version', int(engine.weight_version) with "
            f"('generation_info', 'weight_version')."
        )


def check_scored(sampled: Sampled, ranks: LossRanks) -> None:
    """Refuses a batch without log-probs, on all its ranks.

    A batch in which every token was masked, such as stale tokens by
    ``on_stale="mask"``, is accepted: it has nothing to train on.
    """
    written = sampled.mask if sampled.written is None else sampled.written
    written = written & sampled.mask
    scored = written & ~sampled.rollout.isnan()
    train = scored if sampled.train is None else scored & ~sampled.train.isnan()
    flags = torch.stack([tokens.any() for tokens in (written, scored, train)]).long()
    has_written, has_scored, has_train = ranks.reduce(flags, dist.ReduceOp.MAX).tolist()
    if has_written and not has_scored:
        raise ConfigurationError(NOT_SCORED)
    if has_scored and not has_train:
        raise ConfigurationError(
            "Every log-prob of the trainer is NaN: its weights are not finite, or its "
            "log-probs were not computed; go back to the last checkpoint that was good."
        )


def _old_policy(
    config: RolloutCorrectionConfig, sampled: Sampled, train: Tensor, rollout: Tensor
) -> Tensor:
    """Returns the log-probs of the ratio's denominator."""
    if config.bypass_mode and config.loss_type == "ppo_clip":
        return rollout
    if config.proximal == "recomputed":
        # With REINFORCE the ratio to the policy itself is 1, and its gradient is the
        # log-prob's.
        return train
    assert sampled.versions is not None
    assert sampled.version is not None
    return formulas.interpolate_proximal(
        train, rollout, sampled.versions, sampled.version
    )


def _weights(
    config: RolloutCorrectionConfig, log_ratio: Tensor, known: Tensor
) -> tuple[Tensor, dict[str, Statistic]]:
    """Returns the applied importance weights, and their metrics."""
    unit_weights = known.to(log_ratio.dtype)
    level = config.rollout_is
    if level is None:
        return unit_weights, {}
    lower, upper = config.weight_bounds
    raw = formulas.importance_weights(log_ratio, known, level)
    weights = formulas.truncate(raw, upper, lower)
    metrics = weight_statistics(raw, weights, known, level, (lower, upper))
    if config.rollout_is_batch_normalize:
        mean = "rollout_is_seq_mean" if level == "sequence" else "rollout_is_mean"
        metrics[WEIGHT_MEAN.removeprefix(PREFIX)] = metrics[mean]
    return (weights if config.applies_weights else unit_weights), metrics


def _keep(
    config: RolloutCorrectionConfig, sampled: Sampled, log_ratio: Tensor, known: Tensor
) -> tuple[Tensor, dict[str, Statistic]]:
    """Returns the tokens passing all criteria, and the criteria's metrics."""
    keep, metrics = known, dict[str, Statistic]()
    for rejection in config.rejections:
        passing = formulas.rejection_mask(
            log_ratio, known, rejection.aggregate, rejection.estimator, rejection.bounds
        )
        metrics |= rejection_statistics(rejection, log_ratio, passing, known)
        keep = keep & passing
    if config.rejections:
        metrics |= dropped_statistics("rollout_rs", keep, known)
    if config.veto_threshold is not None:
        passing = formulas.veto_mask(log_ratio, known, config.veto_threshold)
        metrics |= dropped_statistics("veto", passing, known)
        keep = keep & passing
    if config.max_staleness is not None:
        assert sampled.versions is not None
        assert sampled.version is not None
        oldest = sampled.version - config.max_staleness
        passing = formulas.staleness_mask(sampled.versions, known, oldest)
        metrics |= dropped_statistics("stale", passing, known)
        keep = keep & passing
    return keep, metrics
