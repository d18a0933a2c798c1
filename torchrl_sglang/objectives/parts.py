"""Gradient sums over the parts of a batch, and its ranks."""

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
"""Kinds of errors for the ranks to agree on, by severity. The first may be handled, so
it must not appear on a rank while another rank has a fatal error."""

_ELSEWHERE = (
    "Another rank of the trainer refused its part of the batch, or failed with it; its "
    "own error says why."
)


class LossRanks:
    """The ranks of a shared batch, and the model or a copy of it.

    FSDP2 and DistributedDataParallel average the gradients of ``module`` over the
    ranks; other gradients are summed here. Without a ``group``, this rank has the whole
    batch.
    """

    def __init__(self, group: dist.ProcessGroup | None, module: nn.Module) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._averages = any(
            isinstance(part, DistributedDataParallel) for part in module.modules()
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
        """Pads the passes to the same number on all ranks; yields (part, is_real).

        A sharded model's passes involve all ranks. A rank with fewer parts repeats its
        first part, with zero weight.
        """
        if self.size == 1:
            yield from ((part, True) for part in parts)
            return
        local = self.together(lambda: list(parts))
        counts = torch.tensor([len(local), -len(local)], device=self._device)
        largest, smallest = self.reduce(counts, dist.ReduceOp.MAX).tolist()
        if smallest == 0 < largest:
            raise ConfigurationError(
                "A rank of the trainer has no part of the batch, and others have; give "
                "each rank at least one response."
            )
        yield from ((part, True) for part in local)
        yield from ((local[0], False) for _ in range(largest - len(local)))

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
        severity = worst = 0 if error is None else _kind_of(error)
        if self.size > 1:
            if error is not None and str(error) != _ELSEWHERE:
                # A rank still waiting in another collective blocks this rank.
                torchrl_logger.warning(
                    f"Rank {dist.get_rank()} of the trainer has an error, which ends "
                    f"this step on all ranks: {describe(error)}."
                )
            code = torch.tensor(severity, device=self._device)
            worst = int(self.reduce(code, dist.ReduceOp.MAX).item())
        if error is not None and severity == worst:
            raise error
        if worst:
            raise _KINDS[worst - 1](_ELSEWHERE) from error

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes gradients the sums over the ranks."""
        if self.size == 1:
            return
        copies, averages = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in parameters:
            averaged = self._averages or isinstance(parameter, DTensor)
            (averages if averaged else copies).append(parameter)
        scale_gradients(averages, self.size)
        if not copies:
            return
        # The tokens of a single rank may not reach all parameters, such as experts.
        has_grad = torch.tensor([p.grad is not None for p in copies]).int()
        on_any_rank = self.reduce(has_grad.to(self._device), dist.ReduceOp.MAX).tolist()
        for parameter, on_any in zip(copies, on_any_rank, strict=True):
            if on_any:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._group)

    @property
    def _device(self) -> torch.device:
        nccl = dist.get_backend(self._group) == "nccl"
        return torch.device("cuda" if nccl else "cpu")


def _kind_of(error: Exception) -> int:
    """Returns an error's severity, from 1; other kinds count as the last."""
    kinds = enumerate(_KINDS, 1)
    return next(
        (place for place, kind in kinds if isinstance(error, kind)), len(_KINDS)
    )


class Gradients:
    """Weighs the losses of parts, and finally their sums."""

    def __init__(self, ranks: LossRanks) -> None:
        self._ranks = ranks
        self._first: Tensor | None = None
        self._total: Tensor | None = None

    def weigh(self, count: Tensor) -> Tensor:
        """Returns the factor of a mean loss over ``count`` values.

        The first part has a factor of about 1, to keep sums in the range of a
        half-precision gradient.
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
        scale_gradients(trained, factor)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies gradients, or this rank's shards of sharded gradients.

    Grouped by device and type: a call costs 0.1 ms of Python per shard.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            kinds.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), grads in kinds.items():
        local_factor = factor.to(device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(grads, local_factor)


@contextmanager
def own_gradients(
    parameters: Iterable[nn.Parameter], ranks: LossRanks
) -> Iterator[Gradients]:
    """Keeps existing gradients apart from new gradients."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients_before = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    gradients = Gradients(ranks)
    try:
        yield gradients
        gradients.finish(trained)
    except BaseException:
        # The sum over some parts of a batch is not a gradient.
        for parameter in trained:
            parameter.grad = None
        raise
    finally:
        for parameter, old in zip(trained, gradients_before, strict=True):
            if old is not None:
                parameter.grad = (
                    old if parameter.grad is None else old.add_(parameter.grad)
                )
