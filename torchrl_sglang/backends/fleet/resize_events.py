"""Events of joining and leaving servers, as pure transitions.

A joining server serves when it holds the current weights: it is polled first, like a
restarted server. A leaving server finishes its requests before it is removed, and takes
part in weight updates until then: no update breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrl_sglang.backends.fleet.actions import (
    CancelStart,
    Check,
    FailRequests,
    Publish,
    Stop,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.fleet.step import Event, Step
from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError
from torchrl_sglang.support.checks import some_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(Event):
    """Running servers have become servers of the engine, unless they cannot join."""

    replicas: tuple[Replica, ...]
    """New servers, without ranks; ranks are assigned on join."""

    def _apply(self, step: Step) -> None:
        check_can_join(step.state, [replica.url for replica in self.replicas])
        for replica in self.replicas:
            join(step, replica, step.state.next_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveBegan(Event):
    """Servers get no more requests, and finish their own, unless they cannot leave."""

    urls: tuple[str, ...]

    def _apply(self, step: Step) -> None:
        check_can_leave(step.state, self.urls)
        for replica in step.state.replicas:
            if replica.url in self.urls:
                # A dead server is not restarted while it leaves.
                state = "leaving" if replica.runs else "lost"
                step.put(replica, state=state, reason="It is being removed.")
                step.do(CancelStart(rank=replica.rank))
        step.do(Check(), Publish())


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveGivenUp(Event):
    """Leaving servers stay; they are polled before they serve again."""

    ranks: frozenset[int]

    def _apply(self, step: Step) -> None:
        for replica in step.state.replicas:
            if replica.rank not in self.ranks:
                continue
            if replica.state == "leaving":
                step.put(replica, state="stale", reason="It was to be removed.")
            elif replica.state == "lost":
                step.put(replica, state="down")
        step.do(Check(), Publish())


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Event):
    """Servers have finished their requests; not in the middle of a weight update."""

    ranks: frozenset[int]

    def _apply(self, step: Step) -> None:
        if step.state.updating is not None:
            return
        for replica in step.state.replicas:
            if replica.rank in self.ranks:
                leave(step, replica)
                if replica.handle is not None:
                    step.do(Stop(handle=replica.handle))


def join(step: Step, replica: Replica, rank: int) -> None:
    """Adds a running server; it is polled before it serves."""
    state = step.state
    new = replace(
        replica,
        rank=rank,
        state="stale",
        # It lacks the LoRA adapters.
        restarted=True,
        reason=f"The server at {replica.url} has joined.",
    )
    replicas = sorted([*state.replicas, new], key=lambda member: member.rank)
    step.set(replicas=tuple(replicas), next_rank=max(state.next_rank, rank + 1))
    _begin_membership_epoch(step)
    step.do(Check(), Publish())


def leave(step: Step, replica: Replica) -> None:
    """Removes a server; its waiting requests move elsewhere."""
    remaining = (m for m in step.state.replicas if m.rank != replica.rank)
    past = step.state.past_restarts + replica.restarts
    step.set(replicas=tuple(remaining), past_restarts=past)
    _begin_membership_epoch(step)
    step.do(
        FailRequests(url=replica.url),
        CancelStart(rank=replica.rank),
        Check(),
        Publish(),
    )


def _begin_membership_epoch(step: Step) -> None:
    # An update's process group consists of the running servers at its begin, and the
    # next epoch begins at its end.
    if step.state.updating is None:
        step.set(weights=step.state.weights.begin_membership_epoch())


def check_can_join(state: FleetState, urls: Sequence[str]) -> None:
    """Raises an error if servers cannot join now; see :class:`Joined`."""
    if state.closed:
        raise ServerUnavailableError(
            "The engine was shut down while servers were added; make a new one."
        )
    state.check_awake()
    urls_of_engine = {replica.url for replica in state.replicas}
    for url in urls:
        if url in urls_of_engine:
            raise ConfigurationError(f"{url} is a server of this engine already.")


def check_can_leave(state: FleetState, urls: Sequence[str]) -> None:
    """Raises an error if servers cannot leave now; see :class:`LeaveBegan`."""
    members = {replica.url: replica for replica in state.replicas}
    for url in urls:
        if url not in members:
            raise ConfigurationError(
                f"{url} is no server of this engine; its servers are "
                f"{', '.join(some_of(members))}."
            )
        if members[url].state == "leaving":
            raise ConfigurationError(f"{url} is being removed already.")
    remaining = [replica for replica in state.replicas if replica.url not in urls]
    if not any(replica.state != "leaving" for replica in remaining):
        raise ConfigurationError(
            f"Without {', '.join(some_of(urls))}, the engine has no server left. Add "
            f"another server first, or call shutdown()."
        )
    if state.serving and not any(replica.state == "serving" for replica in remaining):
        waiting = ", ".join(some_of(f"{r.url} is {r.status}" for r in remaining))
        raise ConfigurationError(
            f"Without {', '.join(some_of(urls))}, no server of the engine serves: "
            f"{waiting}. Remove it when another one serves; a server that was added "
            f"serves from the next weight update on."
        )
