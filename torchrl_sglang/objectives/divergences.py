"""Divergences between a student's and a teacher's next-token distributions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count, check_positive, suggest

Divergence: TypeAlias = Literal["reverse", "forward", "jensen_shannon"]
"""Divergences by name; see :class:`Distillation`."""

Estimator: TypeAlias = Literal["top_k", "sampled", "reward"]
"""Estimators of a divergence by name; see :class:`Distillation`."""

_LEAST = -1e4
"""A log-prob with probability zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    r"""Divergence of the trained policy from a teacher, and its estimator.

    With the student's distribution :math:`p` and the teacher's :math:`q` of the next
    token, both at temperature 1 over the whole vocabulary, at each token that the
    student has generated:

    - ``"reverse"``: :math:`KL(p \| q) = \sum_v p_v \log (p_v / q_v)`, which seeks the
      teacher's modes. On-policy distillation, https://arxiv.org/abs/2306.08543.
    - ``"forward"``: :math:`KL(q \| p)`, which covers all that the teacher would do.
    - ``"jensen_shannon"``: :math:`\beta KL(q \| m) + (1 - \beta) KL(p \| m)` with
      :math:`m = \beta q + (1 - \beta) p` and :math:`\beta` = ``teacher_share``. GKD,
      https://arxiv.org/abs/2306.13649, equation 1.

    Estimators:

    - ``"top_k"``: exact for :math:`k + 1` outcomes: the teacher's ``k`` likeliest
      tokens, and all others as one. By the data-processing inequality it is at most the
      divergence over the vocabulary, and its gradient is exact within the mass that the
      metric ``distillation_missed`` reports; with ``k`` of the vocabulary's size it is
      exact. The last outcome keeps the student from leaving the set: without it, a
      reverse divergence is smallest where the student gives the set no mass.
    - ``"sampled"``: :math:`\frac12 w (\log p_t - \log q_t)^2` of the sampled token
      :math:`t`, without a gradient of the weight :math:`w = p_t / \mu_t`, where
      :math:`\mu` is the distribution that the token was sampled from. Its gradient is
      an unbiased estimate of the reverse divergence's
      (http://joschu.net/blog/kl-approx.html, :math:`k_2`), up to the bound of 10 on
      :math:`w`. The teacher sends one number for each token.
    - ``"reward"``: :math:`\log q_t - \log p_t` is added to the advantage of the sampled
      token, so that the policy's own loss, clipping and correction apply. The same
      gradient in expectation, with the variance of a policy gradient.

    Examples:
        >>> Distillation(divergence="forward", k=128).weight
        1.0
    """

    divergence: Divergence = "reverse"
    """Name of the divergence; the last two estimators are of ``"reverse"`` alone."""
    estimator: Estimator = "top_k"
    """Name of the estimator."""
    k: int = 64
    """Tokens of ``"top_k"``, at each position."""
    weight: float = 1.0
    """Factor of the divergence in the loss, or in the advantage."""
    teacher_share: float = 0.5
    """Weight of the teacher in ``"jensen_shannon"``, between 0 and 1."""

    def __post_init__(self) -> None:
        for name, names in (
            ("divergence", get_args(Divergence)),
            ("estimator", get_args(Estimator)),
        ):
            value = getattr(self, name)
            if value not in names:
                raise ConfigurationError(
                    f"{name}={value!r} is not one of {', '.join(names)}."
                    f"{suggest(str(value), names)}"
                )
        check_count("k", self.k)
        check_positive("weight", self.weight)
        share = self.teacher_share
        if not (isinstance(share, (int, float)) and 0 < share < 1):
            raise ConfigurationError(
                f"teacher_share={share!r} must be a number between 0 and 1."
            )
        if self.estimator != "top_k" and self.divergence != "reverse":
            raise ConfigurationError(
                f"estimator={self.estimator!r} is of divergence='reverse' alone: "
                f"tokens are the student's samples. Give estimator='top_k' for "
                f"divergence={self.divergence!r}."
            )

    @property
    def num_top(self) -> int:
        """Number of the teacher's tokens at each position."""
        return self.k if self.estimator == "top_k" else 0


def token_divergence(
    settings: Distillation, student: Tensor, teacher: Tensor, *, vocabulary: int
) -> Tensor:
    """Returns the divergence of each token ``(N,)``, in nats.

    ``student`` and ``teacher`` are the log-probs ``(N, k)`` of the same k different
    tokens at each position.
    """
    kind = torch.promote_types(student.dtype, torch.float32)
    has_tail = student.shape[-1] < vocabulary
    p = _outcomes(student.to(kind), has_tail=has_tail)
    q = _outcomes(teacher.to(kind), has_tail=has_tail)
    if settings.divergence == "reverse":
        return _kl(p, q)
    if settings.divergence == "forward":
        return _kl(q, p)
    share = settings.teacher_share
    mixture = torch.logaddexp(q + log(share), p + log(1 - share))
    return share * _kl(q, mixture) + (1 - share) * _kl(p, mixture)


def missed_mass(log_probs: Tensor) -> Tensor:
    """Returns the probability ``(N,)`` outside of tokens with log-probs ``(N, k)``."""
    return (1 - log_probs.float().exp().sum(-1)).clamp_min(0)


def _outcomes(log_probs: Tensor, *, has_tail: bool) -> Tensor:
    """Returns log-probs of the tokens, and of all others as one more outcome."""
    if not has_tail:
        return log_probs.clamp_min(_LEAST)
    bound = -torch.finfo(log_probs.dtype).eps
    tail = (-log_probs.logsumexp(-1, keepdim=True).clamp_max(bound).expm1()).log()
    return torch.cat([log_probs, tail], -1).clamp_min(_LEAST)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
