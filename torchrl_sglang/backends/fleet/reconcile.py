"""``reconcile``: the next state and the actions after an event. Pure.

:func:`reconcile` takes the state of the fleet and one event, and returns the next state
and the actions that it calls for. Some events say what a server reported or did; a
:class:`Tick` compares what should be with what is, so an action that failed is called
for again by the next one.
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
    """Returns the state after an event, and what has to be done.

    Args:
        state: what was known before.
        event: an observation, a call of a user, or the end of an action.
        now: seconds on the monotonic clock.
    """
    step = Step(state, now)
    event._apply(step)
    return step.state, tuple(step.actions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered(Event):
    """A server has answered a poll."""

    asked: Replica
    """The server as it was asked; the answer of an earlier start counts no more."""
    version: str
    """Weight version of the server."""
    start_id: str = ""
    """The id of its start; ``""``: not asked."""
    held: frozenset[str] | None = None
    """The adapters that it holds; ``None``: it takes none."""
    confirmed: bool = False
    """Whether servers that serve have been asked since."""

    def _apply(self, step: Step) -> None:
        replica = step.same_start(self.asked)
        if replica is None:
            return
        if not self.confirmed:
            replica = self._take_over(step, replica)
            if self._needs_confirmation(step.state, replica):
                step.do(Confirm(rank=replica.rank))
                return
        catch_up_with(step, replica, self.version)
        step.decide(replica, self.version)
        give_wanted(step, replica.rank)
        advance(step)

    def _take_over(self, step: Step, replica: Replica) -> Replica:
        """Records what the server holds, and whether it was started again."""
        known, held, since = replica.start_id, self.held or frozenset(), self.asked
        if replica.state == "down" and not step.state.owns(replica):
            # The server may have been away when adapters were loaded, too.
            lacks = not step.state.wanted_adapters <= held
            same = bool(self.start_id) and self.start_id == known
            restarted = replica.restarted or lacks or not same
            since = step.take_back(replica, replica.reason, restarted=restarted)
            replica = since
        elif known and self.start_id and self.start_id != known:
            replica = step.put(replica, restarted=True)
        replica = step.put(replica, start_id=self.start_id or known)
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
    """The server as it was asked."""
    reason: str
    unreachable: bool = True
    """Whether there was no answer at all."""

    def _apply(self, step: Step) -> None:
        replica = step.same_start(self.asked)
        # The process of a server of our own is watched.
        if replica is None or step.state.owns(replica) or replica.state == "leaving":
            return
        last = step.state.serving == (replica.url,)
        if replica.state == "serving" and not self.unreachable:
            return
        if replica.state == "serving" and last:
            # The outcome of its requests says more than that no server is left.
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
    """The server as it was found."""
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
    """A server that did not seem to be away was started again by its owner."""

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
    """The directory of another owner says where its servers run."""

    urls: tuple[str, ...]
    """An address for each rank; ``""``: it has ended; :data:`.REMOVED`: no more."""

    def _apply(self, step: Step) -> None:
        for rank, told in enumerate(self.urls):
            url, replica = told.removesuffix(LEAVING), step.state.find(rank)
            leaves = url != told
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
    """Time has passed. What runs outside is observed, and not remembered."""

    max_restarts: int = 0
    """Most starts of a server after its first."""
    starting: frozenset[int] = frozenset()
    """Ranks of the servers that are being started."""
    may_poll: bool = True
    """Whether a round of polls may begin."""
    router: bool | None = None
    """Whether the router runs; ``None``: there is none, or another owner has it."""
    may_start_router: bool = False
    """Whether the router can be started again, and is not being started."""

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
            # A trainer uses the memory that it would take.
            if replica.rank in self.starting:
                step.do(CancelStart(rank=replica.rank))
            return
        if replica.rank in self.starting or replica.restart is None:
            return
        why = replica.reason.partition("\n")[0].removesuffix(" The end of its log:")
        if replica.restarts >= self.max_restarts:
            step.put(replica, state="lost")
            text = (
                f"The server at {replica.url} was started again {replica.restarts} "
                f"times and has ended again; it is given up. {why}"
            )
            step.do(Tell(text=text))
            return
        text = (
            f"The server at {replica.url} is started again ({replica.restarts + 1} "
            f"of {self.max_restarts}). {why}"
        )
        step.do(Tell(text=text), Restart(rank=replica.rank))

    def _route(self, step: Step, serving: frozenset[str]) -> None:
        known = step.state.in_router
        if self.router and known != serving:
            step.do(Route(remove=known - serving, add=serving - known))
        elif not self.router and serving and self.may_start_router:
            step.do(StartRouter(urls=step.state.serving))


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspected(Event):
    """A request has failed, or a caller wants to know."""

    url: str | None = None
    """The server; ``None``: each one."""

    def _apply(self, step: Step) -> None:
        step.suspect(self.url)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed(Event):
    """Something is known of the fleet that calls for nothing."""

    change: Callable[[FleetState], FleetState]

    def _apply(self, step: Step) -> None:
        step.state = self.change(step.state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(Event):
    """Something is known of one start of a server that calls for nothing."""

    asked: Replica
    """The server as it was asked."""
    change: Callable[[Replica], Replica]

    def _apply(self, step: Step) -> None:
        if (replica := step.same_start(self.asked)) is not None:
            step.put(self.change(replica))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBegan(Event):
    """A weight update has begun."""

    def _apply(self, step: Step) -> None:
        step.set(updating=tuple((each.url, each.handle) for each in step.state.running))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateEnded(Event):
    """A weight update has ended."""

    version: str | None
    """Version that it committed; ``None``: it failed."""

    def _apply(self, step: Step) -> None:
        if step.state.updating is None:
            return
        updated = dict(step.state.updating)
        step.set(updating=None)
        if updated != {each.url: each.handle for each in step.state.running}:
            # The update may have formed its process group after it had joined.
            step.set(weights=step.state.weights.begin_membership_epoch())
        for replica in step.state.running if self.version is not None else ():
            # A server that was started again meanwhile has not taken part.
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
        still = frozenset[str]().union(*(each.released for each in step.state.running))
        step.set(asleep=step.state.asleep - (self.tags - still))
        step.do(Check())
