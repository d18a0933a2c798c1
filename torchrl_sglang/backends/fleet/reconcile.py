"""``reconcile``: the next state and the actions after an event. Pure.

:func:`reconcile` takes the state of the fleet and an event, and returns the next state
and the actions to execute. Most events are observations of a server; a :class:`Tick`
compares desired and actual state, so a later tick repeats a failed action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchrl_sglang.backends.fleet.actions import (
    Action,
    CancelStart,
    Check,
    Confirm,
    Poll,
    Publish,
    Restart,
    Route,
    StartRouter,
    Stop,
    Tell,
)
from torchrl_sglang.backends.fleet.adapter_events import (
    advance,
    catch_up_with,
    give_wanted,
)
from torchrl_sglang.backends.fleet.replica import (
    LEAVING,
    REMOVED,
    Location,
    Replica,
    ServerHandle,
)
from torchrl_sglang.backends.fleet.resize_events import join, leave
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.fleet.step import Event, Step


def reconcile(
    state: FleetState, event: Event, now: float
) -> tuple[FleetState, tuple[Action, ...]]:
    """Returns the state after an event, and the actions to execute."""
    step = Step(state, now)
    event._apply(step)
    return step.state, tuple(step.actions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered(Event):
    """A server has answered a poll."""

    asked: Replica
    """The server's state when the poll began; an answer of an earlier start is ignored.
    """
    version: str
    start_id: str = ""
    """Id of its start; ``""``: not queried."""
    held: frozenset[str] | None = None
    """Its adapters; ``None``: it serves none."""
    confirmed: bool = False
    """Whether the serving servers have been polled since."""

    def _apply(self, step: Step) -> None:
        replica = step.same_start(self.asked)
        if replica is None:
            return
        if not self.confirmed:
            replica = self._take_over(step, replica)
            if self._needs_confirmation(step.state, replica):
                step.do(Confirm(rank=replica.rank))
                return
        current = step.state.weights.version
        if self.asked.version != replica.version == current != self.version:
            # An update has ended since the poll began.
            step.suspect(replica.url)
        else:
            catch_up_with(step, replica, self.version)
            step.decide(replica, self.version)
        give_wanted(step, replica.rank)
        advance(step)

    def _take_over(self, step: Step, replica: Replica) -> Replica:
        """Records the server's adapters, and whether it was restarted."""
        start_id, held, since = replica.start_id, self.held or frozenset(), self.asked
        if replica.state == "down" and not step.state.owns(replica):
            # The server may have been away when adapters were loaded, too.
            lacks = not step.state.wanted_adapters <= held
            same_start_id = bool(self.start_id) and self.start_id == start_id
            restarted = replica.restarted or lacks or not same_start_id
            since = step.take_back(replica, replica.reason, restarted=restarted)
            replica = since
        elif start_id and self.start_id and self.start_id != start_id:
            replica = step.put(replica, restarted=True)
        replica = step.put(replica, start_id=self.start_id or start_id)
        return step.put(replica.holding(held, since=since))

    def _needs_confirmation(self, state: FleetState, replica: Replica) -> bool:
        """Returns whether others may hold newer weights, or unknown adapters."""
        new_start = replica.restarted and self.held is not None
        current = self.version == state.weights.version
        return replica.state == "stale" and (new_start or current)


