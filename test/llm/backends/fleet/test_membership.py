"""Which servers get requests, decided without servers."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from threading import Event, Thread

import pytest
from helpers.engines import Process

from torchrl_sglang.backends.fleet.actions import Check, Route, Stop
from torchrl_sglang.backends.fleet.adapters import newest_loads
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import (
    Answered,
    RestartNoticed,
    Silent,
    Started,
    Suspected,
    Tick,
)
from torchrl_sglang.backends.fleet.replica import RemoteRouter, Replica
from torchrl_sglang.errors import (
    ServerDiedError,
    ServerUnavailableError,
    WeightSyncStateError,
)

URLS = ["http://a", "http://b", "http://c"]


class Router:
    url, usable, keyed = "http://router", True, False


def make_fleet(count=3, router=None, owned=True) -> Fleet:
    replicas = [
        Replica(url=url, handle=Process(url=url) if owned else None) for url in URLS
    ]
    return Fleet(replicas=replicas[:count], weight_version="default", router=router)


def joined(fleet, rank: int, process: Process | None = None) -> None:
    """A server was started again, at the same address."""
    process = process or Process(url=fleet.replicas[rank].url)
    fleet.apply(Started(rank=rank, handle=process, url=process.url))


def reports(fleet, rank: int, version: str, **fields) -> None:
    """A server answers a poll, and so do those that serve."""
    asked = fleet.replicas[rank]
    event = Answered(asked=asked, version=version, confirmed=True, **fields)
    fleet.apply(event)


def holds(fleet, rank: int, *adapters: str) -> None:
    asked, held = fleet.replicas[rank], frozenset(adapters)
    fleet.learn(asked, lambda now: replace(now, held_adapters=held))


def states(fleet) -> list[str]:
    return [replica.state for replica in fleet.replicas]


def commit(fleet, version: str) -> None:
    with fleet.weight_update() as update:
        update.commit(version)


def picks(fleet, count=12, session=None, avoid=()):
    return [fleet.pick(session, avoid) for _ in range(count)]


def test_a_poll_from_before_an_update_takes_no_server_out_of_rotation():
    fleet = make_fleet()
    commit(fleet, "1")
    fleet.replicas[0].handle.state = "dead"
    fleet.apply(Tick())
    joined(fleet, 0)
    asked = fleet.replicas[0]
    assert states(fleet)[0] == "stale"
    commit(fleet, "2")
    actions = fleet.apply(Answered(asked=asked, version="default", confirmed=True))
    assert states(fleet) == ["serving"] * 3
    assert Check() in actions
    reports(fleet, 0, "default")
    assert states(fleet) == ["stale", "serving", "serving"]


def test_a_session_stays_where_it_is():
    fleet = make_fleet()
    homes = {f"s{i}": fleet.pick(f"s{i}", ()) for i in range(60)}
    assert all(fleet.pick(session, ()) == home for session, home in homes.items())
    assert Counter(homes.values()) == dict.fromkeys(URLS, 20)
    fleet.replicas[0].handle.state = "dead"
    for session, home in homes.items():
        # Only those move whose server is gone.
        assert (fleet.pick(session, ()) == home) == (home != URLS[0])


def test_the_router_comes_first():
    fleet = make_fleet(router=Router())
    assert set(picks(fleet)) == {"http://router"}
    assert set(picks(fleet, avoid=["http://router"])) == set(URLS)
    assert set(picks(fleet, session="s")) < set(URLS)
    fleet.router.keyed = True
    assert set(picks(fleet, session="s")) == {"http://router"}
    assert fleet.pick("s", (), direct=True) in URLS
    fleet.router.usable = False
    assert set(picks(fleet)) == set(URLS)


def test_a_server_that_failed_is_tried_last():
    fleet = make_fleet()
    fleet.failed(URLS[0])
    assert set(picks(fleet)) == set(URLS[1:])
    assert set(picks(fleet, avoid=URLS[1:])) == {URLS[0]}
    for url in URLS:
        fleet.failed(url)
    assert set(picks(fleet)) == set(URLS)


def test_deaths_are_noticed_when_a_server_is_picked():
    fleet = make_fleet()
    called_for = []
    fleet.act_with(called_for.extend)
    fleet.replicas[1].handle.state = "dead"
    assert set(picks(fleet)) == {URLS[0], URLS[2]}
    assert Check() in called_for
    assert fleet.urls == (URLS[0], URLS[2])
    for replica in fleet.replicas:
        replica.handle.state = "dead"
    with pytest.raises(ServerDiedError, match="its last words"):
        fleet.pick(None, ())


def test_a_server_of_older_weights_waits_for_the_next_update():
    fleet = make_fleet(2)
    commit(fleet, "7")
    first, second = fleet.replicas
    first.handle.state = "dead"
    assert set(picks(fleet)) == {URLS[1]}
    before = fleet.membership_epoch
    joined(fleet, 0)
    assert states(fleet) == ["stale", "serving"]
    assert fleet.membership_epoch == before + 1
    assert set(picks(fleet)) == {URLS[1]}
    # Weights go to it all the same.
    with fleet.weight_update() as update:
        assert fleet.urls == (URLS[0], URLS[1])
        update.commit("8")
    assert set(picks(fleet)) == {URLS[0], URLS[1]}
    for replica in (first, second):
        replica.handle.state = "dead"
    fleet.notice_deaths()
    joined(fleet, 0)
    with pytest.raises(WeightSyncStateError, match="send the weights"):
        fleet.pick(None, ())


def test_before_the_first_update_a_new_start_is_as_good():
    fleet = make_fleet(1)
    fleet.replicas[0].handle.state = "dead"
    with pytest.raises(ServerDiedError):
        fleet.pick(None, ())
    joined(fleet, 0)
    assert fleet.replicas[0].state == "stale"
    reports(fleet, 0, "default")
    assert fleet.pick(None, ()) == URLS[0]


def test_the_router_knows_who_serves():
    fleet = make_fleet(2, router=Router())
    first, tick = frozenset({URLS[0]}), Tick(router=True)
    assert fleet.apply(tick) == ()
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    # Until the router has taken it.
    for _ in range(2):
        assert Route(remove=first, add=frozenset()) in fleet.apply(tick)
    fleet.route(first)
    joined(fleet, 0)
    reports(fleet, 0, "default")
    assert fleet.apply(tick) == (Route(remove=frozenset(), add=first),)
    fleet.route(first)
    assert fleet.apply(tick) == ()


def test_a_copy_owns_nothing():
    fleet = make_fleet(2, router=Router())
    fleet.apply(RestartNoticed(rank=0, start_id="another start"))
    reports(fleet, 0, "older")
    twin = pickle.loads(pickle.dumps(fleet))
    assert [replica.handle for replica in twin.replicas] == [None, None]
    assert states(twin) == ["stale", "serving"]
    # The router is another's, and may not know who is out of rotation.
    assert set(picks(twin)) == {URLS[1]}
    reports(twin, 0, "default")
    assert set(picks(twin)) == {"http://router"}


@pytest.mark.parametrize("joins", ["from before", "from within"])
def test_a_server_started_again_in_the_middle_of_the_first_update(joins):
    """It has the checkpoint's weights, whether it took part at the beginning or not."""
    fleet = make_fleet(2)
    process = fleet.replicas[0].handle
    if joins == "from before":
        process.state = "dead"
        fleet.notice_deaths()
    with fleet.weight_update() as update:
        if joins == "from within":
            process.state = "dead"
            fleet.notice_deaths()
        joined(fleet, 0)
        update.commit("1")
    assert states(fleet) == ["stale", "serving"]


