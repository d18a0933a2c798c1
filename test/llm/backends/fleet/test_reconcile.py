"""What follows when something happens to a server: random histories of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest

from torchrl_sglang.backends.fleet.actions import (
    CancelStart,
    Confirm,
    DropAdapter,
    FailRequests,
    LoadAdapter,
    Poll,
    Restart,
    Route,
    Stop,
    Tell,
)
from torchrl_sglang.backends.fleet.adapter_events import (
    AdapterDropped,
    AdapterGivenUp,
    AdapterOffered,
    AdapterSent,
    AdaptersListed,
    AdapterUnwanted,
    AdapterUsed,
)
from torchrl_sglang.backends.fleet.adapters import (
    LINGER_SECONDS,
    AdapterState,
    DesiredAdapter,
    Loading,
)
from torchrl_sglang.backends.fleet.reconcile import (
    Answered,
    Changed,
    Ended,
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
from torchrl_sglang.backends.fleet.step import Event
from torchrl_sglang.backends.fleet.weights_state import ServedWeights, version_order
from torchrl_sglang.backends.lora.names import parse_served_name
from torchrl_sglang.backends.lora.payload import AdapterPayload
from torchrl_sglang.errors import ServerTimeoutError

SERVERS = 3
HISTORIES = 600
EVENTS = 80
MAX_RESTARTS = 2
MEMORY = frozenset({"weights", "kv_cache"})

TWICE_IS_TWO = (StartFailed, AdapterUsed)
"""The events that count. Every other one may be told twice."""

MOST_LOADED = 3
"""Most adapters that a server holds."""


@dataclass(eq=False)
class Server:
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
    calls: list[LoadAdapter | DropAdapter] = field(default_factory=list)
    """Calls about adapters whose outcomes are not known."""
    requests: list[str] = field(default_factory=list)
    """The adapters of requests in flight."""
    loads: int = 0
    calm: bool = False
    """Whether nothing goes wrong any more."""

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
        self.begin_calls(actions)
        self.check(before, event, actions)
        self.check_adapters(before.adapters, event, actions)
        return actions

    def check(self, before: FleetState, event: Event, actions: tuple[Any, ...]) -> None:
        """What holds after every event."""
        state = self.state
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

    def begin_calls(self, actions: tuple[Any, ...]) -> None:
        for each in actions:
            if isinstance(each, LoadAdapter):
                self.calls += [replace(each, servers=(one,)) for one in each.servers]
            elif isinstance(each, DropAdapter):
                self.calls.append(each)

    def check_adapters(
        self, before: AdapterState, event: Event, actions: tuple[Any, ...]
    ) -> None:
        """No adapter is lost, and none is dropped that a request uses."""
        now, version = self.state.adapters, self.state.weights.version
        if isinstance(event, Answered):
            version = max(version, event.version, key=version_order)
        for name in before.wanted.keys() - now.wanted.keys():
            own = before.wanted[name]
            unwanted = isinstance(event, AdapterUnwanted) and event.name == name
            replaced = own.is_replaced(version)
            assert unwanted or replaced or own.content is None
        loads = [each for each in self.calls if isinstance(each, LoadAdapter)]
        sent = [(each.servers[0].rank, each.adapter.served_as) for each in loads]
        assert now.sending == {*sent}
        assert len(now.sending) == len(sent)
        drops = [each.served_as for each in self.calls if isinstance(each, DropAdapter)]
        assert sorted(drops) == sorted(n for n, r in now.retiring.items() if r.dropping)
        assert now.names.isdisjoint(now.retiring)
        for action in actions:
            if isinstance(action, DropAdapter):
                assert action.served_as not in self.requests
                assert not any(name == action.served_as for _, name in sent)
        if before.loading is not None and now.loading is None:
            known = {*now.names, *now.retiring}
            assert before.loading.new.served_as in known

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
            "unload",
            "give_up",
            "end_call",
            "end_call",
            "request",
            "end_request",
            "discover",
            "sleep",
            "suspect",
            "route",
        ]
        if not self.owned:
            names += ["restart", "update_of_another", "tell_where", "disconnect"]
            names += ["load_of_another", "unload_of_another"]
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
        known = before.replicas[rank]
        if (known.url, known.handle) == (event.asked.url, event.asked.handle):
            self.check_given(rank)

    def check_return(self, rank: int) -> None:
        """A server that serves again has what all have."""
        server, wanted = self.servers[rank], self.state.adapters.wanted.values()
        # Another engine object may have dropped its own meanwhile.
        own = {each.served_as for each in wanted if each.content is not None}
        assert own <= server.adapters
        for other in self.state.replicas:
            there = self.servers[other.rank]
            if other.state == "serving" and there.alive and there.reached:
                assert _newest(server) >= _newest(there)

    def check_given(self, rank: int) -> None:
        """A server that was started again is being given what it lacks."""
        if not self.state.misses_adapters(self.state.replicas[rank]):
            return
        missing = self.state.wanted_adapters - self.state.replicas[rank].held_adapters
        wanted = self.state.adapters.wanted.values()
        own = {each.served_as for each in wanted if each.content is not None}
        if missing & own:
            assert any(rank == sent_to for sent_to, _ in self.state.adapters.sending)

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

    # Adapters.

    def fails(self, often: float) -> bool:
        return not self.calm and self.random.random() < often

    def load(self) -> None:
        if self.state.adapters.loading is not None:
            return
        self.list_held()
        base = self.state.weights.version
        mark = self.random.choice([f"@{base}", "~"])
        new = DesiredAdapter(
            adapter=parse_served_name(self.new_load(mark)),
            content=AdapterPayload(),
            base=base,
        )
        limit = self.random.choice([None, MOST_LOADED])
        loading = Loading(new=new, until=self.now + 1e3, most_loaded=limit)
        self.apply(AdapterOffered(loading=loading))

    def new_load(self, mark: str) -> str:
        self.loads += 1
        return f"{self.random.choice('abc')}{mark}#{self.loads:x}"

    def list_held(self) -> dict[int, frozenset[str]]:
        found = {}
        for replica, server in zip(self.state.replicas, self.servers, strict=True):
            at_hand = server.alive and server.reached and server.url == replica.url
            if replica.runs and at_hand:
                held = found[replica.rank] = frozenset(server.adapters)
                change = partial(Replica.holding, adapters=held, since=replica)
                self.apply(Learned(asked=replica, change=change))
        return found

    def give_up(self) -> None:
        """The caller of a load has waited long enough, or knows why it failed."""
        loading = self.state.adapters.loading
        if loading is not None and (loading.error or self.random.random() < 0.2):
            self.apply(AdapterGivenUp(served_as=loading.new.served_as))

    def unload(self) -> None:
        if self.state.adapters.wanted and self.random.random() < 0.5:
            names = sorted(self.state.adapters.wanted)
            self.apply(AdapterUnwanted(name=self.random.choice(names)))

    def end_call(self) -> None:
        self.notice()
        if not self.calls:
            return
        call = self.calls.pop(self.random.randrange(len(self.calls)))
        if isinstance(call, LoadAdapter):
            self.end_load(call)
        else:
            self.end_drop(call)

    def end_load(self, call: LoadAdapter) -> None:
        (asked,), served_as = call.servers, call.adapter.served_as
        server, loading = self.servers[asked.rank], self.state.adapters.loading
        same = asked.handle is server if self.owned else asked.url == server.url
        error = None
        if server.alive and server.reached and same:
            limit = (
                loading.most_loaded if loading and loading.new == call.adapter else 0
            )
            if limit and self.owned:
                assert len(server.adapters) < limit
            # It may be there although nobody said so in time.
            if self.random.random() < 0.9:
                server.adapters.add(served_as)
        if served_as not in server.adapters or self.random.random() < 0.1:
            error = ServerTimeoutError("It did not answer.")
        self.apply(AdapterSent(asked=asked, served_as=served_as, error=error))

    def end_drop(self, call: DropAdapter) -> None:
        assert call.served_as not in self.requests
        kept = {}
        for server in self.servers:
            if not (server.alive and server.reached) or self.fails(0.1):
                kept[server.url] = ServerTimeoutError("It did not answer.")
            else:
                server.adapters.discard(call.served_as)
        self.apply(AdapterDropped(served_as=call.served_as, kept=kept))

    def request(self) -> None:
        state = self.state
        ranks = [each.rank for each in state.replicas if each.state == "serving"]
        if not ranks or not state.adapters.wanted or not state.generates:
            return
        own = state.adapters.wanted[self.random.choice(sorted(state.adapters.wanted))]
        server = self.servers[self.random.choice(ranks)]
        if self.owned and server.alive:
            assert own.served_as in server.adapters
        self.requests.append(own.served_as)
        self.apply(AdapterUsed(served_as=own.served_as, by=1))

    def end_request(self) -> None:
        if self.requests:
            ended = self.requests.pop(self.random.randrange(len(self.requests)))
            self.apply(AdapterUsed(served_as=ended, by=-1))

    def discover(self) -> None:
        before, serving = self.state.adapters.wanted, self.state.serving
        held = self.list_held()
        ranks = [rank for rank in held if self.state.replicas[rank].url in serving]
        if not self.owned:
            for rank in list(ranks):
                # A server that was started again is found out first.
                server, replica = self.servers[rank], self.state.replicas[rank]
                if replica.start_id and replica.start_id != server.start_id:
                    self.apply(RestartNoticed(rank=rank, start_id=server.start_id))
                    ranks.remove(rank)
        if self.fails(0.2):
            self.load()
        found = {rank: held[rank] for rank in ranks}
        self.apply(AdaptersListed(before=before, held=found))

    def load_of_another(self) -> None:
        if all(each.alive and each.reached for each in self.servers):
            served_as = self.new_load("~")
            for server in self.servers:
                server.adapters.add(served_as)

    def unload_of_another(self) -> None:
        held = sorted(set[str]().union(*(each.adapters for each in self.servers)))
        known = self.state.adapters
        own = {w.served_as for w in known.wanted.values() if w.content is not None}
        own |= {known.loading.new.served_as} if known.loading else set()
        if others := [each for each in held if each not in own]:
            gone = self.random.choice(others)
            for server in self.servers:
                server.adapters.discard(gone)

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
        self.calm = True
        while self.requests:
            self.end_request()
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
        self.discover()
        for _ in range(4 + len(self.state.adapters.wanted)):
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
        # The engine object that has loaded others loads them again.
        wanted = self.state.adapters.wanted.values()
        others = {each.served_as for each in wanted if each.content is None}
        for server in self.servers:
            server.adapters |= others
        for replica in self.state.to_poll:
            self.take(self.answer(replica.rank))
        self.now += LINGER_SECONDS
        self.tick()
        while self.calls:
            self.end_call()
        loading = self.state.adapters.loading
        if loading is not None:
            # It was loaded, or its caller is told why not.
            assert loading.error or loading.full or not self.state.running
            self.apply(AdapterGivenUp(served_as=loading.new.served_as))


def committed(version: str) -> Callable[[FleetState], FleetState]:
    options = {"checkpoint": False, "in_place": True, "flushed": True}
    return lambda state: replace(
        state, weights=state.weights.commit(version, **options)
    )


def _newest(server: Server) -> int:
    return version_order(server.version)


@pytest.mark.parametrize(
    "owned",
    [
        pytest.param(True, id="own"),
        pytest.param(False, id="of others", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]
)
def test_random_histories(owned, part):
    for seed in range(part, HISTORIES, 8):
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
                    assert world.state.wanted_adapters <= server.adapters
            adapters = world.state.adapters
            assert adapters.loading is None
            assert not {*adapters.retiring, *adapters.sending}
        except BaseException as error:
            error.add_note(f"The history of seed {seed}.")
            raise
