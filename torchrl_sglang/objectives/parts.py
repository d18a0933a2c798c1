"""What the parts of a batch add up to: gradients and means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Means:
    """Means of values over several parts, each of which counts by its own weight.

    Examples:
        >>> means = Means()
        >>> means.add({"loss": torch.tensor(1.0)}, torch.tensor(3))
        >>> means.add({"loss": torch.tensor(5.0)}, torch.tensor(1))
        >>> means.values()
        {'loss': tensor(2.)}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, values: Mapping[str, Tensor], weight: Tensor) -> None:
        """Adds the means of a part."""
        for name, value in values.items():
            total, weights = self._sums.get(name, (0, 0))
            self._sums[name] = (total + value.detach() * weight, weights + weight)

    def __bool__(self) -> bool:
        return bool(self._sums)

    def values(self) -> dict[str, Tensor]:
        """Returns the means; zero where nothing has a weight."""
        return {
            name: total / weights.clamp_min(1)
            for name, (total, weights) in self._sums.items()
        }


class Gradients:
    """Weighs the losses of parts, and finally what they have added up to."""

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._total: Tensor | None = None

    def weigh(self, count: Tensor) -> Tensor:
        """Returns the factor of a loss that is a mean over ``count`` things.

        The first part has a factor of about 1, so that sums stay in the range of a
        gradient in half precision.
        """
        if self._first is None:
            self._first = count.clamp_min(1)
        self._total = count if self._total is None else self._total + count
        return count.double() / self._first

    @torch.no_grad()
    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes means of the sums."""
        if self._first is None or self._total is None:
            return
        factor = self._first.double() / self._total.clamp_min(1)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))


@contextmanager
def own_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Gradients]:
    """Keeps gradients that are there already apart from those that are being added."""
    trained = [each for each in parameters if each.requires_grad]
    before = [each.grad for each in trained]
    for each in trained:
        each.grad = None
    gradients = Gradients()
    try:
        yield gradients
        gradients.finish(trained)
    except BaseException:
        # Parts of a batch are no gradient of anything.
        for each in trained:
            each.grad = None
        raise
    finally:
        for each, old in zip(trained, before, strict=True):
            if old is not None:
                each.grad = old if each.grad is None else old.add_(each.grad)
