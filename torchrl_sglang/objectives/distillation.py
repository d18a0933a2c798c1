"""The divergence from a teacher as a term of a loss: its columns, value and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import check_finite, read
from torchrl_sglang.objectives.divergences import (
    Distillation,
    missed_mass,
    token_divergence,
)

TEACHER = "teacher"
TEACHER_LOG_PROBS = (TEACHER, "log_probs")
"""The teacher's log-prob of each token ``(T,)``, at temperature 1; 0 in prompts."""
TEACHER_IDS = (TEACHER, "top_ids")
"""The teacher's likeliest tokens at each position ``(T, k)``, int64."""
TEACHER_TOPS = (TEACHER, "top_log_probs")
"""Their log-probs ``(T, k)``."""

LARGEST_WEIGHT = 10.0
"""Largest importance weight of a sampled token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationTerms:
    """Terms of a batch's tokens ``(B, T)``, zero outside of the loss tokens."""

    loss: Tensor
    """Term of the loss."""
    reward: Tensor
    """Term of the advantage."""
    divergence: Tensor
    """Divergence, or its estimate."""
    missed: Tensor
    """The teacher's probability outside of its likeliest tokens."""


def compared_ids(
    settings: Distillation, batch: TensorDictBase, tokens: Tensor
) -> Tensor:
    """Returns the tokens ``(B, T, k)`` whose log-probs the loss needs."""
    if settings.estimator != "top_k":
        return tokens.unsqueeze(-1)
    return _read(batch, TEACHER_IDS, tokens).long()


def distillation_terms(
    settings: Distillation,
    batch: TensorDictBase,
    log_probs: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    vocabulary: int,
) -> DistillationTerms:
    """Returns the terms of a batch.

    ``log_probs`` ``(B, T, k)`` are the policy's of :func:`compared_ids`, ``rollout``
    ``(B, T)`` those that tokens were sampled with, ``mask`` the loss tokens.

    Raises:
        ConfigurationError: if the batch lacks a column of the teacher.
        NotFiniteError: if a value of a loss token is NaN or infinite.
    """
    zeros = torch.zeros_like(log_probs[..., 0])
    if settings.estimator == "top_k":
        tops = _read(batch, TEACHER_TOPS, mask)
        check_finite(TEACHER_TOPS, tops.sum(-1), mask)
        values = token_divergence(
            settings, log_probs[mask], tops[mask], vocabulary=vocabulary
        )
        divergence = zeros.masked_scatter(mask, values)
        missed = zeros.detach().masked_scatter(mask, missed_mass(tops[mask]))
        return DistillationTerms(
            loss=settings.weight * divergence,
            reward=zeros.detach(),
            divergence=divergence.detach(),
            missed=missed,
        )
    teacher = _read(batch, TEACHER_LOG_PROBS, mask)
    check_finite(TEACHER_LOG_PROBS, teacher, mask)
    ratio = torch.where(mask, log_probs[..., 0] - teacher, 0)
    has_rollout = mask & rollout.isfinite()
    weight = torch.where(has_rollout, log_probs[..., 0].detach() - rollout, 0).exp()
    weight = weight.clamp_max(LARGEST_WEIGHT)
    loss, reward = zeros, zeros.detach()
    if settings.estimator == "reward":
        reward = -settings.weight * ratio.detach()
    else:
        loss = settings.weight * weight * ratio.square() / 2
    return DistillationTerms(
        loss=loss,
        reward=reward,
        divergence=weight * ratio.detach(),
        missed=torch.zeros_like(reward),
    )


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
