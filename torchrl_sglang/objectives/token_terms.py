"""Log-probs and entropies of tokens, from logits that are not copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        norms = torch.empty(len(tokens), dtype=kind, device=logits.device)
        log_probs = torch.empty_like(norms)
        entropies = torch.zeros_like(norms)
        for rows in _pieces(logits):
            values = logits[rows].to(kind)
            norms[rows] = values.logsumexp(-1)
            picked = values.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
            log_probs[rows] = picked - norms[rows]
            if with_entropy:
                entropies[rows] = _entropy(values - norms[rows].unsqueeze(-1))
        ctx.save_for_backward(logits, tokens, norms, entropies)
        ctx.with_entropy = with_entropy
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_prob: Tensor, of_entropy: Tensor
    ) -> tuple[Tensor, None, None]:
        logits, tokens, norms, entropies = ctx.saved_tensors
        for rows in _pieces(logits):
            values = logits[rows].to(norms.dtype) - norms[rows].unsqueeze(-1)
            probs = values.exp()
            weight = of_log_prob[rows].unsqueeze(-1)
            gradient = probs * -weight
            gradient.scatter_add_(-1, tokens[rows].unsqueeze(-1), weight)
            if ctx.with_entropy:
                values.clamp_min_(_LEAST).add_(entropies[rows].unsqueeze(-1))
                gradient -= probs * values * of_entropy[rows].unsqueeze(-1)
            logits[rows] = gradient.to(logits.dtype)
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
