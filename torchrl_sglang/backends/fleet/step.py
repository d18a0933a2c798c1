"""State changes and actions of an event."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from torchrl_sglang.backends.fleet.actions import (
    Action,
    Check,
    FailRequests,
    Publish,
    Recall,
    Tell,
)
from torchrl_sglang.backends.fleet.replica import Replica, ReplicaState
from torchrl_sglang.backends.fleet.state import FleetState


class Step:
    """The state during an event, and its actions so far."""

    def __init__(self, state: FleetState, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def do(self, *actions: Action) -> None:
        """Adds actions."""
        self.actions.extend(actions)

    def set(self, **fields: Any) -> None:
        """Changes the state of the fleet."""
        self.state = replace(self.state, **fields)

    def put(self, replica: Replica, **fields: Any) -> Replica:
        """Changes the state of a server, and returns it."""
        replica = replace(replica, **fields)
        self.state = self.state.with_replicas(replica)
        return replica

    def same_start(self, asked: Replica) -> Replica | None:
        """Returns the current state of a server; ``None`` if it is another start."""
        now = self.state.find(asked.rank)
        if now is None or now.url != asked.url or now.handle is not asked.handle:
            return None
        return now

    def move(self, replica: Replica, state: ReplicaState, reason: str) -> Replica:
        """Changes whether a server gets requests."""
        previous, away_since = replica.state, replica.away_since
        replica = self.put(replica, state=state, reason=reason)
        if state == "serving":
            replica = self.put(replica, restarted=False, away_since=None)
            if away_since is not None:
                self.do(
                    Tell(
                        text=f"The server at {replica.url} serves again, after "
                        f"{self.now - away_since:.0f} s.",
                        warning=False,
                    )
                )
        elif state != previous:
            # The epoch of a returning server began when it came back.
            self.set(weights=self.state.weights.begin_membership_epoch())
        if state != previous:
            self.do(Check())
        return replica

    def take_down(self, replica: Replica, reason: str, *, ended: bool) -> Replica:
        """Takes a server out of rotation; if it ``ended``, its requests fail now."""
        replica = self.move(replica, "down", reason)
        replica = self.put(replica, away_since=replica.away_since or self.now)
        if ended:
            self.do(FailRequests(url=replica.url), Recall(handle=replica.handle))
        self.do(Publish())
        return replica

    def take_address(self, replica: Replica, url: str) -> Replica:
        """Adopts the address of a restarted server."""
        if url == replica.url:
            return replica
        text = f"The server at {replica.url} is now at {url}."
        # A poll may have begun after its end.
        self.do(Tell(text=text, warning=False), FailRequests(url=replica.url))
        return self.put(replica, url=url)

    def take_back(
        self, replica: Replica, reason: str, *, restarted: bool = True
    ) -> Replica:
        """Adopts a restarted server; it is polled before it serves."""
        replica = self.put(
            replica,
            start_id="",
            restarted=restarted,
            held_adapters=frozenset(),
            version="",
            released=frozenset() if restarted else replica.released,
        )
        return self.move(replica, "stale", reason)

    def suspect(self, url: str | None = None) -> None:
        """Requests a poll of a server, or of each server, although it serves."""
        matching = (r for r in self.state.replicas if url in (None, r.url))
        suspected = (replace(replica, suspected=True) for replica in matching)
        self.state = self.state.with_replicas(*suspected)
        self.do(Check())

    def decide(self, replica: Replica, version: str) -> None:
        """Lets a server serve, or not, according to its weights and adapters."""
        replica, state = self.put(replica, version=version), self.state
        if state.closed or not replica.runs or replica.state == "leaving":
            return
        if state.updating is not None:
            # The version is void during an update; the server is polled afterwards.
            self.put(replica, suspected=True)
            return
        newer = state.weights.observe(version)
        if newer is not state.weights:
            self.set(weights=newer)
            # The others are polled before their answers count.
            self.suspect()
            replica = self.put(replica, suspected=False)
        reason = self.state.why_stale(replica)
        if reason and replica.state == "serving":
            self.do(Tell(text=f"{reason} It gets no requests."))
        self.move(replica, "stale" if reason else "serving", reason)


class Event(ABC):
    """An event of the fleet."""

    __slots__ = ()

    @abstractmethod
    def _apply(self, step: Step) -> None:
        """Changes the state and adds actions."""
