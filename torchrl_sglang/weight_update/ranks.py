"""One update by several ranks: all gather, one sends, all learn how it ended.

Every rank that holds a part of the model calls the sender. The first one talks to the
servers; the others are told what to gather, gather it in the same order and let it go,
and wait for the outcome. Whatever goes wrong on the first rank, it still takes part in
every collective that the others are in, so nobody is left in one. How long a rank waits
for one that is gone, or for a server's time budget on the first rank, is the timeout of
the trainer's own process group.
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
from torchrl_sglang.weight_update.sources.tensors import Source, Wanted

__all__ = ["Ranks", "find_ranks", "is_copy"]

Send: TypeAlias = Callable[[Source], SyncReport]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """What the first rank tells the others to gather."""

    dtypes: Mapping[str, torch.dtype]
    """Name in the source -> type that it is served in."""
    shapes: Mapping[str, torch.Size]
    """Name -> shape, which must be the same everywhere."""


def find_ranks(source: Source, group: dist.ProcessGroup | None = None) -> Ranks | None:
    """Returns the ranks that hold the tensors of a source together.

    Args:
        source: tells, if its tensors are DTensors.
        group: the ranks, if the caller names them.

    Returns:
        ``None`` if this process holds them whole, and so sends by itself.
    """
    if group is not None:
        return Ranks([group])
    meshes = {known.mesh for known in source.found.values() if known.mesh is not None}
    if not meshes:
        return None
    # Tensors on a part of the ranks are gathered by that part.
    mesh = max(meshes, key=lambda mesh: mesh.size())
    return Ranks([mesh.get_group(dim) for dim in range(mesh.ndim)])


def is_copy(weights: Any) -> bool:
    """Returns whether another rank has the same model, and is the one to send it.

    That is so for ranks other than 0 of :class:`DistributedDataParallel`.
    """
    while isinstance(weights, nn.Module):
        if isinstance(weights, DistributedDataParallel):
            return dist.get_rank(weights.process_group) != 0
        inner = weights.model if isinstance(weights, LLMWrapperBase) else None
        weights = inner or getattr(weights, "_orig_mod", None)
    return False


class Ranks:
    """The ranks of a trainer that hold one model together.

    Args:
        groups: process groups that have this rank in common, one for each dimension of
            the mesh that all ranks form.
    """

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that talks to the servers."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def update(self, source: Source, send: Send) -> SyncReport:
        """Sends a source from the first rank; all ranks call this.

        Args:
            source: the same one on all ranks, each with its part.
            send: brings a source to the servers; called on the first rank.

        Returns:
            The first rank's report, on all of them.

        Raises:
            SGLangError: the first rank's error, on all of them.
            WeightTransferError: if the first rank failed with an error that is not
                one of this package, or is gone.
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
                _let_go(source.read(message.dtypes))
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
                box = [value]
                dist.broadcast_object_list(box, group=group, group_src=0)
                value = box[0]
        except RuntimeError as error:
            raise WeightTransferError(
                f"A rank of the trainer was lost during a weight update: {error}"
            ) from error
        return value

    def agree(self, problem: str | None) -> str | None:
        """Returns the problems of all ranks, or ``None`` if no rank has one."""
        for group in self._groups:
            told: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, problem, group=group)
            # Ranks of one column have the same by now.
            problem = " ".join(dict.fromkeys(each for each in told if each)) or None
        return problem


def _let_go(tensors: Iterable[Any]) -> None:
    """Reads to the end, and holds nothing while the next tensor is made."""
    deque(tensors, maxlen=0)


def _find_difference(source: Source, message: _Gather) -> str | None:
    for name, shape in message.shapes.items():
        known = source.found.get(name)
        if known is None or known.shape != shape:
            own = "nothing of that name" if known is None else tuple(known.shape)
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
        """Has all ranks gather, and yields what they have gathered."""
        if self._left is not None:
            raise WeightSyncStateError(
                "Tensors that are spread over ranks can be read once for an update."
            )
        self._left = iter(())
        self._ranks.share(
            _Gather(
                dtypes=dict(wanted),
                shapes={name: self._source.found[name].shape for name in wanted},
            )
        )
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
        """Takes part in what the other ranks have yet to gather."""
        try:
            _let_go(self._left or ())
        except Exception as error:  # noqa: BLE001 - The first error is the one to tell.
            torchrl_logger.warning(f"Ranks could not gather to the end: {error}")
