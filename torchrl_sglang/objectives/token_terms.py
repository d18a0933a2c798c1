"""Log-probs and entropies of tokens, from logits that are not copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_sglang.objectives.token_kernels import fits, fused_token_terms

_NUMBERS_AT_ONCE = 2**26
"""Logits that are computed with at once, which bounds what is copied: 256 MB."""

_LEAST = -1e4
"""A log-prob whose probability is zero."""


class _TokenTerms(torch.autograd.Function):
    """Computes in float32, some rows at a time; gradients take the logits' place."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.empty(len(tokens), dtype=kind, device=logits.device)
        entropies = torch.zeros_like(log_probs)
        for rows in _pieces(logits):
            # One kernel also converts: what is read and written is what this costs.
            values = logits[rows].log_softmax(-1, dtype=kind)
            log_probs[rows] = values.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
            if with_entropy:
                entropies[rows] = _entropy(values)
        ctx.save_for_backward(logits, tokens, entropies)
        ctx.with_entropy = with_entropy
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_prob: Tensor, of_entropy: Tensor
    ) -> tuple[Tensor, None, None]:
        logits, tokens, entropies = ctx.saved_tensors
        for rows in _pieces(logits):
            weight, chosen = of_log_prob[rows].unsqueeze(-1), tokens[rows].unsqueeze(-1)
            if ctx.with_entropy:
                values = logits[rows].log_softmax(-1, dtype=entropies.dtype)
                probs = values.exp()
                values.clamp_min_(_LEAST).add_(entropies[rows].unsqueeze(-1))
                factor = values.mul_(of_entropy[rows].unsqueeze(-1)).add_(weight).neg_()
            else:
                probs = logits[rows].softmax(-1, dtype=entropies.dtype)
                factor = -weight
            of_chosen = probs.gather(-1, chosen) * factor.expand_as(probs).gather(
                -1, chosen
            )
            torch.mul(probs, factor, out=logits[rows])
            logits[rows].scatter_(-1, chosen, (of_chosen + weight).to(logits.dtype))
        return logits, None, None


def token_terms(
    logits: Tensor, tokens: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns log-probs of tokens, and the entropies of their distributions.

    The gradient is written over the logits, which therefore have one, and nobody else
    may read them afterwards.

    Args:
        logits: ``(tokens, vocabulary)``.
        tokens: ``(tokens,)``.
        entropy: whether to compute entropies; they are zero otherwise.

    Returns:
        tuple: two tensors ``(tokens,)``, in float32 at least.

    Examples:
        >>> found, entropies = token_terms(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([0]), entropy=True
        ... )
        >>> found.exp(), entropies
        (tensor([0.5000]), tensor([0.6931]))
    """
    if fits(logits):
        return fused_token_terms(logits, tokens, entropy=entropy)
    found: tuple[Tensor, Tensor] = _TokenTerms.apply(  # type: ignore[no-untyped-call]
        logits, tokens, entropy
    )
    return found


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Yields rows that are computed with together."""
    size = max(1, _NUMBERS_AT_ONCE // logits.shape[-1])
    for begin in range(0, len(logits), size):
        yield slice(begin, begin + size)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs.clamp_min(_LEAST)).sum(-1)