def test_an_update_that_failed_leaves_who_joined_meanwhile_useful():
    fleet = make_fleet(2)
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    with fleet.weight_update():
        joined(fleet, 0)
        # What it says in the middle of an update counts for nothing.
        reports(fleet, 0, "default")
        assert fleet.replicas[0].state == "stale"
    reports(fleet, 0, "default")
    assert states(fleet) == ["serving", "serving"]


def test_a_server_that_is_ready_after_the_shutdown_is_ended():
    fleet = make_fleet(1)
    fleet.close()
    late = Process()
    event = Started(rank=0, handle=late, url=late.url)
    assert fleet.apply(event) == (Stop(handle=late),)


def test_the_newest_weights_of_any_engine_are_the_current_ones():
    fleet = make_fleet(3, owned=False)
    reports(fleet, 0, "5")
    assert fleet.weights.version == fleet.weights.newest == "5"
    # The others are asked before they are believed.
    assert {replica.url for replica in fleet.state.to_poll} == {URLS[1], URLS[2]}
    reports(fleet, 1, "default")
    reports(fleet, 2, "5")
    assert states(fleet) == ["serving", "stale", "serving"]
    assert "'default'" in fleet.replicas[1].reason
    assert set(picks(fleet)) == {URLS[0], URLS[2]}
    reports(fleet, 1, "6")
    assert fleet.weights.version == "6"
    assert fleet.replicas[1].state == "serving"


