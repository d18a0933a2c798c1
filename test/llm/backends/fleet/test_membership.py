"""Which servers get requests, decided without servers."""

from __future__ import annotations

import pickle
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import RemoteRouter, Replica
from torchrl_sglang.errors import (
    ServerDiedError,
    ServerUnavailableError,
    WeightSyncStateError,
)
from torchrl_sglang.support.event_loop import run_sync

URLS = ["http://a", "http://b", "http://c"]


@dataclass
class Process:
    """A process that ends when it is told to."""

    state: str = "ready"
    pid: int = 0
    url: str = URLS[0]
    host: str = field(default_factory=socket.gethostname)
    log_path: Path = Path("log")

    def log_tail(self, lines: int = 30) -> str:
        return "its last words"

    def stop(self) -> None:
        self.state = "stopped"


class Router:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.url, self.usable, self.keyed = "http://router", True, False
        self.calls: list[tuple[str, str]] = []

    async def add_worker(self, url: str) -> None:
        self.calls.append(("add", url))

    async def remove_worker(self, url: str) -> None:
        self.calls.append(("remove", url))


def make_fleet(count=3, router=None, owned=True) -> Fleet:
    replicas = [
        Replica(url=url, handle=Process(url=url) if owned else None) for url in URLS
    ]
    return Fleet(replicas=replicas[:count], weight_version="default", router=router)


def commit(fleet, version: str) -> None:
    with fleet.weight_update() as update:
        update.commit(version)


def picks(fleet, count=12, session=None, avoid=()):
    return [fleet.pick(session, avoid) for _ in range(count)]


def test_servers_take_turns():
    found = picks(make_fleet())
    assert {url: found.count(url) for url in URLS} == dict.fromkeys(URLS, 4)


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


def test_what_failed_is_tried_last():
    fleet = make_fleet()
    fleet.failed(URLS[0])
    assert set(picks(fleet)) == set(URLS[1:])
    assert set(picks(fleet, avoid=URLS[1:])) == {URLS[0]}
    for url in URLS:
        fleet.failed(url)
    assert set(picks(fleet)) == set(URLS)


def test_deaths_are_noticed_when_a_server_is_picked():
    fleet = make_fleet()
    woken = []
    fleet.on_change = lambda: woken.append(1)
    fleet.replicas[1].handle.state = "dead"
    assert set(picks(fleet)) == {URLS[0], URLS[2]}
    assert woken
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
    fleet.joined(first, Process())
    assert (first.state, fleet.membership_epoch) == ("stale", before + 1)
    assert set(picks(fleet)) == {URLS[1]}
    # Weights go to it all the same.
    with fleet.weight_update() as update:
        assert fleet.urls == (URLS[0], URLS[1])
        update.commit("8")
    assert set(picks(fleet)) == {URLS[0], URLS[1]}
    for replica in (first, second):
        replica.handle.state = "dead"
    fleet.notice_deaths()
    fleet.joined(first, Process())
    with pytest.raises(WeightSyncStateError, match="send the weights"):
        fleet.pick(None, ())


def test_a_server_that_joins_during_an_update_is_not_part_of_it():
    fleet = make_fleet(2)
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    with fleet.weight_update() as update:
        assert fleet.urls == (URLS[1],)
        update.commit("1")
        fleet.joined(fleet.replicas[0], Process())
        assert fleet.urls == (URLS[1],)
    assert [replica.state for replica in fleet.replicas] == ["stale", "serving"]
    assert fleet.urls == (URLS[0], URLS[1])


def test_an_update_that_failed_changes_nothing():
    fleet = make_fleet(2)
    with fleet.weight_update() as update:
        update.mark_inconsistent("Half of them came.")
        update.abort()
    assert fleet.weights.inconsistent is None
    assert fleet.weights.version == "default"


def test_before_the_first_update_a_new_start_is_as_good():
    fleet = make_fleet(1)
    fleet.replicas[0].handle.state = "dead"
    with pytest.raises(ServerDiedError):
        fleet.pick(None, ())
    fleet.joined(fleet.replicas[0], Process())
    assert fleet.replicas[0].state == "stale"
    fleet.report_version(fleet.replicas[0], "default")
    assert fleet.pick(None, ()) == URLS[0]


def test_the_router_knows_who_serves():
    router = Router()
    fleet = make_fleet(2, router=router)
    run_sync(fleet.update_router())
    assert router.calls == []
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    run_sync(fleet.update_router())
    fleet.joined(fleet.replicas[0], Process())
    fleet.report_version(fleet.replicas[0], "default")
    run_sync(fleet.update_router())
    assert router.calls == [("remove", URLS[0]), ("add", URLS[0])]


def test_a_copy_owns_nothing():
    fleet = make_fleet(2, router=Router())
    fleet.replicas[0].state = "stale"
    twin = pickle.loads(pickle.dumps(fleet))
    assert [replica.handle for replica in twin.replicas] == [None, None]
    assert [replica.state for replica in twin.replicas] == ["stale", "serving"]
    # The router is another's, and may not know who is out of rotation.
    assert set(picks(twin)) == {URLS[1]}
    twin.report_version(twin.replicas[0], "default")
    assert set(picks(twin)) == {"http://router"}


