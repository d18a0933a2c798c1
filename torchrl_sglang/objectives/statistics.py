"""Batch statistics, additive over the parts and ranks of a batch.

A mean of means, or a maximum of a rank, differs from the batch's: the underlying sums
are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_sglang.objectives.formulas import masked_max, masked_sum
from torchrl_sglang.objectives.parts import LossRanks


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A mean, a deviation or a maximum of a part of a batch.

    Examples:
        >>> values, mask = torch.tensor([1.0, 4.0, 7.0]), torch.tensor([True] * 3)
        >>> (mean(values[:1], mask[:1]) + mean(values[1:], mask[1:])).value
        tensor(4.)
    """

    terms: Tensor
    """float64 ``(n, ...)``: sums over the part, or its largest values."""
    finish: Callable[[Tensor], Tensor]
    """Computes the statistic from its terms."""
    dtype: torch.dtype
    is_maximum: bool = False

    @property
    def value(self) -> Tensor:
        """The statistic."""
        return self.finish(self.terms).to(self.dtype)

    def __add__(self, other: Statistic) -> Statistic:
        combine = torch.maximum if self.is_maximum else torch.add
        return replace(self, terms=combine(self.terms, other.terms))


def mean(values: Tensor, mask: Tensor) -> Statistic:
    """Mean of the values of a mask; zero where it is empty."""
    total = masked_sum(values, mask).double()
    return _statistic(values, [total, mask.sum()], _ratio)


def weighted_mean(value: Tensor, weight: Tensor) -> Statistic:
    """Mean of the values of several parts; each part counts by its weight."""
    value = value.detach()
    return _statistic(value, [value * weight, weight.expand_as(value)], _ratio)


def share(holds: Tensor, mask: Tensor) -> Statistic:
    """Share of a mask for which a condition holds."""
    return mean(holds.float(), mask)


def moments(
    values: Tensor, mask: Tensor, finish: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Statistic:
    """Function of sum, sum of squares and number of the values of a mask."""
    exact = values.double()
    sums = [masked_sum(exact, mask), masked_sum(exact.square(), mask), mask.sum()]
    return _statistic(values, sums, lambda terms: finish(*terms))


def sample_deviation(values: Tensor, mask: Tensor) -> Statistic:
    """Standard deviation of a sample; zero for a single value."""

    def deviation(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        spread = squares - total.square() / count.clamp_min(1)
        return (spread / (count - 1).clamp_min(1)).clamp_min(0).sqrt()

    return moments(values, mask, deviation)


def largest(values: Tensor, mask: Tensor) -> Statistic:
    """Largest value of a mask; zero where it is empty."""
    statistic = _statistic(values, [masked_max(values, mask)], _largest)
    return replace(statistic, is_maximum=True)


def smallest(values: Tensor, mask: Tensor) -> Statistic:
    """Smallest value of a mask; zero where it is empty."""
    return replace(largest(-values, mask), finish=lambda terms: -_largest(terms))


def add_up(
    total: Mapping[str, Statistic], part: Mapping[str, Statistic]
) -> dict[str, Statistic]:
    """Returns the statistics of earlier parts of a batch and a further part."""
    return {name: total[name] + s if name in total else s for name, s in part.items()}


def of_all_ranks(statistics: Iterable[Statistic], ranks: LossRanks) -> list[Statistic]:
    """Returns the statistics over the parts of all ranks; a collective call."""
    reduced = list(statistics)
    if ranks.size == 1:
        return reduced
    operations = {False: dist.ReduceOp.SUM, True: dist.ReduceOp.MAX}
    for is_maximum, operation in operations.items():
        places = [i for i, s in enumerate(reduced) if s.is_maximum is is_maximum]
        if not places:
            continue
        terms = [reduced[place].terms for place in places]
        flat = ranks.reduce(torch.cat([term.flatten() for term in terms]), operation)
        pieces = torch.split(flat, [term.numel() for term in terms])
        for place, old, new in zip(places, terms, pieces, strict=True):
            reduced[place] = replace(reduced[place], terms=new.view_as(old))
    return reduced


def values_of(statistics: Mapping[str, Statistic]) -> dict[str, Tensor]:
    """Returns the value of each statistic."""
    return {name: statistic.value for name, statistic in statistics.items()}


def _statistic(
    values: Tensor, terms: list[Tensor], finish: Callable[[Tensor], Tensor]
) -> Statistic:
    exact = torch.stack([term.detach().double() for term in terms])
    return Statistic(terms=exact, finish=finish, dtype=values.dtype)


def _ratio(terms: Tensor) -> Tensor:
    return terms[0] / terms[1].clamp_min(1)


def _largest(terms: Tensor) -> Tensor:
    return terms[0].masked_fill(terms[0] == -torch.inf, 0)
