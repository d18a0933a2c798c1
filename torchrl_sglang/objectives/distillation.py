"""The divergence from a teacher as a term of a loss: its columns, value and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.calibration import missed_divergence
from torchrl_sglang.objectives.columns import check_finite, read
from torchrl_sglang.objectives.divergences import (
    LEAST,
    Distillation,
    missed_mass,
    token_divergence,
)
from torchrl_sglang.objectives.formulas import masked_mean
from torchrl_sglang.objectives.packing import PassTerms
from torchrl_sglang.objectives.statistics import Statistic, moments
from torchrl_sglang.requests.token_columns import TOKENS

TEACHER = "teacher"
TEACHER_LOG_PROBS = (TEACHER, "log_probs")
"""The teacher's log-prob of each token ``(T,)``, at temperature 1; NaN in prompts."""
TEACHER_IDS = (TEACHER, "top_ids")
"""The teacher's likeliest tokens at each position ``(T, k)``, int32."""
TEACHER_TOPS = (TEACHER, "top_log_probs")
"""Their log-probs ``(T, k)``."""

LARGEST_WEIGHT = 10.0
"""Largest importance weight of a sampled token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationTerms:
    """Terms of a batch's tokens ``(B, T)``, zero outside of the loss tokens."""

    divergence: Tensor
    """Divergence, or its estimate."""
    loss: Tensor | None = None
    """Term of the loss."""
    advantage: Tensor | float = 0.0
    """Term of the advantage ``(B, T, 1)``."""
    missed: Tensor | None = None
    """The teacher's probability outside of its likeliest tokens."""
    missed_nats: Tensor | None = None
    """Estimate of the divergence outside of these tokens."""
    statistics: dict[str, Statistic] = field(default_factory=dict)
    """Metrics that are no means over the tokens."""

    def metrics(self, mask: Tensor) -> dict[str, Tensor]:
        """Returns the metrics of the loss tokens in ``mask``."""
        values = {
            "distillation": self.divergence,
            "distillation_missed": self.missed,
            "distillation_missed_nats": self.missed_nats,
        }
        return {
            name: masked_mean(value, mask)
            for name, value in values.items()
            if value is not None
        } | {name: statistic.value for name, statistic in self.statistics.items()}


def refuse_recomputed(settings: Distillation) -> None:
    """Refuses the estimators of sampled tokens beside a recomputed old policy.

    A correction replaces the log-probs that tokens were sampled with, unless a batch
    has one optimizer step.
    """
    if not settings.compares_distributions:
        raise ConfigurationError(
            f"estimator={settings.estimator!r} weighs tokens by the probability that "
            f"they were sampled with, and a correction with several optimizer steps a "
            f"batch replaces it by a recomputed policy's. Give estimator='top_k', one "
            f"minibatch and epoch, or a correction with bypass_mode=True."
        )


@cache
def with_distillation(output_type: Any) -> Any:
    """Returns a loss's class of outputs, with the fields of a distillation."""
    metrics = ("missed", "missed_nats", "variance")
    further = (f"distillation_{name}" for name in metrics)
    names = ("loss_distillation", "distillation", *further)
    fields = {"__annotations__": dict.fromkeys(names, Tensor | None)}
    defaults = dict.fromkeys(names)
    return type(output_type.__name__, (output_type,), {**fields, **defaults})


def compared_ids(
    settings: Distillation, batch: TensorDictBase, tokens: Tensor, vocabulary: int
) -> Tensor:
    """Returns the tokens ``(B, T, k)`` whose log-probs the loss needs.

    The last one is the sampled token. Tokens outside of the student's ``vocabulary``
    have another one in their place.
    """
    if not settings.compares_distributions:
        return tokens.unsqueeze(-1)
    ids = _read(batch, TEACHER_IDS, tokens).long()
    ids = torch.cat([ids, tokens.unsqueeze(-1)], -1)
    return ids.masked_fill(ids >= vocabulary, 0)


def distillation_terms(
    settings: Distillation,
    batch: TensorDictBase,
    policy: Any,
    mask: Tensor,
    *,
    rollout_key: NestedKey,
    vocabulary: int,
) -> DistillationTerms:
    """Returns the terms of a batch.

    ``policy`` has the log-probs of :func:`compared_ids`, ``rollout_key`` names the
    log-probs that tokens were sampled with, ``mask`` has the loss tokens.

    Raises:
        ConfigurationError: if the batch lacks a column of the teacher, or the policy
            reads no tokens.
        NotFiniteError: if a value of a loss token is NaN or infinite.
    """
    if not isinstance(policy, PassTerms):
        raise ConfigurationError(
            "distillation= needs an actor of tokens: TransformersWrapper(model, "
            "input_mode='tokens', generate=False, pad_model_input=True)."
        )
    rollout = read(batch, rollout_key, padding_value=0.0)
    if settings.compares_distributions:
        log_probs = policy.id_log_probs
        terms = _compared(settings, batch, log_probs[..., :-1], mask, vocabulary)
        missed = _missed_nats(
            settings, batch, log_probs.detach(), rollout, mask, vocabulary
        )
        return replace(terms, missed_nats=missed)
    assert rollout is not None
    return _estimated(settings, batch, policy.id_log_probs[..., 0], rollout, mask)


