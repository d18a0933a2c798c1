"""Log-probs and entropies of tokens, from uncopied logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.support import Drawn
from torchrl_sglang.objectives.token_kernels import fits, fused_token_terms

_NUMBERS_AT_ONCE = 2**26
"""Logits per step, which bounds the copied memory: 256 MB."""

_LEAST = -1e4
"""A log-prob with probability zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows of the logits per step."""

    rows: slice | Tensor
    chosen: Tensor
    """``(rows, 1)``: the column of each row's token, among the read columns."""
    temperatures: Tensor | None = None
    """``(rows, 1)``; None: 1."""
    ids: Tensor | None = None
    """``(rows, largest)``: the columns of each row's support; None: all columns."""
    real: Tensor | None = None
    """Mask of the ids; the others fill up a row."""

    def read(self, logits: Tensor, kind: torch.dtype) -> Tensor:
        """Returns logits of the distributions; read-only for callers."""
        if self.ids is None:
            values = logits[self.rows]
        else:
            assert isinstance(self.rows, Tensor)
            values = logits[self.rows.unsqueeze(-1), self.ids]
        if self.temperatures is None:
            return values
        values = values.to(kind) / self.temperatures
        return values if self.real is None else values.masked_fill_(~self.real, -inf)

    def write(
        self, logits: Tensor, probs: Tensor, factor: Tensor, of_chosen: Tensor
    ) -> None:
        """Overwrites ``logits`` with their gradient, in place; clobbers ``probs``."""
        if self.temperatures is not None:
            factor, of_chosen = (
                factor / self.temperatures,
                of_chosen / self.temperatures,
            )
        of_chosen = of_chosen.to(logits.dtype)
        if isinstance(self.rows, slice):
            torch.mul(probs, factor, out=logits[self.rows])
            logits[self.rows].scatter_(-1, self.chosen, of_chosen)
            return
        gradient = (
            probs.mul_(factor).to(logits.dtype).scatter_(-1, self.chosen, of_chosen)
        )
        if self.ids is None:
            logits[self.rows] = gradient
            return
        assert self.real is not None
        logits.index_fill_(0, self.rows, 0)
        rows = self.rows.unsqueeze(-1).expand_as(self.ids)
        logits[rows[self.real], self.ids[self.real]] = gradient[self.real]


class _TokenTerms(torch.autograd.Function):
    """Computes in float32, some rows at a time; gradients take the logits' place."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        with_entropy: bool,
        sampling: Drawn | None,
        ids: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.empty(len(tokens), dtype=kind, device=logits.device)
        entropies = torch.zeros_like(log_probs)
        for piece in pieces(logits.shape[-1], tokens, sampling):
            # A single kernel also converts: the cost is in reads and writes.
            values = piece.read(logits, kind).log_softmax(-1, dtype=kind)
            log_probs[piece.rows] = values.gather(-1, piece.chosen).squeeze(-1)
            if with_entropy:
                entropies[piece.rows] = _entropy(values)
        id_log_probs = torch.empty(ids.shape, dtype=kind, device=logits.device)
        for rows in _cut(len(ids), logits.shape[-1]) if ids.numel() else ():
            values = logits[rows].log_softmax(-1, dtype=kind)
            id_log_probs[rows] = values.gather(-1, ids[rows])
        ctx.save_for_backward(logits, tokens, entropies, ids)
        ctx.with_entropy, ctx.sampling = with_entropy, sampling
        return log_probs, entropies, id_log_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_prob: Tensor, of_entropy: Tensor, of_ids: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        logits, tokens, entropies, ids = ctx.saved_tensors
        kind = entropies.dtype
        for piece in pieces(logits.shape[-1], tokens, ctx.sampling):
            rows, chosen = piece.rows, piece.chosen
            weight, read = of_log_prob[rows].unsqueeze(-1), piece.read(logits, kind)
            further = None
            if ids.numel():
                # Before the gradient takes the logits' place.
                further = _gradient_of(logits[rows], ids[rows], of_ids[rows])
            if ctx.with_entropy:
                values = read.log_softmax(-1, dtype=kind)
                probs = values.exp()
                values.clamp_min_(_LEAST).add_(entropies[rows].unsqueeze(-1))
                factor = values.mul_(of_entropy[rows].unsqueeze(-1)).add_(weight).neg_()
            else:
                probs = read.softmax(-1, dtype=kind)
                factor = -weight
            of_chosen = probs.gather(-1, chosen) * factor.expand_as(probs).gather(
                -1, chosen
            )
            piece.write(logits, probs, factor, of_chosen + weight)
            if further is not None:
                logits[rows] += further
        return logits, None, None, None, None


def _gradient_of(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns the gradient of weighted log-probs of ids over whole logits."""
    probs = logits.softmax(-1, dtype=weights.dtype)
    gradient = probs.mul_(-weights.sum(-1, keepdim=True)).scatter_add_(-1, ids, weights)
    return gradient.to(logits.dtype)


