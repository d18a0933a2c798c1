"""Several ranks of a trainer make one update: all gather, the first one sends.

Every rank that holds a part of the model calls the sender. The first rank shares which
tensors to gather, sends them, and shares the outcome. Or each gathers them for its own
servers, bucket by bucket. Whatever goes wrong on the first rank, it takes part in every
collective that the others are in, so no rank is left in one. The process group's own
timeout limits how long a rank waits for another one.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from torchrl_sglang.errors import SGLangError, WeightSyncStateError, WeightTransferError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.sources.base import Dtypes, Source
from torchrl_sglang.weight_update.sources.served import ServedTensors
from torchrl_sglang.weight_update.transports.placement import names_of

NEXT_TURN = "next turn"
"""Message of the first rank before each turn."""


def find_ranks(source: Source, group: dist.ProcessGroup | None = None) -> Ranks | None:
    """Returns the ranks that hold a source together; None if this one holds it whole.

    They belong to its DTensors, or to ``group``.
    """
    groups = [] if group is None else [group]
    meshes = {spec.mesh for spec in source.specs.values() if spec.mesh is not None}
    if meshes and not groups:
        # Tensors on a part of the ranks are gathered by that part.
        mesh = max(meshes, key=lambda mesh: mesh.size())
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return Ranks(groups, _gpu_names(source)) if groups else None


def _gpu_names(source: Source) -> frozenset[str]:
    """Returns the names of this rank's GPU; none without one."""
    for spec in source.specs.values():
        if spec.device.type == "cuda":
            return names_of(spec.device)
        if spec.mesh is not None and spec.mesh.device_type == "cuda":
            return names_of(torch.device("cuda"))
    return frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Participation:
    """Message that makes the other ranks take part in sending."""

    plan: Any
    """The transport's plan, which can be pickled."""
    served: ServedTensors
    """The weights that the servers load."""


Follow: TypeAlias = Callable[[Source, Participation], None]
"""Takes part on another rank, until the first one has an outcome."""


class Ranks:
    """The ranks of a trainer that hold one model together."""

    def __init__(self, groups: list[Any], gpu: frozenset[str] = frozenset()) -> None:
        # Process groups of this rank, one for each dimension of the ranks' mesh.
        self._groups = groups
        # Names of this rank's GPU.
        self._gpu = gpu
        self._take_part = False
        self.outcome: Any = None
        """Last message of the first rank."""
        self.position = 0
        """Number of this rank in :meth:`exchange`."""
        self.gpus: tuple[frozenset[str], ...] = ()
        """Names of the GPU of each rank on this machine; empty: no rank has one."""
        self.served: ServedTensors | None = None
        """The weights that the servers load, on the first rank."""
        self.kept: list[Any] = []
        """Memory that servers may still read after an update that failed."""

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that talks to the servers."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def update(
        self,
        source: Source,
        send: Callable[[Source], SyncReport],
        follow: Follow | None = None,
    ) -> SyncReport:
        """Sends a source from the first rank; all ranks call this, each with its part.

        All return the first rank's report or raise its error. The first one calls
        ``send``; the others ``follow``, if the transport makes them take part.
        """
        machine = platform.node()
        places = self.exchange((machine, self._gpu))
        gpus = [gpu if node == machine else frozenset() for node, gpu in places]
        self.gpus = tuple(gpus) if any(gpus) else ()
        if self.sends:
            return self._lead(source, send)
        return self._follow(source, follow)

    def exchange(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the same order on all of them."""
        rank = dist.get_rank()
        values = {rank: value}
        try:
            for group in self._groups:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, values, group=group)
                values = {rank: value for part in parts for rank, value in part.items()}
        except RuntimeError as error:
            raise _lost(error) from error
        self.position = sorted(values).index(rank)
        return [values[rank] for rank in sorted(values)]

    def share(self, value: Any) -> Any:
        """Returns the first rank's value on all ranks."""
        try:
            for group in self._groups:
                # Along one dimension after the other it reaches the whole mesh.
                values = [value]
                dist.broadcast_object_list(values, group=group, group_src=0)
                value = values[0]
        except RuntimeError as error:
            raise _lost(error) from error
        return value

    def agree(self, problem: str | None) -> str | None:
        """Returns the problems of all ranks, or ``None`` if no rank has one."""
        for group in self._groups:
            problems: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(problems, problem, group=group)
            # Ranks of one column have the same by now.
            problem = " ".join(dict.fromkeys(p for p in problems if p)) or None
        return problem

    def begin(self, plan: Any) -> None:
        """Makes the other ranks take part, as they do in turns from then on.

        Raises:
            WeightSyncStateError: if a rank has other tensors.
        """
        assert self.served is not None
        self._take_part = True
        self.share(Participation(plan=plan, served=self.served))
        problem = self.agree(None)
        if problem is not None:
            raise WeightSyncStateError(problem)

    def begin_turn(self) -> None:
        """Begins a turn, in which all ranks make the same collective calls."""
        self.share(NEXT_TURN)

    def has_turn(self) -> bool:
        """Returns whether the first rank begins another turn, or has an outcome."""
        self.outcome = self.share(None)
        return isinstance(self.outcome, str) and self.outcome == NEXT_TURN

    def _lead(self, source: Source, send: Callable[[Source], SyncReport]) -> SyncReport:
        unread: Iterator[tuple[str, torch.Tensor]] | None = None

        def read(dtypes: Dtypes) -> Iterator[tuple[str, torch.Tensor]]:
            """Makes all ranks gather, and yields the gathered tensors."""
            nonlocal unread
            if self._take_part:
                return source.read(dtypes)
            if unread is not None:
                raise WeightSyncStateError(
                    "Tensors that are spread over ranks can be read once for an update."
                )
            unread = iter(())
            self.share(
                {name: (dtypes[name], source.specs[name].shape) for name in dtypes}
            )
            problem = self.agree(None)
            if problem is not None:
                raise WeightSyncStateError(problem)
            unread = source.read(dtypes)
            return _through(unread)

        outcome: Any = None
        try:
            outcome = send(replace(source, read=read))
        except BaseException as error:
            outcome = _portable(error)
            raise
        finally:
            # The other ranks have yet to gather the tensors that nobody read.
            try:
                deque(unread or (), maxlen=0)
            except Exception as error:  # noqa: BLE001 - The first error is raised.
                torchrl_logger.warning(f"Ranks could not gather to the end: {error}")
            self.share(outcome)
        report: SyncReport = outcome
        return report

    def _follow(self, source: Source, follow: Follow | None) -> SyncReport:
        message = self.share(None)
        if isinstance(message, Participation):
            assert follow is not None
            follow(source, message)
            message = self.outcome
        if isinstance(message, dict):
            if self.agree(_find_difference(source, message)) is None:
                dtypes = {name: dtype for name, (dtype, _) in message.items()}
                deque(source.read(dtypes), maxlen=0)
            message = self.share(None)
        if isinstance(message, BaseException):
            raise message
        report: SyncReport = message
        return report


def _lost(error: RuntimeError) -> WeightTransferError:
    return WeightTransferError(
        f"A rank of the trainer was lost during a weight update: {error}"
    )


def _through(
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    # Ending this generator does not end the one that the ranks are in.
    while (item := next(tensors, None)) is not None:
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
            local = "nothing of that name" if spec is None else tuple(spec.shape)
            return (
                f"Rank {dist.get_rank()} of the trainer has {local} where the first "
                f"one has {name} of shape {tuple(shape)}; send the same model on all "
                f"ranks."
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