@dataclass(frozen=True, kw_only=True, slots=True)
class Silent(Event):
    """A server has not answered a poll, or not as expected."""

    asked: Replica
    """The server's state when the poll began."""
    reason: str
    unreachable: bool = True
    """Whether there was no answer at all."""

    def _apply(self, step: Step) -> None:
        replica = step.same_start(self.asked)
        # The processes of owned servers are watched.
        if replica is None or step.state.owns(replica) or replica.state == "leaving":
            return
        is_last = step.state.serving == (replica.url,)
        if replica.state == "serving" and not self.unreachable:
            return
        if replica.state == "serving" and is_last:
            # Its requests' errors are more specific than "no server is left".
            if not replica.unreachable:
                text = (
                    f"The server at {replica.url}, the only one that serves, does not "
                    f"answer; requests fail until it does: {self.reason}"
                )
                step.do(Tell(text=text))
            since = replica.away_since or step.now
            step.put(replica, reason=self.reason, away_since=since)
        elif replica.state != "down":
            text = f"The server at {replica.url} gets no requests until it answers"
            step.do(Tell(text=f"{text}: {self.reason}"))
            step.take_down(replica, self.reason, ended=False)
        else:
            step.put(replica, reason=self.reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Event):
    """A server's process has ended, or it hangs and is stopped."""

    replica: Replica
    reason: str

    def _apply(self, step: Step) -> None:
        replica = step.same_start(self.replica)
        if replica is None or not replica.runs:
            return
        leaves = replica.state == "leaving"
        replica = step.take_down(replica, self.reason, ended=True)
        if leaves:
            # It is not started again.
            step.put(replica, state="lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartNoticed(Event):
    """A server that seemed present was restarted by its owner."""

    rank: int
    start_id: str

    def _apply(self, step: Step) -> None:
        replica = step.state.find(self.rank)
        if replica is None:
            return
        replica = step.put(
            replica, start_id=self.start_id, restarted=True, released=frozenset()
        )
        if replica.state == "serving":
            step.move(replica, "stale", step.state.why_stale(replica))


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved(Event):
    """The directory of another owner has published its servers' addresses."""

    urls: tuple[str, ...]
    """An address for each rank; ``""``: ended; :data:`.REMOVED`: removed."""

    def _apply(self, step: Step) -> None:
        for rank, entry in enumerate(self.urls):
            url, replica = entry.removesuffix(LEAVING), step.state.find(rank)
            leaves = url != entry
            if replica is None:
                if url not in ("", REMOVED) and not leaves:
                    join(step, Replica(url=url), rank)
            elif step.state.owns(replica):
                continue
            elif url == REMOVED:
                leave(step, replica)
            elif url != replica.url:
                self._follow(step, replica, url)
            elif leaves != (replica.state == "leaving") and replica.runs:
                step.put(replica, state="leaving" if leaves else "stale")
                step.do(Check())

    def _follow(self, step: Step, replica: Replica, url: str) -> None:
        if replica.runs:
            reason = f"Its owner says that the server at {replica.url} ended."
            replica = step.take_down(replica, reason, ended=True)
        if url:
            replica = step.take_address(replica, url)
            step.take_back(replica, f"The server at {url} was started again.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Event):
    """A start of this engine's own server has ended well."""

    rank: int
    handle: ServerHandle
    url: str
    location: Location | None = None

    def _apply(self, step: Step) -> None:
        state, replica = step.state, step.state.find(self.rank)
        if replica is not None and replica.handle is self.handle:
            return
        if replica is None or state.closed or state.asleep:
            step.do(Stop(handle=self.handle))
            return
        replica = step.put(
            replica,
            restarts=replica.restarts + 1,
            handle=self.handle,
            location=self.location or replica.location,
            released=frozenset(),
        )
        replica = step.take_address(replica, self.url)
        step.take_back(replica, f"The server at {self.url} was started again.")
        step.do(Publish())


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFailed(Event):
    """A start of this engine's own server has failed."""

    rank: int
    reason: str
    counts: bool = True
    """Whether the server failed; ``False``: the start was cancelled, or had no room."""

    def _apply(self, step: Step) -> None:
        replica = step.state.find(self.rank)
        if replica is None:
            return
        step.put(
            replica,
            restarts=replica.restarts + self.counts,
            reason=f"The server at {replica.url} did not start: {self.reason}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(Event):
    """Time has passed. Conditions outside of the state are passed in, not stored."""

    max_restarts: int = 0
    """Largest number of restarts of a server."""
    starting: frozenset[int] = frozenset()
    """Ranks of the servers whose start is pending."""
    may_poll: bool = True
    """Whether a round of polls may begin."""
    router: bool | None = None
    """Whether the router runs; ``None``: there is none, or another owner has it."""
    may_start_router: bool = False
    """The router can be restarted now: no start is pending."""

    def _apply(self, step: Step) -> None:
        state = step.state
        if state.closed:
            return
        if self.may_poll and state.generates and state.to_poll:
            step.do(Poll())
        for replica in state.replicas:
            if replica.state == "down" and state.owns(replica):
                self._start_again(step, replica)
        if self.router is not None:
            self._route(step, frozenset(step.state.serving))
        advance(step)

    def _start_again(self, step: Step, replica: Replica) -> None:
        if step.state.asleep:
            # A trainer uses the GPU memory.
            if replica.rank in self.starting:
                step.do(CancelStart(rank=replica.rank))
            return
        if replica.rank in self.starting or replica.restart is None:
            return
        cause = replica.reason.partition("\n")[0].removesuffix(" The end of its log:")
        if replica.restarts >= self.max_restarts:
            step.put(replica, state="lost")
            text = (
                f"The server at {replica.url} was started again {replica.restarts} "
                f"times and has ended again; it is given up. {cause}"
            )
            step.do(Tell(text=text))
            return
        text = (
            f"The server at {replica.url} is started again ({replica.restarts + 1} "
            f"of {self.max_restarts}). {cause}"
        )
        step.do(Tell(text=text), Restart(rank=replica.rank))

    def _route(self, step: Step, serving: frozenset[str]) -> None:
        routed = step.state.in_router
        if self.router and routed != serving:
            step.do(Route(remove=routed - serving, add=serving - routed))
        elif not self.router and serving and self.may_start_router:
            step.do(StartRouter(urls=step.state.serving))


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspected(Event):
    """A request has failed, or a caller wants to poll servers."""

    url: str | None = None
    """The server; ``None``: each server."""

    def _apply(self, step: Step) -> None:
        step.suspect(self.url)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed(Event):
    """The state of the fleet changes without actions."""

    change: Callable[[FleetState], FleetState]

    def _apply(self, step: Step) -> None:
        step.state = self.change(step.state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(Event):
    """The state of a server's start changes without actions."""

    asked: Replica
    """The server's state when it was queried."""
    change: Callable[[Replica], Replica]

    def _apply(self, step: Step) -> None:
        if (replica := step.same_start(self.asked)) is not None:
            step.put(self.change(replica))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBegan(Event):
    """A weight update has begun."""

    def _apply(self, step: Step) -> None:
        step.set(updating=tuple((r.url, r.handle) for r in step.state.running))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateEnded(Event):
    """A weight update has ended."""

    version: str | None
    """Committed version; ``None``: the update failed."""

    def _apply(self, step: Step) -> None:
        if step.state.updating is None:
            return
        updated = dict(step.state.updating)
        step.set(updating=None)
        if updated != {replica.url: replica.handle for replica in step.state.running}:
            # The update may have formed its process group after it had joined.
            step.set(weights=step.state.weights.begin_membership_epoch())
        for replica in step.state.running if self.version is not None else ():
            # A server restarted during the update has not taken part.
            took_part = updated.get(replica.url, self) is replica.handle
            version = self.version if self.version and took_part else ""
            foreign = "" if took_part else replica.foreign_version
            now = step.put(replica, version=version, foreign_version=foreign)
            if replica.state == "leaving":
                continue
            if took_part and not step.state.misses_adapters(now):
                step.move(now, "serving", "")
            else:
                step.move(now, "stale", now.reason)
        step.do(Check())


@dataclass(frozen=True, kw_only=True, slots=True)
class FellAsleep(Event):
    """Memory is about to be released."""

    tags: frozenset[str]

    def _apply(self, step: Step) -> None:
        step.set(asleep=step.state.asleep | self.tags)
        step.do(Check())


@dataclass(frozen=True, kw_only=True, slots=True)
class WokeUp(Event):
    """Memory was resumed."""

    tags: frozenset[str]

    def _apply(self, step: Step) -> None:
        still = frozenset[str]().union(
            *(replica.released for replica in step.state.running)
        )
        step.set(asleep=step.state.asleep - (self.tags - still))
        step.do(Check())
