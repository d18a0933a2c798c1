"""When LoRA adapters are loaded and dropped, without servers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from torchrl_sglang.backends.fleet.actions import DropAdapter, LoadAdapter, Tell
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
    DRAIN_SECONDS,
    LINGER_SECONDS,
    AdapterState,
    DesiredAdapter,
    Loading,
)
from torchrl_sglang.backends.fleet.reconcile import (
    Answered,
    RestartNoticed,
    Silent,
    Tick,
    reconcile,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.fleet.step import Event
from torchrl_sglang.backends.fleet.weights_state import ServedWeights
from torchrl_sglang.backends.lora.names import parse_served_name
from torchrl_sglang.backends.lora.payload import AdapterPayload
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
)

FAILED = ServerTimeoutError("It did not answer.")


class Engine:
    """An engine that knows two servers of somebody else."""

    def __init__(self, servers: int = 2) -> None:
        replicas = (
            Replica(url=f"http://s{rank}", rank=rank, start_id="1", version="default")
            for rank in range(servers)
        )
        self.state = FleetState(
            replicas=tuple(replicas),
            weights=ServedWeights.reported("default"),
            owner=os.getpid(),
        )
        self.now = 0.0

    @property
    def adapters(self) -> AdapterState:
        return self.state.adapters

    def tell(self, event: Event) -> list[Any]:
        self.state, actions = reconcile(self.state, event, self.now)
        kinds = (LoadAdapter, DropAdapter, Tell)
        return [each for each in actions if isinstance(each, kinds)]

    def offer(self, served_as: str, *, pinned: bool = False, **limits: Any) -> Any:
        adapter = replace(parse_served_name(served_as), pinned=pinned)
        new = DesiredAdapter(
            adapter=adapter, content=AdapterPayload(), base=self.state.weights.version
        )
        loading = Loading(new=new, until=self.now + 60, **limits)
        return self.tell(AdapterOffered(loading=loading))

    def sent(self, rank: int, served_as: str, error: Any = None) -> list[Any]:
        asked = self.state.replicas[rank]
        return self.tell(AdapterSent(asked=asked, served_as=served_as, error=error))

    def load(self, served_as: str, **options: Any) -> None:
        (action,) = self.offer(served_as, **options)
        for replica in action.servers:
            self.sent(replica.rank, served_as)
        assert served_as in self.adapters.names

    def dropped(self, served_as: str) -> list[Any]:
        return self.tell(AdapterDropped(served_as=served_as, kept={}))

    def tick(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.tell(Tick())


@pytest.fixture
def engine() -> Engine:
    return Engine()


def drop(served_as: str) -> list[Any]:
    return [DropAdapter(served_as=served_as)]


def test_requests_use_an_adapter_when_every_server_has_it(engine):
    (action,) = engine.offer("a@1#1")
    assert [each.rank for each in action.servers] == [0, 1]
    assert not engine.sent(0, "a@1#1")
    assert engine.adapters.names == frozenset()
    assert not engine.sent(1, "a@1#1")
    assert (engine.adapters.names, engine.adapters.default) == ({"a@1#1"}, "a")


def test_a_replaced_adapter_is_dropped_after_its_last_request(engine):
    engine.load("a@1#1")
    engine.tell(AdapterUsed(served_as="a@1#1", by=1))
    engine.load("a@2#2")
    assert engine.tick(2 * LINGER_SECONDS) == []
    assert engine.tell(AdapterUsed(served_as="a@1#1", by=-1)) == drop("a@1#1")
    assert engine.tick(1.0) == []
    engine.dropped("a@1#1")
    assert not engine.adapters.retiring
    assert [each.held_adapters for each in engine.state.replicas] == [{"a@2#2"}] * 2


def test_a_replaced_adapter_lingers_and_is_not_kept_for_ever(engine):
    engine.load("a@1#1")
    engine.tell(AdapterUsed(served_as="a@1#1", by=1))
    engine.load("a@2#2")
    assert engine.tick(LINGER_SECONDS - 1) == []
    assert engine.tick(DRAIN_SECONDS + 1) == drop("a@1#1")


@pytest.mark.parametrize("pinned", [False, True])
def test_retiring_adapters_make_room(engine, pinned):
    limits = {"most_pinned": 2} if pinned else {"most_loaded": 2}
    engine.load("a@1#1", pinned=pinned, **limits)
    engine.load("a@2#2", pinned=pinned, **limits)
    assert engine.offer("a@3#3", pinned=pinned, **limits) == drop("a@1#1")
    (action,) = engine.dropped("a@1#1")
    assert action.adapter.served_as == "a@3#3"


def test_servers_that_are_full_are_not_sent_one_more(engine):
    engine.load("a@1#1")
    assert engine.offer("b@1#2", most_loaded=1) == []
    assert engine.adapters.loading.full == 1
    engine.tell(AdapterGivenUp(served_as="b@1#2"))
    # It is also full of what it may still be loading.
    engine.offer("b@1#3", most_loaded=2)
    engine.tell(AdapterGivenUp(served_as="b@1#3"))
    engine.offer("c@1#4", most_loaded=2)
    assert engine.adapters.loading.full == 2


def test_an_adapter_that_one_server_refuses_is_dropped_by_all(engine):
    engine.load("a@1#1")
    engine.offer("a@2#2")
    engine.sent(1, "a@2#2", FAILED)
    assert engine.adapters.loading.error is FAILED
    # The other one may be loading it at this moment.
    assert engine.tell(AdapterGivenUp(served_as="a@2#2")) == []
    assert engine.sent(0, "a@2#2") == drop("a@2#2")
    assert engine.adapters.names == {"a@1#1"}


def test_a_server_that_did_not_answer_may_be_full(engine):
    engine.offer("a@1#1", most_loaded=1)
    engine.sent(0, "a@1#1", FAILED)
    engine.sent(1, "a@1#1", RequestRefusedError("There is no room."))
    assert engine.tell(AdapterGivenUp(served_as="a@1#1")) == drop("a@1#1")
    assert engine.offer("b@1#2", most_loaded=1) == []
    (action,) = engine.dropped("a@1#1")
    assert len(action.servers) == 2


def test_an_adapter_that_is_unwanted_goes_with_its_older_loads(engine):
    for served_as in ("a@1#1", "a@2#2", "b~#3"):
        engine.load(served_as)
    found = engine.tell(AdapterUnwanted(name="a"))
    assert found == drop("a@1#1") + drop("a@2#2")
    assert (engine.adapters.names, engine.adapters.default) == ({"b~#3"}, None)


def test_what_is_being_loaded_is_no_older_load(engine):
    """Another engine object has loaded a newer one meanwhile."""
    engine.offer("a@1#1")
    held = {rank: frozenset({"a@2#2"}) for rank in range(2)}
    engine.tell(AdaptersListed(before=engine.adapters.wanted, held=held))
    engine.sent(0, "a@1#1")
    assert engine.adapters.names == {"a@2#2"}
    assert engine.tell(AdapterUnwanted(name="a")) == drop("a@2#2")
    assert engine.adapters.retiring.keys() == {"a@2#2"}


def answer(engine: Engine, rank: int, start_id: str, *held: str) -> list[Any]:
    event = Answered(
        asked=engine.state.replicas[rank],
        version="default",
        start_id=start_id,
        held=frozenset(held),
    )
    first = engine.tell(event)
    return first + engine.tell(replace(event, confirmed=True))


def test_a_server_that_was_started_again_is_given_all_of_them(engine):
    engine.load("a@1#1")
    engine.load("b~#2")
    lost = AdaptersListed(before=engine.adapters.wanted, held={1: frozenset()})
    engine.tell(RestartNoticed(rank=0, start_id="2"))
    (first,) = answer(engine, 0, "2")
    assert first.servers[0].rank == 0
    # One after the other, and what was refused is loaded again with the next poll.
    (failed,) = engine.sent(0, first.adapter.served_as, FAILED)
    assert "was started again does not take its adapters" in failed.text
    (again,) = answer(engine, 0, "2")
    assert again.adapter == first.adapter
    (second,) = engine.sent(0, again.adapter.served_as)
    served = {again.adapter.served_as, second.adapter.served_as}
    assert engine.sent(0, second.adapter.served_as) == []
    assert served == engine.adapters.names
    # An engine object keeps what it has loaded, also if a server lost it.
    engine.tell(lost)
    assert engine.adapters.names == served


def test_a_server_that_was_cut_off_keeps_what_it_has(engine):
    engine.load("a@1#1")
    engine.tell(Silent(asked=engine.state.replicas[0], reason="It is away."))
    found = answer(engine, 0, "1", "a@1#1")
    assert not any(isinstance(each, LoadAdapter) for each in found)
    (back, _) = engine.state.replicas
    assert (back.state, back.held_adapters) == ("serving", {"a@1#1"})


def test_what_is_being_loaded_is_not_what_was_replaced():
    """The only server that runs again has the half of it."""
    engine = Engine(servers=1)
    engine.load("a@1#1")
    engine.offer("a@2#2")
    engine.tell(RestartNoticed(rank=0, start_id="2"))
    answer(engine, 0, "2", "a@2#2")
    assert engine.adapters.names == {"a@1#1"}


def test_an_older_listing_counts_no_more(engine):
    before = engine.adapters.wanted
    engine.load("a@1#1")
    engine.tell(AdaptersListed(before=before, held={0: frozenset({"b~#2"})}))
    assert engine.adapters.names == {"a@1#1"}
    asked = engine.state.replicas[0]
    engine.tell(AdapterUnwanted(name="a"))
    engine.dropped("a@1#1")
    # The answer of a server that was asked before.
    now = engine.state.replicas[0].holding({"a@1#1", "c~#3"}, since=asked)
    assert now.held_adapters == {"c~#3"}


def test_a_fleet_that_was_closed_begins_nothing(engine):
    engine.load("a@1#1")
    engine.load("a@2#2")
    engine.state = replace(engine.state, closed=True)
    assert engine.tick(2 * LINGER_SECONDS) == []


def test_an_adapter_costs_no_call_while_no_server_runs(engine):
    engine.state = replace(
        engine.state,
        replicas=tuple(replace(r, state="down") for r in engine.state.replicas),
    )
    assert engine.offer("a@1#1") == []
    assert isinstance(engine.state.no_server_error(), ServerUnavailableError)
    engine.tell(AdapterGivenUp(served_as="a@1#1"))
    assert engine.adapters.loading is None