def test_after_the_shutdown():
    fleet = make_fleet()
    fleet.close()
    with pytest.raises(ServerUnavailableError, match="shut down"):
        fleet.pick(None, ())


@pytest.mark.parametrize("joins", ["from before", "from within"])
def test_a_server_started_again_in_the_middle_of_the_first_update(joins):
    """It has the checkpoint's weights, whether it took part at the beginning or not."""
    fleet = make_fleet(2)
    again = fleet.replicas[0]
    if joins == "from before":
        again.handle.state = "dead"
        fleet.notice_deaths()
    with fleet.weight_update() as update:
        if joins == "from within":
            again.handle.state = "dead"
            fleet.notice_deaths()
        fleet.joined(again, Process())
        update.commit("1")
    assert [replica.state for replica in fleet.replicas] == ["stale", "serving"]


def test_an_update_that_failed_leaves_who_joined_meanwhile_useful():
    fleet = make_fleet(2)
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    with fleet.weight_update():
        fleet.joined(fleet.replicas[0], Process())
        # What it says in the middle of an update counts for nothing.
        fleet.report_version(fleet.replicas[0], "default")
        assert fleet.replicas[0].state == "stale"
    fleet.report_version(fleet.replicas[0], "default")
    assert [replica.state for replica in fleet.replicas] == ["serving", "serving"]


def test_a_process_group_holds_for_one_set_of_servers():
    fleet = make_fleet(2)
    before = fleet.membership_epoch
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    assert fleet.membership_epoch != before


def test_a_server_that_is_ready_after_the_shutdown_is_ended():
    fleet = make_fleet(1)
    fleet.close()
    late = Process()
    fleet.joined(fleet.replicas[0], late)
    assert late.state == "stopped"


def test_a_server_that_another_engine_has_sent_the_weights_to():
    fleet = make_fleet(2)
    commit(fleet, "3")
    fleet.replicas[0].handle.state = "dead"
    fleet.notice_deaths()
    fleet.joined(fleet.replicas[0], Process())
    fleet.report_version(fleet.replicas[0], "2")
    assert fleet.replicas[0].state == "stale"
    fleet.report_version(fleet.replicas[0], "3")
    assert fleet.replicas[0].state == "serving"


def test_the_newest_weights_of_any_engine_are_the_current_ones():
    fleet = make_fleet(3, owned=False)
    first, second, third = fleet.replicas
    fleet.report_version(first, "5")
    assert fleet.weights.version == fleet.weights.newest == "5"
    # The others are asked before they are believed.
    assert {replica.url for replica in fleet.to_poll} == {URLS[1], URLS[2]}
    fleet.report_version(second, "default")
    fleet.report_version(third, "5")
    states = [replica.state for replica in fleet.replicas]
    assert states == ["serving", "stale", "serving"]
    assert "'default'" in second.reason
    assert set(picks(fleet)) == {URLS[0], URLS[2]}
    fleet.report_version(second, "6")
    assert fleet.weights.version == "6"
    assert second.state == "serving"


def test_a_server_serves_with_every_adapter_that_requests_may_name():
    fleet = make_fleet(2, owned=False)
    first, second = fleet.replicas
    for replica in fleet.replicas:
        fleet.report_adapters(replica, ["policy@1"], ())
    assert fleet.want_adapters(frozenset({"policy@1"}))
    fleet.was_restarted(first, "another start")
    fleet.report_adapters(first, [], ["policy@1"])
    fleet.report_version(first, "default")
    assert set(picks(fleet)) == {URLS[1]}
    fleet.was_restarted(second, "another start")
    fleet.report_adapters(second, [], ["policy@1"])
    fleet.report_version(second, "default")
    with pytest.raises(ServerUnavailableError, match="policy@1"):
        fleet.pick(None, ())
    fleet.report_adapters(first, ["policy@1"], [])
    fleet.report_version(first, "default")
    assert fleet.pick(None, ()) == URLS[0]


def test_a_server_of_another_owner_that_is_away_and_comes_back():
    fleet = make_fleet(2, owned=False)
    before = fleet.membership_epoch
    fleet.mark_down(fleet.replicas[0], "No connection.")
    assert fleet.urls == (URLS[1],)
    assert fleet.to_poll == [fleet.replicas[0]]
    fleet.is_back(fleet.replicas[0], "another start")
    assert fleet.replicas[0].state == "stale"
    assert fleet.membership_epoch == before + 2
    fleet.report_version(fleet.replicas[0], "default")
    assert fleet.to_poll == []


def test_a_remote_router_gets_nothing_while_a_server_is_out():
    """It does not know, and would send requests there."""
    fleet = make_fleet(2, router=RemoteRouter(url="http://router"), owned=False)
    assert set(picks(fleet)) == {"http://router"}
    fleet.mark_down(fleet.replicas[0], "No connection.")
    assert set(picks(fleet)) == {URLS[1]}
