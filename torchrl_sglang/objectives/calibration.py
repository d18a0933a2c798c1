"""Divergence outside of a teacher's top tokens, estimated from sampled tokens. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_sglang.objectives.divergences import Distillation


def missed_divergence(
    settings: Distillation, student: Tensor, teacher: Tensor, outside: Tensor
) -> Tensor:
    r"""Returns estimates ``(N,)`` of the divergence that a set of tokens misses.

    ``student`` and ``teacher`` ``(N, k + 1)`` are log-probs of the set, and of a token
    that the student sampled; it is not in the set where ``outside`` ``(N,)``.

    Each divergence is :math:`E_p f(q / p)`. With all others as one outcome of ratio
    :math:`R`, a set misses :math:`\sum_{v \notin S} p_v (f(q_v / p_v) - f(R))`: the
    mean of the difference of sampled tokens outside of the set.
    """
    p, q = student.double(), teacher.double()
    remainder = (_outside_of(q[..., :-1]) - _outside_of(p[..., :-1]))[..., None]
    ratios = torch.cat([q[..., -1:] - p[..., -1:], remainder], -1)
    terms = ratios.exp() * ratios
    if settings.divergence == "reverse":
        terms = -ratios
    elif settings.divergence == "jensen_shannon":
        share = settings.teacher_share
        mixture = (share * ratios.exp() + 1 - share).log()
        terms = share * ratios.exp() * (ratios - mixture) - (1 - share) * mixture
    return torch.where(outside, terms[..., 0] - terms[..., 1], 0).to(student.dtype)


def _outside_of(log_probs: Tensor) -> Tensor:
    """Returns the log-prob outside of a set, of at least the rounding of float32."""
    bound = torch.finfo(torch.float32).eps
    return (1 - log_probs.exp().sum(-1)).clamp_min(bound).log()
