"""Several ranks of a trainer make one update: all gather, the first one sends.

Every rank that holds a part of the model calls the sender. The first rank tells the
others which tensors to gather, sends them, and shares the outcome. Or each gathers them
for servers of its own, bucket by bucket. Whatever goes wrong on the first rank, it
takes part in every collective that the others are in, so no rank is left in one. The
process group's own timeout limits how long a rank waits for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from torchrl_sglang.errors import SGLangError, WeightSyncStateError, WeightTransferError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import FusedParameter, ModelMetadata, SyncReport
from torchrl_sglang.weight_update.sources.base import Source, Wanted

GO_ON = "go on"
"""What the first rank says before each turn."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the other ranks have to know to take part in sending."""

    plan: Any
    """As the transport has it, which can be pickled."""
    served: ModelMetadata
    """Tensors that the servers take."""
    fused: Mapping[str, FusedParameter] | None
    """Those that are sent in parts."""
    quantized: str | None
    """What the weights are encoded for, by ``ServerCapabilities.quantized``."""


Follow: TypeAlias = Callable[["Ranks", Source, Plan], None]
"""Takes part on another rank, until the first one has an outcome."""


class Ranks:
    """The ranks of a trainer that hold one model together."""

    def __init__(self, groups: list[Any]) -> None:
        # Process groups of this rank, one for each dimension of the ranks' mesh.
        self._groups = groups
        self.takes_part = False
        """Whether the other ranks read the tensors themselves in this update."""
        self.outcome: Any = None
        """What the first rank has said at the end."""
        self.position = 0
        """Number of this rank in :meth:`exchange`."""
        self.kept: list[Any] = []
        """What servers may still read after an update that failed."""

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that talks to the servers."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def update(
        self,
        source: Source,
        send: Callable[[Source], SyncReport],
        *,
        facts: Any = None,
        follow: Follow | None = None,
    ) -> SyncReport:
        """Sends a source from the first rank; all ranks call this, each with its part.

        All return the first rank's report or raise its error.

        Args:
            source: this rank's.
            send: called on the first rank.
            facts: what the first rank's transport has to know of this rank.
            follow: called on the others, if the transport makes them take part.
        """
        known = self.exchange(facts)
        if self.sends:
            peers = Peers(ranks=self, facts=tuple(known))
            return self._lead(replace(source, peers=peers), send)
        return self._follow(source, follow)

    def exchange(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the same order on all of them."""
        own = dist.get_rank()
        found = {own: value}
        try:
            for group in self._groups:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, found, group=group)
                found = {rank: each for part in parts for rank, each in part.items()}
        except RuntimeError as error:
            raise _lost(error) from error
        self.position = sorted(found).index(own)
        return [found[rank] for rank in sorted(found)]

    def goes_on(self) -> bool:
        """Returns whether the first rank takes another turn, or has an outcome."""
        self.outcome = self.share(None)
        return isinstance(self.outcome, str) and self.outcome == GO_ON

    def _lead(self, source: Source, send: Callable[[Source], SyncReport]) -> SyncReport:
        left: Iterator[tuple[str, torch.Tensor]] | None = None

        def read(wanted: Wanted) -> Iterator[tuple[str, torch.Tensor]]:
            """Makes all ranks gather, and yields the gathered tensors."""
            nonlocal left
            if self.takes_part:
                return source.read(wanted)
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

    def _follow(self, source: Source, follow: Follow | None) -> SyncReport:
        message = self.share(None)
        if isinstance(message, Plan):
            assert follow is not None
            follow(self, source, message)
            message = self.outcome
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """The ranks that hold the weights of an update, as the first one's transport."""

    ranks: Ranks
    """To talk to them."""
    facts: tuple[Any, ...]
    """What each rank has told of itself."""
    served: ModelMetadata = field(default_factory=dict)
    """Tensors that the servers take."""
    fused: Mapping[str, FusedParameter] | None = None
    """Those that are sent in parts."""
    quantized: str | None = None
    """What the weights are encoded for, by ``ServerCapabilities.quantized``."""

    def serving(
        self, served: ModelMetadata, fused: Mapping[str, FusedParameter] | None
    ) -> Peers:
        """Returns them, knowing what the servers take."""
        return replace(self, served=served, fused=fused)

    def begin(self, plan: Any) -> None:
        """Makes the others take part, as they do in turns from then on.

        Raises:
            WeightSyncStateError: if a rank has other tensors.
        """
        self.ranks.takes_part = True
        told = Plan(
            plan=plan,
            served=self.served,
            fused=self.fused,
            quantized=self.quantized,
        )
        self.ranks.share(told)
        problem = self.ranks.agree(None)
        if problem is not None:
            raise WeightSyncStateError(problem)

    def go_on(self) -> None:
        """Begins a turn, in which all ranks make the same collective calls."""
        self.ranks.share(GO_ON)


def _lost(error: RuntimeError) -> WeightTransferError:
    return WeightTransferError(
        f"A rank of the trainer was lost during a weight update: {error}"
    )


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
