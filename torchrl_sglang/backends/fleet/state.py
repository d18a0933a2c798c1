"""``FleetState``: the immutable state of an engine's servers.

Only :func:`.reconcile` makes the next state.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchrl_sglang.backends.fleet.adapters import AdapterState
from torchrl_sglang.backends.fleet.replica import Replica, ServerHandle, format_tags
from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.errors import (
    ServerDiedError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.support.checks import some_of


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """The condition of an engine's servers."""

    replicas: tuple[Replica, ...]
    """The servers, in the order of their ranks. A removed server leaves a gap."""
    weights: ServedWeights
    owner: int
    """Id of the process that started the servers with a handle."""
    starts_more: bool = False
    """Whether the process with this id can start more."""
    next_rank: int = 0
    """Rank of the next server to join; ranks of removed servers are not reused."""
    past_restarts: int = 0
    """Number of restarts of servers that were removed since."""
    asleep: frozenset[str] = frozenset()
    """Kinds of released memory: no requests, and no server starts."""
    draining: bool = False
    """Whether running requests finish and new requests are refused."""
    paused: bool = False
    """Whether this engine object paused generation."""
    closed: bool = False
    updating: tuple[tuple[str, ServerHandle | None], ...] | None = None
    """Servers of the weight update in progress, as they ran when it began."""
    adapters: AdapterState = field(default_factory=AdapterState)
    in_router: frozenset[str] = frozenset()

    def with_replicas(self, *changed: Replica) -> FleetState:
        """Returns the state with other values for some servers."""
        new = {replica.rank: replica for replica in changed}
        replicas = tuple(new.get(replica.rank, replica) for replica in self.replicas)
        return replace(self, replicas=replicas)

    def without_suspicion(self, ranks: Iterable[int]) -> FleetState:
        """Returns the state after the start of a poll of these servers."""
        polled = {*ranks}
        return self.with_replicas(
            *(replace(r, suspected=False) for r in self.replicas if r.rank in polled)
        )

    def without_adapters(
        self, names: Set[str], *, kept: Collection[str] = ()
    ) -> FleetState:
        """Returns the state after servers, except ``kept``, dropped LoRA adapters."""
        dropped = [
            replace(replica, held_adapters=replica.held_adapters - names)
            for replica in self.replicas
            if replica.url not in kept
        ]
        adapters = replace(self.adapters, pinned=self.adapters.pinned - names)
        return replace(self.with_replicas(*dropped), adapters=adapters)

    # Servers.

    def find(self, rank: int) -> Replica | None:
        """Returns the server of a rank; ``None`` if it was removed."""
        # Usually no server was removed.
        if rank < len(self.replicas) and self.replicas[rank].rank == rank:
            return self.replicas[rank]
        return next(
            (replica for replica in self.replicas if replica.rank == rank), None
        )

    @property
    def running(self) -> list[Replica]:
        """Running servers, in the order of their ranks."""
        return [replica for replica in self.replicas if replica.runs]

    @cached_property
    def urls(self) -> tuple[str, ...]:
        """Running servers; in a weight update, the running servers at its begin."""
        if self.updating is not None:
            return tuple(url for url, _ in self.updating)
        return tuple(replica.url for replica in self.running)

    @cached_property
    def serving(self) -> tuple[str, ...]:
        """Servers in rotation."""
        return tuple(r.url for r in self.replicas if r.state == "serving")

    @property
    def restarting(self) -> list[str]:
        """Ended servers, being restarted."""
        return [r.url for r in self.replicas if r.state == "down" and self.owns(r)]

    @property
    def to_poll(self) -> list[Replica]:
        """Servers out of rotation or suspected; in a copy with inconsistent weights,
        all of them.

        Ended servers of this engine are excluded: they are restarted.
        """
        return [
            replica
            for replica in self.replicas
            if replica.state == "stale"
            or (replica.state == "down" and not self.owns(replica))
            or (replica.state == "serving" and replica.suspected)
            or replica.unreachable
            or (replica.state == "serving" and self.weights.second_hand)
        ]

    @property
    def needs_poll(self) -> bool:
        """Whether there are servers to poll, or to start again."""
        return bool(self.to_poll) or len(self.serving) < len(self.replicas)

    @property
    def owns_any(self) -> bool:
        """Whether this process started a server, or can start more."""
        if self.starts_more and self.owner == os.getpid():
            return True
        return any(map(self.owns, self.replicas))

    def owns(self, replica: Replica) -> bool:
        """Returns whether this process started a server, and restarts it."""
        return replica.handle is not None and self.owner == os.getpid()

    # Whether they generate.

    @property
    def generates(self) -> bool:
        """Whether servers should generate: no update, pause or sleep."""
        stopped = self.paused or self.draining or self.asleep
        updating = self.updating is not None
        mixed = self.weights.inconsistent and not self.weights.second_hand
        return not (stopped or updating or mixed)

    @property
    def may_look(self) -> bool:
        """Whether polls are conclusive: no update, drain or sleep is in progress.

        They are after a failed update has left servers paused: a server may be gone,
        and the next update is for the others.
        """
        return not (self.draining or self.asleep or self.updating is not None)

    @property
    def awaits_weights(self) -> bool:
        """Whether no server serves, and a restarted server waits for weights."""
        stale = any(replica.state == "stale" for replica in self.replicas)
        return stale and not self.serving and self.generates

    @property
    def wanted_adapters(self) -> frozenset[str]:
        """Served names of the wanted LoRA adapters."""
        return self.adapters.names

    @property
    def most_adapters(self) -> int:
        """Number of adapters on the fullest server, possible loads included."""
        places = set(self.adapters.sending)
        for replica in self.running:
            places |= {(replica.rank, adapter) for adapter in replica.held_adapters}
        return max(Counter(rank for rank, _ in places).values(), default=0)

    def misses_adapters(self, replica: Replica) -> bool:
        """Returns whether a restarted server lacks wanted adapters."""
        return replica.restarted and not self.wanted_adapters <= replica.held_adapters

    def why_stale(self, replica: Replica) -> str:
        """Returns the reason why a server must not get requests; ``""`` if it may."""
        current = self.weights.version
        if replica.version == current == replica.foreign_version:
            return (
                f"The server at {replica.url} joined with weights of version "
                f"{current!r}, which this engine has not sent there."
            )
        if replica.version != current:
            return (
                f"The server at {replica.url} has weights of version "
                f"{replica.version!r}, and the current ones are {current!r}."
            )
        if not self.misses_adapters(replica):
            return ""
        missing = ", ".join(sorted(self.wanted_adapters - replica.held_adapters))
        return (
            f"The server at {replica.url} was started again without the LoRA adapters "
            f"{missing}. The engine object that has loaded them loads them again; if "
            f"it is gone, unload them."
        )

    # Reports to users.

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence on each server out of service, at most the first few."""
        away = (r for r in self.replicas if r.state != "serving" or r.unreachable)
        return tuple(some_of(map(_problem, away)))

    @property
    def base_problem(self) -> str | None:
        """Reason why adapters must not be trained over the servers' weights."""
        now = self.weights
        if now.inconsistent is not None and not now.base_intact:
            return f"The weights of the servers are inconsistent: {now.inconsistent}"
        stale = (replica for replica in self.replicas if replica.state == "stale")
        # Others only wait for their adapters.
        if any(replica.version != now.version for replica in stale):
            return "A server that was started again holds other weights than the rest."
        if now.version != now.checkpoint_version:
            return (
                f"The servers hold weights of version {now.version!r}, not the "
                f"checkpoint that they were started with."
            )
        return None

    def check_awake(self) -> None:
        """Raises :class:`WeightSyncStateError` while requests are refused."""
        if self.asleep:
            raise WeightSyncStateError(
                f"The engine is asleep ({format_tags(self.asleep)}) and does not "
                f"generate; call wake_up() first."
            )
        if self.draining:
            raise WeightSyncStateError(
                "The engine is being put to sleep and takes no more requests; call "
                "wake_up() when it is asleep."
            )

    def check_weights_awake(self) -> None:
        """Raises :class:`WeightSyncStateError` if new weights have no memory."""
        if "weights" in self.asleep:
            raise WeightSyncStateError(
                "The weights are asleep, and an update would have no memory to go to; "
                "call wake_up('weights') first."
            )

    def no_server_error(self) -> SGLangError:
        """Returns the error for an engine without a server in rotation."""
        stale = [replica for replica in self.replicas if replica.state == "stale"]
        reasons = _reasons(stale or self.replicas, " " if stale else "\n")
        current = (r for r in stale if r.version == self.weights.version)
        if any(map(self.misses_adapters, current)):
            return ServerUnavailableError(
                f"The servers that run were started again and are being given their "
                f"LoRA adapters; try again in a few seconds. {reasons}"
            )
        if stale:
            return WeightSyncStateError(
                f"No server has the current weights. {reasons} They generate again "
                f"after the next weight update; send the weights."
            )
        if all(replica.handle is not None for replica in self.replicas):
            return ServerDiedError(
                f"No server of the engine is left; each is started again up to "
                f"max_restarts times. {reasons}"
            )
        return ServerUnavailableError(f"No server of the engine is left. {reasons}")


def _reasons(replicas: Sequence[Replica], between: str) -> str:
    return between.join(some_of(filter(None, (replica.reason for replica in replicas))))


def _problem(replica: Replica) -> str:
    # The rest is usually the end of a log.
    reason = replica.reason.partition("\n")[0] or "The reason is unknown."
    return f"The server at {replica.url} is {replica.status}. {reason}"
