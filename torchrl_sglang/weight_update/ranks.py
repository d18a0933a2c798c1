"""Several ranks of a trainer make one update: all gather, the first one sends.

Every rank that holds a part of the model calls the sender. The first rank tells the
others which tensors to gather, sends them, and shares the outcome. Whatever goes wrong
there, it takes part in every collective that the others are in, so no rank is left in
one. The process group's own timeout limits how long a rank waits for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrl._utils import logger as torchrl_logger
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_sglang.errors import (
    SGLangError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.sources.base import Source, Wanted

__all__ = ["Ranks", "find_ranks", "is_copy"]

Send: TypeAlias = Callable[[Source], SyncReport]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """Tells the other ranks which tensors to gather."""

    dtypes: Mapping[str, torch.dtype]
    """Name in the source -> served type."""
    shapes: Mapping[str, torch.Size]
    """Name -> shape, which must be the same on all ranks."""


def find_ranks(source: Source, group: dist.ProcessGroup | None = None) -> Ranks | None:
    """Returns the ranks that hold a source together; None if this one holds it whole.

    They are those of its DTensors, or of ``group``.
    """
    if group is not None:
        return Ranks([group])
    meshes = {spec.mesh for spec in source.specs.values() if spec.mesh is not None}
    if not meshes:
        return None
    # Tensors on a part of the ranks are gathered by that part.
    mesh = max(meshes, key=lambda mesh: mesh.size())
    return Ranks([mesh.get_group(dim) for dim in range(mesh.ndim)])


def is_copy(weights: Any) -> bool:
    """Returns whether this is another rank than 0 of DistributedDataParallel."""
    while isinstance(weights, nn.Module):
        if isinstance(weights, DistributedDataParallel):
            return dist.get_rank(weights.process_group) != 0
        inner = weights.model if isinstance(weights, LLMWrapperBase) else None
        weights = inner or getattr(weights, "_orig_mod", None)
    return False


class Ranks:
    """The ranks of a trainer that hold one model together.

    ``groups`` are process groups of this rank, one per dimension of the ranks' mesh.
    """

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that talks to the servers."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def update(self, source: Source, send: Send) -> SyncReport:
        """Sends a source from the first rank; all ranks call this, each with its part.

        All return the first rank's report or raise its error.
        """
        if self.sends:
            return self._lead(source, send)
        return self._follow(source)

    def _lead(self, source: Source, send: Send) -> SyncReport:
        gathering = _Gathering(self, source)
        try:
            report = send(replace(source, read=gathering.read))
        except BaseException as error:
            gathering.finish()
            self.share(_portable(error))
            raise
        gathering.finish()
        self.share(report)
        return report

    def _follow(self, source: Source) -> SyncReport:
        message = self.share(None)
        if isinstance(message, _Gather):
            if self.agree(_find_difference(source, message)) is None:
                _exhaust(source.read(message.dtypes))
            message = self.share(None)
        if isinstance(message, BaseException):
            raise message
        report: SyncReport = message
        return report

    def share(self, value: Any) -> Any:
        """Returns the first rank's value on all ranks."""
        try:
            for group in self._groups:
                # Along one dimension after the other it reaches the whole mesh.
                values = [value]
                dist.broadcast_object_list(values, group=group, group_src=0)
                value = values[0]
        except RuntimeError as error:
            raise WeightTransferError(
                f"A rank of the trainer was lost during a weight update: {error}"
            ) from error
        return value

    def agree(self, problem: str | None) -> str | None:
        """Returns the problems of all ranks, or ``None`` if no rank has one."""
        for group in self._groups:
            problems: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(problems, problem, group=group)
            # Ranks of one column have the same by now.
            problem = " ".join(dict.fromkeys(p for p in problems if p)) or None
        return problem


def _exhaust(tensors: Iterable[Any]) -> None:
    """Reads to the end, and holds nothing while the next tensor is made."""
    deque(tensors, maxlen=0)


def _find_difference(source: Source, message: _Gather) -> str | None:
    for name, shape in message.shapes.items():
        spec = source.specs.get(name)
        if spec is None or spec.shape != shape:
            own = "nothing of that name" if spec is None else tuple(spec.shape)
            return (
                f"Rank {dist.get_rank()} of the trainer has {own} where the first one "
                f"has {name} of shape {tuple(shape)}; send the same model on all ranks."
            )
    return None


def _portable(error: BaseException) -> BaseException:
    """Returns the error as other ranks raise it."""
    if isinstance(error, SGLangError):
        return error
    return WeightTransferError(
        f"The rank that sends the weights failed: {type(error).__name__}: {error}",
        untouched=bool(getattr(error, "untouched", False)),
    )


class _Gathering:
    """Keeps the first rank in step with the others, also where nobody reads on."""

    def __init__(self, ranks: Ranks, source: Source) -> None:
        self._ranks = ranks
        self._source = source
        self._left: Iterator[tuple[str, torch.Tensor]] | None = None

    def read(self, wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
        """Makes all ranks gather, and yields the gathered tensors."""
        if self._left is not None:
            raise WeightSyncStateError(
                "Tensors that are spread over ranks can be read once for an update."
            )
        self._left = iter(())
        shapes = {name: self._source.specs[name].shape for name in wanted}
        self._ranks.share(_Gather(dtypes=dict(wanted), shapes=shapes))
        problem = self._ranks.agree(None)
        if problem is not None:
            raise WeightSyncStateError(problem)
        self._left = self._source.read(wanted)
        return self._through(self._left)

    @staticmethod
    def _through(
        left: Iterator[tuple[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # Ending this generator does not end the one that the ranks are in.
        while (item := next(left, None)) is not None:
            name, tensor = item
            del item
            yield name, tensor
            del tensor

    def finish(self) -> None:
        """Gathers the tensors that the other ranks have yet to gather."""
        try:
            _exhaust(self._left or ())
        except Exception as error:  # noqa: BLE001 - The first error is the one to raise.
            torchrl_logger.warning(f"Ranks could not gather to the end: {error}")