def token_terms(
    logits: Tensor,
    tokens: Tensor,
    *,
    entropy: bool = False,
    sampling: Drawn | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs and entropies ``(tokens,)`` of logits ``(tokens, vocabulary)``.

    The third value has the log-probs ``(tokens, k)`` of other ``ids`` of this shape, at
    temperature 1 over the whole vocabulary; ``(tokens, 0)`` without ids.

    The distribution of a token is the softmax of its logits, divided by its
    temperature, over its support; without ``sampling``, at temperature 1 over the whole
    vocabulary. Terms are in float32 at least; entropies are zero unless ``entropy``.

    The gradient overwrites the logits, which therefore need a gradient, and must not be
    read afterwards.

    Examples:
        >>> log_probs, entropies, _ = token_terms(
        ...     torch.tensor([[1.0, 1.0]]), torch.tensor([0]), entropy=True
        ... )
        >>> log_probs.exp(), entropies
        (tensor([0.5000]), tensor([0.6931]))
    """
    if sampling is not None:
        check_ids(sampling.ids, logits.shape[-1])
    if ids is None:
        ids = tokens.new_empty(len(tokens), 0)
    check_ids(ids, logits.shape[-1])
    unsupported = sampling is not None and sampling.ids.numel()
    if fits(logits) and not (unsupported or ids.numel()):
        temperatures = None if sampling is None else sampling.temperatures
        terms = fused_token_terms(logits, tokens, temperatures, entropy=entropy)
        return *terms, terms[0].new_empty(ids.shape)
    all_terms: tuple[Tensor, Tensor, Tensor] = _TokenTerms.apply(  # type: ignore[no-untyped-call]
        logits, tokens, entropy, sampling, ids
    )
    return all_terms


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Refuses supports of another vocabulary."""
    if not ids.numel():
        return
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ConfigurationError(
            f"A token was drawn from the ids {int(ids.min())} to {int(ids.max())}, and "
            f"the model has {vocabulary} tokens; do the servers serve this model?"
        )


def pieces(width: int, tokens: Tensor, sampling: Drawn | None) -> Iterator[Piece]:
    """Yields groups of rows to compute together, each row once."""
    chosen = tokens.unsqueeze(-1)
    if sampling is None:
        for rows in _cut(len(tokens), width):
            yield Piece(rows=rows, chosen=chosen[rows])
        return
    temperatures = sampling.temperatures.unsqueeze(-1)
    if not sampling.ids.numel():
        for rows in _cut(len(tokens), width):
            yield Piece(rows=rows, chosen=chosen[rows], temperatures=temperatures[rows])
        return
    unrestricted = (sampling.counts == 0).nonzero().squeeze(-1)
    for part in _cut(len(unrestricted), width):
        index = unrestricted[part]
        yield Piece(rows=index, chosen=chosen[index], temperatures=temperatures[index])
    yield from _supported(tokens, sampling)


def _supported(tokens: Tensor, sampling: Drawn) -> Iterator[Piece]:
    """Yields the rows with a support, in the width of the largest support."""
    counts = sampling.counts
    starts, largest = counts.cumsum(0) - counts, int(counts.max())
    places = torch.arange(largest, device=counts.device)
    supported = counts.nonzero().squeeze(-1)
    # Ids have twice the size of the values.
    for part in _cut(len(supported), 2 * largest):
        rows = supported[part]
        real = places < counts[rows].unsqueeze(-1)
        index = (starts[rows].unsqueeze(-1) + places).clamp_max(len(sampling.ids) - 1)
        ids = sampling.ids[index]
        drawn = (ids == tokens[rows].unsqueeze(-1)) & real
        yield Piece(
            rows=rows,
            chosen=drawn.int().argmax(-1, keepdim=True),
            temperatures=sampling.temperatures[rows].unsqueeze(-1),
            ids=ids,
            real=real,
        )


def _cut(count: int, width: int) -> Iterator[slice]:
    """Yields slices of rows that fit into one step."""
    size = max(1, _NUMBERS_AT_ONCE // width)
    for begin in range(0, count, size):
        yield slice(begin, begin + size)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs.clamp_min(_LEAST)).sum(-1)