def _compared(
    settings: Distillation,
    batch: TensorDictBase,
    log_probs: Tensor,
    mask: Tensor,
    vocabulary: int,
) -> DistillationTerms:
    """Returns the terms of log-probs ``(B, T, k)`` of the teacher's tokens."""
    tops = _read(batch, TEACHER_TOPS, mask)
    check_finite(TEACHER_TOPS, tops.sum(-1), mask)
    # The rows of a teacher's output layer can be more than the student's.
    outside = _read(batch, TEACHER_IDS, mask)[mask] >= vocabulary
    teacher = tops[mask].masked_fill(outside, LEAST)
    student = log_probs[mask].masked_fill(outside, LEAST)
    values = token_divergence(settings, student, teacher, vocabulary=vocabulary)
    zeros = torch.zeros_like(log_probs[..., 0])
    divergence = zeros.masked_scatter(mask, values)
    return DistillationTerms(
        loss=settings.weight * divergence,
        divergence=divergence.detach(),
        missed=zeros.detach().masked_scatter(mask, missed_mass(teacher).to(zeros)),
    )


def _missed_nats(
    settings: Distillation,
    batch: TensorDictBase,
    log_probs: Tensor,
    rollout: Tensor | None,
    mask: Tensor,
    vocabulary: int,
) -> Tensor | None:
    """Returns estimates of the divergence outside of the teacher's tokens."""
    sampled = read(batch, TEACHER_LOG_PROBS, padding_value=0)
    if sampled is None or rollout is None:
        return None
    tokens, ids = _read(batch, TOKENS, mask), _read(batch, TEACHER_IDS, mask)
    outside = (ids != tokens.unsqueeze(-1)).all(-1)[mask]
    teacher = torch.cat([_read(batch, TEACHER_TOPS, mask), sampled.unsqueeze(-1)], -1)
    foreign = torch.nn.functional.pad(ids >= vocabulary, (0, 1))
    student, teacher = (
        values.masked_fill(foreign, LEAST)[mask] for values in (log_probs, teacher)
    )
    values = missed_divergence(settings, student, teacher, outside)
    weight = _importance(log_probs[..., -1], rollout, mask)
    return torch.zeros_like(weight).masked_scatter(mask, weight[mask] * values)


def _importance(log_probs: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """Returns the bounded weights of sampled tokens; 1 where unknown."""
    has_rollout = mask & rollout.isfinite()
    ratio = torch.where(has_rollout, log_probs - rollout, 0)
    return ratio.exp().clamp_max(LARGEST_WEIGHT)


def _estimated(
    settings: Distillation,
    batch: TensorDictBase,
    log_probs: Tensor,
    rollout: Tensor,
    mask: Tensor,
) -> DistillationTerms:
    """Returns the terms of log-probs ``(B, T)`` of the sampled tokens."""
    teacher = _read(batch, TEACHER_LOG_PROBS, mask)
    check_finite(TEACHER_LOG_PROBS, teacher, mask)
    ratio = torch.where(mask, log_probs - torch.where(mask, teacher, 0), 0)
    weight = _importance(log_probs.detach(), rollout, mask)
    divergence = weight * ratio.detach()
    statistics = {"distillation_variance": moments(divergence, mask, _variance)}
    if settings.estimator == "reward":
        return DistillationTerms(
            advantage=-settings.weight * ratio.detach().unsqueeze(-1),
            divergence=divergence,
            statistics=statistics,
        )
    return DistillationTerms(
        loss=settings.weight * weight * ratio.square() / 2,
        divergence=divergence,
        statistics=statistics,
    )


def _variance(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    count = count.clamp_min(1)
    return (squares / count - (total / count).square()).clamp_min(0)


def _read(batch: TensorDictBase, key: tuple[str, str], like: Tensor) -> Tensor:
    """Returns a column of the teacher for the tokens of ``like`` ``(B, T)``."""
    value = read(batch, key, padding_value=0)
    if value is None:
        raise ConfigurationError(
            f"The batch has no {key!r}; let a teacher score it before the loss: "
            f"Learner(teacher=...), or Teacher(...)(batch)."
        )
    if value.shape[:2] != like.shape[:2]:
        raise ConfigurationError(
            f"{key!r} has the shape {tuple(value.shape)} for tokens of the shape "
            f"{tuple(like.shape)}: they are not of the same tokens."
        )
    return value
