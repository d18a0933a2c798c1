"""Several ranks of a trainer make one update: all gather, the first one sends.

Every rank that holds a part of the model calls the sender. The first rank tells the
others which tensors to gather, sends them, and shares the outcome. Whatever goes wrong
there, it takes part in every collective that the others are in, so no rank is left in
one. The process group's own timeout limits how long a rank waits for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.errors import SGLangError, WeightSyncStateError, WeightTransferError
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.sources.base import Source, Wanted


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


class Ranks:
    """The ranks of a trainer that hold one model together."""

    def __init__(self, groups: list[Any]) -> None:
        # Process groups of this rank, one for each dimension of the ranks' mesh.
        self._groups = groups

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that talks to the servers."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def update(
        self, source: Source, send: Callable[[Source], SyncReport]
    ) -> SyncReport:
        """Sends a source from the first rank; all ranks call this, each with its part.

        All return the first rank's report or raise its error.
        """
        if self.sends:
            return self._lead(source, send)
        return self._follow(source)

    def _lead(self, source: Source, send: Callable[[Source], SyncReport]) -> SyncReport:
        left: Iterator[tuple[str, torch.Tensor]] | None = None

        def read(wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
            """Makes all ranks gather, and yields the gathered tensors."""
            nonlocal left
            if left is not None:
                raise WeightSyncStateError(
                    "Tensors that are spread over ranks can be read once for an update."
                )
            left = iter(())
            self.share(
                {name: (wanted[name], source.specs[name].shape) for name in wanted}
            )
            problem = self.agree(None)
            if problem is not None:
                raise WeightSyncStateError(problem)
            left = source.read(wanted)
            return _through(left)

        outcome: Any = None
        try:
            outcome = send(replace(source, read=read))
        except BaseException as error:
            outcome = _portable(error)
            raise
        finally:
            # The other ranks have yet to gather the tensors that nobody read.
            try:
                deque(left or (), maxlen=0)
            except Exception as error:  # noqa: BLE001 - The first error is raised.
                torchrl_logger.warning(f"Ranks could not gather to the end: {error}")
            self.share(outcome)
        report: SyncReport = outcome
        return report

    def _follow(self, source: Source) -> SyncReport:
        message = self.share(None)
        if isinstance(message, dict):
            if self.agree(_find_difference(source, message)) is None:
                wanted = {name: dtype for name, (dtype, _) in message.items()}
                deque(source.read(wanted), maxlen=0)
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


def _through(
    left: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    # Ending this generator does not end the one that the ranks are in.
    while (item := next(left, None)) is not None:
        name, tensor = item
        del item
        yield name, tensor
        del tensor


def _find_difference(
    source: Source, message: Mapping[str, tuple[torch.dtype, torch.Size]]
) -> str | None:
    for name, (_, shape) in message.items():
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
