"""Sums over the parts of a batch: gradients and means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchrl_sglang.errors import ConfigurationError, NotFiniteError, SGLangError

T = TypeVar("T")

_REFUSALS = ConfigurationError
"""Errors that say what is wrong with a part of a batch."""


class LossRanks:
    """The ranks that each have a share of one batch, and of the model or a copy of it.

    Args:
        group: process group of the ranks; ``None`` if this one has the whole batch.
        module: the trained model, whose gradients FSDP2 or DistributedDataParallel
            averages over the ranks; those of any other are added up here.
    """

    def __init__(self, group: dist.ProcessGroup | None, module: nn.Module) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._averages = any(
            isinstance(each, DistributedDataParallel) for each in module.modules()
        )

    def reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Returns a sum or a maximum over the ranks."""
        if self.size == 1:
            return value
        reduced = value.detach().clone()
        if value.device.type == "cpu":
            # NCCL takes none of a CPU.
            reduced = reduced.to(self._device)
        dist.all_reduce(reduced, operation, group=self._group)
        return reduced.to(value.device)

    def same_number(self, parts: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Yields parts, and whether each counts: as many on each rank.

        A sharded model's passes take all ranks. One that has fewer parts repeats its
        first one, which counts nothing.
        """
        if self.size == 1:
            yield from ((part, True) for part in parts)
            return
        own, error = list[T](), None
        try:
            own.extend(parts)
        except Exception as failure:  # noqa: BLE001 - The other ranks are told.
            error = failure
        self.agree(error)
        counts = torch.tensor([len(own), -len(own)], device=self._device)
        most, least = self.reduce(counts, dist.ReduceOp.MAX).tolist()
        if least == 0 < most:
            raise ConfigurationError(
                "A rank of the trainer has no part of the batch, and others have; give "
                "each rank at least one response."
            )
        yield from ((part, True) for part in own)
        yield from ((own[0], False) for _ in range(most - len(own)))

    def agree(self, error: Exception | None) -> None:
        """Raises the error of any rank on all of them, before one waits for it."""
        if self.size > 1:
            own = 0 if error is None else 1 + (not isinstance(error, _REFUSALS))
            found = torch.tensor(own, device=self._device)
            worst = self.reduce(found, dist.ReduceOp.MAX).item()
            if worst and error is None:
                kind = NotFiniteError if worst == 1 else SGLangError
                raise kind(
                    "Another rank of the trainer refused its part of the batch, or "
                    "failed with it; its own error says why."
                )
        if error is not None:
            raise error

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes gradients the sums over the ranks."""
        if self.size == 1:
            return
        copies, averages = list[nn.Parameter](), list[nn.Parameter]()
        for each in parameters:
            averaged = self._averages or isinstance(each, DTensor)
            (averages if averaged else copies).append(each)
        _scale(averages, self.size)
        if not copies:
            return
        # The tokens of one rank may not reach all parameters, such as experts.
        own = torch.tensor([each.grad is not None for each in copies]).int()
        reached = self.reduce(own.to(self._device), dist.ReduceOp.MAX).tolist()
        for parameter, on_any in zip(copies, reached, strict=True):
            if on_any:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._group)

    @property
    def _device(self) -> torch.device:
        nccl = dist.get_backend(self._group) == "nccl"
        return torch.device("cuda" if nccl else "cpu")


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

    def values(self, ranks: LossRanks | None = None) -> dict[str, Tensor]:
        """Returns the means, also of other ranks' parts; zero without any weight."""
        sums = [each for pair in self._sums.values() for each in pair]
        if ranks is not None:
            flat = torch.cat([each.double().reshape(-1) for each in sums])
            reduced = ranks.reduce(flat, dist.ReduceOp.SUM)
            pieces = torch.split(reduced, [each.numel() for each in sums])
            sums = [
                piece.view_as(each).to(each.dtype)
                for piece, each in zip(pieces, sums, strict=True)
            ]
        return {
            name: total / weights.clamp_min(1)
            for name, total, weights in zip(
                self._sums, sums[::2], sums[1::2], strict=True
            )
        }


class Gradients:
    """Weighs the losses of parts, and finally what they have added up to.

    Args:
        ranks: that have other parts of the batch.
    """

    def __init__(self, ranks: LossRanks) -> None:
        self._ranks = ranks
        self._first: Tensor | None = None
        self._total: Tensor | None = None

    def weigh(self, count: Tensor) -> Tensor:
        """Returns the factor of a loss that is a mean over ``count`` things.

        The first part has a factor of about 1, so that sums stay in the range of a
        gradient in half precision.
        """
        if self._first is None:
            self._first = self._ranks.reduce(count, dist.ReduceOp.MAX).clamp_min(1)
        self._total = count if self._total is None else self._total + count
        return count.double() / self._first

    @torch.no_grad()
    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes means of the sums."""
        if self._first is None or self._total is None:
            return
        total = self._ranks.reduce(self._total, dist.ReduceOp.SUM)
        factor = self._first.double() / total.clamp_min(1)
        trained = list(parameters)
        self._ranks.add_up(trained)
        _scale(trained, factor)


def _scale(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies gradients, of sharded parameters this rank's share of them.

    All of a kind at once: by itself, each shard costs 0.1 ms of Python.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            kinds.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), grads in kinds.items():
        own = factor.to(device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(grads, own)


@contextmanager
def own_gradients(
    parameters: Iterable[nn.Parameter], ranks: LossRanks
) -> Iterator[Gradients]:
    """Keeps gradients that are there already apart from those that are being added."""
    trained = [each for each in parameters if each.requires_grad]
    before = [each.grad for each in trained]
    for each in trained:
        each.grad = None
    gradients = Gradients(ranks)
    try:
        yield gradients
        gradients.finish(trained)
    except BaseException:
        # The sum over some parts of a batch is not a gradient.
        for each in trained:
            each.grad = None
        raise
    finally:
        for each, old in zip(trained, before, strict=True):
            if old is not None:
                each.grad = old if each.grad is None else old.add_(each.grad)