def test_a_server_serves_with_every_adapter_that_requests_may_name():
    fleet = make_fleet(2, owned=False)
    for rank in range(2):
        holds(fleet, rank, "policy@1")
    found = newest_loads(["policy@1"], "default")
    fleet.change_adapters(lambda now: now.adopt(found))
    assert fleet.state.wanted_adapters == {"policy@1"}
    fleet.apply(RestartNoticed(rank=0, start_id="another start"))
    holds(fleet, 0)
    reports(fleet, 0, "default")
    assert set(picks(fleet)) == {URLS[1]}
    fleet.apply(RestartNoticed(rank=1, start_id="another start"))
    holds(fleet, 1)
    reports(fleet, 1, "default")
    with pytest.raises(ServerUnavailableError, match="policy@1"):
        fleet.pick(None, ())
    holds(fleet, 0, "policy@1")
    reports(fleet, 0, "default")
    assert fleet.pick(None, ()) == URLS[0]


def test_a_server_of_another_owner_that_is_away_and_comes_back():
    fleet = make_fleet(2, owned=False)
    before = fleet.membership_epoch
    fleet.apply(Silent(asked=fleet.replicas[0], reason="No connection."))
    assert fleet.urls == (URLS[1],)
    assert fleet.state.to_poll == [fleet.replicas[0]]
    # It does not serve before the others have said what they hold.
    asked = fleet.replicas[0]
    fleet.apply(Answered(asked=asked, version="default", start_id="another start"))
    assert fleet.replicas[0].state == "stale"
    assert fleet.membership_epoch == before + 2
    reports(fleet, 0, "default")
    assert fleet.state.to_poll == []


def test_a_remote_router_gets_nothing_while_a_server_is_out():
    """It does not know, and would send requests there."""
    fleet = make_fleet(2, router=RemoteRouter(url="http://router"), owned=False)
    assert set(picks(fleet)) == {"http://router"}
    fleet.apply(Silent(asked=fleet.replicas[0], reason="No connection."))
    assert set(picks(fleet)) == {URLS[1]}


def test_a_process_that_is_forked_in_a_weight_update():
    """What holds requests, or the fleet itself, is in the parent."""
    fleet, held, done = make_fleet(owned=False), Event(), Event()

    def use() -> None:
        fleet.failed(URLS[0])
        asyncio.run(asyncio.wait_for(fleet.gate.passed(), 5.0))
        assert fleet.state.generates

    def hold() -> None:
        with fleet.weight_update() as update, fleet._lock:
            fleet.paused = True
            update.holds_requests()
            held.set()
            done.wait(60)

    thread = Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = get_context("fork").Process(target=use)
    child.start()
    child.join(30)
    done.set()
    thread.join()
    code, _ = child.exitcode, child.kill()
    child.join()
    assert code == 0
    assert fleet.paused, "The parent goes on as it was."


def test_a_process_that_is_forked_in_the_midst_of_an_event():
    """Another thread of the parent was changing the state at that moment."""
    fleet = make_fleet(1, owned=False)
    inside, go_on = threading.Event(), threading.Event()

    def act(actions) -> None:
        inside.set()
        go_on.wait(60)

    fleet.act_with(act)
    thread = threading.Thread(target=fleet.apply, args=[Suspected()])
    thread.start()
    assert inside.wait(10)
    fleet.act_with(lambda actions: None)
    child = os.fork()
    if not child:
        signal.alarm(10)
        fleet.apply(Suspected())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    thread.join(10)
