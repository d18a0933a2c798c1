"""Divergences between a student's and a teacher's next-token distributions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, nan
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count, check_positive, suggest

Divergence: TypeAlias = Literal["reverse", "forward", "jensen_shannon"]
"""Divergences by name; see :class:`Distillation`."""

Estimator: TypeAlias = Literal["top_k", "vocabulary", "sampled", "reward"]
"""Estimators of a divergence by name; see :class:`Distillation`."""

LARGEST_VOCABULARY = 8192
"""Largest vocabulary of the estimator ``"vocabulary"``: 64 KB for each token."""

LARGEST_MASS_K = 256
"""Most tokens that are asked for to reach a mass."""

LEAST = -1e4
"""A log-prob with probability zero."""

_REFUSED = dict.fromkeys(
    ("student_top_k", "union_top_k"),
    " A server reports the log-probs of one list of tokens for all positions of a "
    "request, and a request for each position takes 100 times as long; give 'top_k'.",
)
"""Estimators that a user may look for, and why there are none."""


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
      metric ``distillation_missed`` reports. The last outcome keeps the student from
      leaving the set: without it, a reverse divergence is smallest where the student
      gives the set no mass.
    - ``"vocabulary"``: the definitions themselves, with an exact gradient, for teachers
      of at most 8,192 tokens: the oracle of the others.
    - ``"sampled"``: :math:`\frac12 w (\log p_t - \log q_t)^2` of the sampled token
      :math:`t`, without a gradient of the weight :math:`w = p_t / \mu_t`, where
      :math:`\mu` is the distribution that the token was sampled from. Its gradient is
      an unbiased estimate of the reverse divergence's
      (http://joschu.net/blog/kl-approx.html, :math:`k_2`), up to the bound of 10 on
      :math:`w`. The teacher sends one number for each token.
    - ``"reward"``: :math:`\log q_t - \log p_t` is added to the advantage of the sampled
      token, so that the policy's own loss, clipping and correction apply. The same
      gradient in expectation, of tokens sampled at temperature 1 from the whole
      vocabulary, with the variance of a policy gradient. The metric
      ``distillation_variance`` is the variance over the tokens, of both estimates.

    Examples:
        >>> Distillation(divergence="forward", k=128).weight
        1.0
    """

    divergence: Divergence = "reverse"
    """Name of the divergence; the last two estimators are of ``"reverse"`` alone."""
    estimator: Estimator = "top_k"
    """Name of the estimator."""
    k: int | str = 64
    """Tokens of ``"top_k"``, at each position; ``"mass:0.999"`` for as many as have
    this share of the teacher's probability, on average over a batch of a rank's, and at
    most 256."""
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
                    f"{_REFUSED.get(str(value)) or suggest(str(value), names)}"
                )
        _read_k(self.k)
        check_positive("weight", self.weight)
        share = self.teacher_share
        if not (isinstance(share, (int, float)) and 0 < share < 1):
            raise ConfigurationError(
                f"teacher_share={share!r} must be a number between 0 and 1."
            )
        if not self.compares_distributions and self.divergence != "reverse":
            raise ConfigurationError(
                f"estimator={self.estimator!r} is of divergence='reverse' alone: "
                f"tokens are the student's samples. Give estimator='top_k' for "
                f"divergence={self.divergence!r}."
            )

    @property
    def compares_distributions(self) -> bool:
        """Whether the estimator has the teacher's probabilities of several tokens."""
        return self.estimator in ("top_k", "vocabulary")

    @property
    def mass(self) -> float | None:
        """Share of the teacher's probability that decides ``k``, if one does."""
        is_top_k = self.estimator == "top_k"
        return _read_k(self.k) if is_top_k and isinstance(self.k, str) else None

    def num_top(self, vocabulary: int) -> int:
        """Returns the number of the teacher's tokens that are asked for.

        Raises:
            ConfigurationError: if a teacher with this ``vocabulary`` cannot send them.
        """
        if not self.compares_distributions:
            return 0
        if self.estimator == "vocabulary":
            if vocabulary > LARGEST_VOCABULARY:
                raise ConfigurationError(
                    f"estimator='vocabulary' is for teachers of at most "
                    f"{LARGEST_VOCABULARY} tokens, and this one has {vocabulary}; give "
                    f"estimator='top_k' and a k."
                )
            return vocabulary
        if isinstance(self.k, str):
            return min(LARGEST_MASS_K, vocabulary)
        if self.k > vocabulary:
            raise ConfigurationError(
                f"k={self.k} is more than the {vocabulary} tokens of the teacher; give "
                f"at most as many."
            )
        return self.k


def _read_k(k: Any) -> float:
    """Returns a number of tokens, or the mass in its place."""
    if not isinstance(k, str):
        return check_count("k", k)
    try:
        mass = float(k.removeprefix("mass:")) if k.startswith("mass:") else nan
    except ValueError:
        mass = nan
    if not 0 < mass < 1:
        raise ConfigurationError(
            f"k={k!r} is neither a number of tokens nor a share of the teacher's "
            f"probability between 0 and 1, such as 'mass:0.999'."
        )
    return mass


def least_k(log_probs: Tensor, mass: float) -> int:
    """Returns how many of the likeliest tokens have a mass on average.

    ``log_probs`` are ``(N, k)``, in descending order; k + 1 if all have less.
    """
    means = log_probs.double().exp().cumsum(-1).mean(0)
    return int((means < mass).sum()) + 1


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
        return log_probs.clamp_min(LEAST)
    bound = -torch.finfo(log_probs.dtype).eps
    tail = (-log_probs.logsumexp(-1, keepdim=True).clamp_max(bound).expm1()).log()
    return torch.cat([log_probs, tail], -1).clamp_min(LEAST)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
