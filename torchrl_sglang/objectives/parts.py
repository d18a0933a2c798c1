"""Gradients that are sums over the parts of a batch, and the ranks that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchrl_sglang.errors import ConfigurationError, NotFiniteError, SGLangError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.user_code import describe

T = TypeVar("T")

_KINDS = (NotFiniteError, ConfigurationError, SGLangError)
"""Kinds of errors that ranks agree on. The first one may be lived with, so that a rank
must not have it where another has one that ends the run."""

_ELSEWHERE = (
    "Another rank of the trainer refused its part of the batch, or failed with it; its "
    "own error says why."
)


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
        own = self.together(lambda: list(parts))
        counts = torch.tensor([len(own), -len(own)], device=self._device)
        most, least = self.reduce(counts, dist.ReduceOp.MAX).tolist()
        if least == 0 < most:
            raise ConfigurationError(
                "A rank of the trainer has no part of the batch, and others have; give "
                "each rank at least one response."
            )
        yield from ((part, True) for part in own)
        yield from ((own[0], False) for _ in range(most - len(own)))

    def together(self, call: Callable[[], T]) -> T:
        """Returns the result of a call once it has succeeded on all ranks."""
        results, error = list[T](), None
        try:
            results.append(call())
        except Exception as failure:  # noqa: BLE001 - All ranks raise it.
            error = failure
        self.agree(error)
        return results[0]

    def agree(self, error: Exception | None) -> None:
        """Raises an error of any rank on all of them, of the same kind on each."""
        own = worst = 0 if error is None else _kind_of(error)
        if self.size > 1:
            if error is not None and str(error) != _ELSEWHERE:
                # A rank that still waits in another collective keeps this one waiting.
                torchrl_logger.warning(
                    f"Rank {dist.get_rank()} of the trainer has an error, which ends "
                    f"this step on all ranks: {describe(error)}."
                )
            code = torch.tensor(own, device=self._device)
            worst = int(self.reduce(code, dist.ReduceOp.MAX).item())
        if error is not None and own == worst:
            raise error
        if worst:
            raise _KINDS[worst - 1](_ELSEWHERE) from error

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


def _kind_of(error: Exception) -> int:
    """Returns the place of an error's kind, from 1 on; others are as the last one."""
    kinds = enumerate(_KINDS, 1)
    return next(
        (place for place, kind in kinds if isinstance(error, kind)), len(_KINDS)
    )


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
