"""What follows when something happens to a server: random histories of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from torchrl_sglang.backends.fleet.actions import (
    CancelStart,
    Confirm,
    FailRequests,
    Poll,
    ReloadAdapters,
    Restart,
    Route,
    Stop,
    Tell,
)
from torchrl_sglang.backends.fleet.reconcile import (
    AdaptersWanted,
    Answered,
    Changed,
    Ended,
    Event,
    FellAsleep,
    Learned,
    Moved,
    RestartNoticed,
    Silent,
    Started,
    StartFailed,
    Suspected,
    Tick,
    UpdateBegan,
    UpdateEnded,
    WokeUp,
    reconcile,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.fleet.weights_state import ServedWeights, version_order

SERVERS = 3
HISTORIES = 600
EVENTS = 80
MAX_RESTARTS = 2
MEMORY = frozenset({"weights", "kv_cache"})

TWICE_IS_TWO = StartFailed
"""The event that counts. Every other one may be told twice."""


@dataclass(eq=False)
class Server:
    """A server as it is, whatever is known of it."""

    url: str
    start_id: str
    version: str = "default"
    adapters: set[str] = field(default_factory=set)
    alive: bool = True
    reached: bool = True
    """Whether there is a connection."""


@dataclass(eq=False)
class World:
    """Servers, an engine that knows some of it, and what is on its way between them."""

    random: Random
    owned: bool
    starts: int = 0
    now: float = 0.0
    number: int = 0
    """Version of the last update."""
    starting: dict[int, Server] = field(default_factory=dict)
    late: list[Event] = field(default_factory=list)
    """Observations that have not arrived."""
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.servers = [self.start(rank) for rank in range(SERVERS)]
        anything: Any = object()
        replicas = [
            Replica(
                url=server.url,
                rank=rank,
                handle=self.handle(server),
                restart=(lambda: anything) if self.owned else None,
                start_id=server.start_id,
                version="default",
            )
            for rank, server in enumerate(self.servers)
        ]
        self.state = FleetState(
            replicas=tuple(replicas),
            weights=ServedWeights.reported("default"),
            owner=os.getpid(),
            in_router=frozenset(server.url for server in self.servers),
        )

    def start(self, rank: int) -> Server:
        self.starts += 1
        # Now and then on another machine.
        place = self.starts if self.random.random() < 0.3 else 0
        return Server(url=f"http://{rank}:{place}", start_id=str(self.starts))

    def handle(self, server: Server) -> Any:
        return server if self.owned else None

    # The engine.

    def apply(self, event: Event) -> tuple[Any, ...]:
        self.now += 1.0
        before = self.state
        self.state, actions = reconcile(before, event, self.now)
        assert (self.state, actions) == reconcile(before, event, self.now)
        if not isinstance(event, TWICE_IS_TWO):
            assert reconcile(self.state, event, self.now)[0] == self.state, event
        self.told += [each.text for each in actions if isinstance(each, Tell)]
        self.check(before, event, actions)
        return actions

    def check(self, before: FleetState, event: Event, actions: tuple[Any, ...]) -> None:
        """What holds after every event."""
        state = self.state
        if not isinstance(event, AdaptersWanted):
            assert state.wanted_adapters == before.wanted_adapters
        ran = {(each.url, each.handle) for each in before.running}
        run = {(each.url, each.handle) for each in state.running}
        epochs = before.weights.membership_epoch, state.weights.membership_epoch
        assert epochs[1] > epochs[0] if ran != run else epochs[1] >= epochs[0]
        for replica in state.replicas:
            if replica.state == "lost":
                assert any(replica.url in each for each in self.told)
                assert any(replica.url in each for each in state.problems)
        if isinstance(event, Ended):
            ended = {url for url, _ in ran - run}
            failed = {a.url for a in actions if isinstance(a, FailRequests)}
            assert ended == failed
        if state.updating is not None and before.updating is not None:
            assert state.urls == before.urls
        if self.owned:
            self.check_what_serves()

    def check_what_serves(self) -> None:
        """The servers of one engine alone hold what it believes, at every moment."""
        state = self.state
        if state.updating is not None or state.weights.inconsistent:
            return
        for replica, server in zip(state.replicas, self.servers, strict=True):
            if replica.state == "serving" and server.alive:
                assert replica.handle is server
                assert server.version == state.weights.version
                assert state.wanted_adapters <= server.adapters

    # What can happen.

    def step(self) -> None:
        names = [
            "die",
            "tick",
            "end_start",
            "ask",
            "arrive",
            "update",
            "load",
            "sleep",
            "suspect",
            "route",
        ]
        if not self.owned:
            names += ["restart", "update_of_another", "tell_where", "disconnect"]
        getattr(self, self.random.choice(names))()

    def pick(self) -> int:
        return self.random.randrange(SERVERS)

    def die(self) -> None:
        rank = self.pick()
        if self.random.random() < 0.5 and self.servers[rank].alive:
            self.servers[rank].alive = False
            self.notice()

    def notice(self) -> None:
        for replica, server in zip(self.state.replicas, self.servers, strict=True):
            if self.owned and not server.alive and replica.handle is server:
                self.apply(Ended(replica=replica, reason="It ended."))

    def tick(self) -> None:
        tick = Tick(
            max_restarts=MAX_RESTARTS, starting=frozenset(self.starting), router=True
        )
        lost = {each.rank for each in self.state.replicas if each.state == "lost"}
        polls = self.state.generates and self.state.to_poll
        actions = self.apply(tick)
        assert (Poll() in actions) == bool(polls)
        differs = self.state.in_router != frozenset(self.state.serving)
        assert any(isinstance(action, Route) for action in actions) == differs
        again = {a.rank for a in actions if isinstance(a, Restart)}
        assert again.isdisjoint(self.starting)
        for replica in self.state.replicas:
            if replica.state == "lost" and replica.rank not in lost:
                assert any("given up" in a.text for a in actions if isinstance(a, Tell))
            assert replica.restarts <= MAX_RESTARTS
            if self.state.asleep:
                assert not again
            elif self.owned and replica.state == "down":
                assert (replica.rank in again) != (replica.rank in self.starting)
            if not self.owned and replica.state in ("down", "stale"):
                assert replica in self.state.to_poll
        # What was not done is called for again, what was done is not.
        assert {a.rank for a in self.apply(tick) if isinstance(a, Restart)} == again
        self.starting.update({rank: self.start(rank) for rank in again})
        done = replace(tick, starting=frozenset(self.starting))
        assert not any(isinstance(action, Restart) for action in self.apply(done))
        for action in actions:
            if isinstance(action, CancelStart):
                self.fail_start(action.rank, counts=False)

    def fail_start(self, rank: int, *, counts: bool) -> None:
        del self.starting[rank]
        self.apply(StartFailed(rank=rank, reason="It failed.", counts=counts))

    def end_start(self) -> None:
        if not self.starting:
            return
        rank = self.random.choice(list(self.starting))
        if self.random.random() < 0.3:
            self.fail_start(rank, counts=self.random.random() < 0.5)
            return
        server = self.starting.pop(rank)
        actions = self.apply(Started(rank=rank, handle=server, url=server.url))
        taken = self.state.replicas[rank].handle is server
        assert (Stop(handle=server) in actions) != taken
        assert taken != bool(self.state.asleep)
        if taken:
            self.servers[rank] = server
            # What the earlier start has answered may come now.
            late = [each for each in self.late if each.asked.rank == rank]
            for event in late[:1]:
                self.late.remove(event)
                self.take(event)

    def answer(self, rank: int) -> Event:
        asked, server = self.state.replicas[rank], self.servers[rank]
        if not (server.alive and server.reached) or asked.url != server.url:
            return Silent(asked=asked, reason="It does not answer.")
        return Answered(
            asked=asked,
            version=server.version,
            start_id=server.start_id,
            held=frozenset(server.adapters),
        )

    def ask(self) -> None:
        """Polls a server; of an own one, the answer may be late."""
        rank = self.pick()
        if self.state.replicas[rank] not in self.state.to_poll:
            return
        self.apply(Changed(change=lambda state: state.without_suspicion([rank])))
        event = self.answer(rank)
        if self.owned and self.random.random() < 0.5:
            self.late.append(event)
        else:
            self.take(event)

    def arrive(self) -> None:
        if self.late:
            self.take(self.late.pop(self.random.randrange(len(self.late))))

    def take(self, event: Event) -> None:
        before = self.state
        actions = self.apply(event)
        rank = event.asked.rank
        if not isinstance(event, Answered):
            last = before.serving == (event.asked.url,)
            same = before.replicas[rank].url == event.asked.url
            if same and not (self.owned or last):
                assert self.state.replicas[rank].state == "down"
            return
        if self.state.updating is not None and self.state.replicas[rank].runs:
            # It is asked again after the update.
            assert self.state.replicas[rank] in self.state.to_poll
        if Confirm(rank=rank) in actions:
            for other in self.state.replicas:
                if other.state == "serving":
                    self.apply(self.answer(other.rank))
            actions = self.apply(replace(event, confirmed=True))
        again = before.replicas[rank].state != "serving"
        if again and self.state.replicas[rank].state == "serving":
            self.check_return(rank)
        if ReloadAdapters(rank=rank) in actions:
            for name in sorted(self.state.wanted_adapters):
                self.send(rank, name)

    def check_return(self, rank: int) -> None:
        """A server that serves again has what all have."""
        server = self.servers[rank]
        assert self.state.wanted_adapters <= server.adapters
        for other in self.state.replicas:
            there = self.servers[other.rank]
            if other.state == "serving" and there.alive and there.reached:
                assert _newest(server) >= _newest(there)

    def send(self, rank: int, name: str) -> None:
        sent_to, server = self.state.replicas[rank], self.servers[rank]
        if server.alive and server.reached and sent_to.url == server.url:
            server.adapters.add(name)
            loaded = Learned(asked=sent_to, change=lambda now: now.with_adapter(name))
            self.apply(loaded)

    def update(self) -> None:
        """Sends weights to the servers that run; some end meanwhile, or are new."""
        if "weights" not in self.state.asleep:
            happens = [self.die, self.tick, self.end_start, self.arrive, self.ask]
            some = self.random.choices(happens, k=self.random.randrange(4))
            again = [self.die, self.tick, self.end_start, self.end_start]
            self.send_weights(self.random.choice([some, again]))

    def send_weights(self, meanwhile: Sequence[Callable[[], None]] = ()) -> None:
        self.apply(UpdateBegan())
        part = [each for each in self.servers if each.url in self.state.urls]
        for each in meanwhile:
            each()
        some_ended = any(not each.alive or each not in self.servers for each in part)
        cut_off = not all(each.reached for each in part)
        if cut_off or (some_ended and self.random.random() < 0.5):
            # The servers hold what they held.
            self.apply(UpdateEnded(version=None))
            return
        self.number += 1
        version = str(self.number)
        for server in part:
            server.version = version
        self.apply(Changed(change=committed(version)))
        self.apply(UpdateEnded(version=version))

    def load(self) -> None:
        """Loads an adapter into every server that runs, or drops one."""
        wanted = self.state.wanted_adapters
        if wanted and self.random.random() < 0.4:
            name = self.random.choice(sorted(wanted))
            self.apply(AdaptersWanted(names=wanted - {name}))
            self.apply(Changed(change=lambda state: state.without_adapter(name)))
            for server in self.servers:
                server.adapters.discard(name)
            return
        name = f"policy@{len(self.told)}.{self.now:.0f}"
        for replica in self.state.running:
            if self.random.random() < 0.9:
                self.send(replica.rank, name)
        self.apply(AdaptersWanted(names=wanted | {name}))
        others = (each for each in self.state.running if not each.restarted)
        everywhere = all(name in each.held_adapters for each in others)
        assert (name in self.state.wanted_adapters) == everywhere

    def sleep(self) -> None:
        if self.state.asleep:
            for replica in self.state.running:
                self.release(replica, frozenset())
            self.apply(WokeUp(tags=MEMORY))
            assert not self.state.asleep
        elif self.random.random() < 0.3:
            self.apply(FellAsleep(tags=MEMORY))
            for replica in self.state.running:
                self.release(replica, MEMORY)

    def release(self, replica: Replica, tags: frozenset[str]) -> None:
        self.apply(Learned(asked=replica, change=lambda r: replace(r, released=tags)))

    def suspect(self) -> None:
        replica = self.state.replicas[self.pick()]
        self.apply(Suspected(url=self.random.choice([None, replica.url])))

    def route(self) -> None:
        for action in self.apply(Tick(router=True, max_restarts=MAX_RESTARTS)):
            if isinstance(action, Route):
                known = (self.state.in_router - action.remove) | action.add
                assert known == {*self.state.serving}
                self.apply(Changed(change=lambda s, k=known: replace(s, in_router=k)))
            elif isinstance(action, Restart) and action.rank not in self.starting:
                self.starting[action.rank] = self.start(action.rank)

    # What the owner of others' servers does.

    def restart(self) -> None:
        rank = self.pick()
        if not self.state.replicas[rank].start_id:
            # Nobody could tell one start that was not asked from the next.
            return
        url = self.servers[rank].url
        self.servers[rank] = replace(self.start(rank), url=url)
        if self.random.random() < 0.3:
            server = self.servers[rank]
            asked = self.state.replicas[rank]
            empty = Learned(asked=asked, change=lambda r: r.holding(set(), since=asked))
            self.apply(empty)
            self.apply(RestartNoticed(rank=rank, start_id=server.start_id))

    def disconnect(self) -> None:
        server = self.servers[self.pick()]
        server.reached = not server.reached

    def update_of_another(self) -> None:
        self.number += 1
        for server in self.servers:
            if server.alive:
                server.version = str(self.number)

    def tell_where(self) -> None:
        rank = self.pick()
        if not self.servers[rank].alive:
            self.tell()
            self.servers[rank] = self.start(rank)
        self.tell()

    def tell(self) -> None:
        urls = [each.url if each.alive else "" for each in self.servers]
        self.apply(Moved(urls=tuple(urls)))

    def settle(self) -> None:
        """Lets everything come to its end; nothing goes wrong any more."""
        if self.state.asleep:
            self.sleep()
        self.notice()
        while self.late:
            self.arrive()
        if not self.owned:
            self.revive()
        for _ in range(2):
            self.come_back()
        if self.owned:
            self.send_weights()
        else:
            self.update_of_another()
        for _ in range(4):
            self.come_back()

    def revive(self) -> None:
        self.tell()
        for rank, server in enumerate(self.servers):
            server.reached = True
            if not server.alive:
                self.servers[rank] = replace(self.start(rank), url=server.url)
        self.tell()

    def come_back(self) -> None:
        self.tick()
        for rank, server in list(self.starting.items()):
            del self.starting[rank]
            self.servers[rank] = server
            self.apply(Started(rank=rank, handle=server, url=server.url))
        self.apply(Suspected())
        for replica in self.state.to_poll:
            self.take(self.answer(replica.rank))


def committed(version: str) -> Callable[[FleetState], FleetState]:
    options = {"checkpoint": False, "in_place": True, "flushed": True}
    return lambda state: replace(
        state, weights=state.weights.commit(version, **options)
    )


def _newest(server: Server) -> int:
    return version_order(server.version)


@pytest.mark.parametrize("owned", [True, False], ids=["own", "of others"])
@pytest.mark.parametrize("part", range(4))
def test_random_histories(owned, part):
    for seed in range(part, HISTORIES, 4):
        world = World(random=Random(seed), owned=owned)
        try:
            for _ in range(EVENTS):
                world.step()
            world.settle()
            for replica in world.state.replicas:
                assert replica.state in ("serving", "lost")
                server = world.servers[replica.rank]
                if replica.state == "serving":
                    assert server.version == world.state.weights.version
                    assert server.url == replica.url
        except BaseException as error:
            error.add_note(f"The history of seed {seed}.")
            raise
