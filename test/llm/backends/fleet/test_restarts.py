"""Which starts count when a server is started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.waiting import wait_until

from torchrl_sglang.backends.fleet.actions import Stop
from torchrl_sglang.backends.fleet.loop import Supervisor, WatchTimes
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import FellAsleep, Started, WokeUp
from torchrl_sglang.backends.fleet.replica import NotStartedError, Replica
from torchrl_sglang.errors import ServerStartError

SECONDS = 30.0

TIMES = WatchTimes(first_restart=0.01, check=0.01)

ASLEEP = frozenset({"kv_cache"})


class Handle:
    """A server whose start goes on until it is told how that ends."""

    name, host, pid, age, log_path = "server", "node", 0, 0.0, Path("log")

    def __init__(self, state: str = "starting") -> None:
        self.url, self.state = "http://10.0.0.1:1", state
        self.error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        if not self._over.is_set():
            self.error = error
            self._over.set()

    def wait_ready(self) -> None:
        assert self._over.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.state = "ready"

    def check_ready(self) -> bool:
        return self.state == "ready"

    def request_stop(self) -> None:
        self.end(NotStartedError("It was stopped."))

    def stop(self) -> None:
        self.request_stop()
        self.state = "stopped"

    def log_tail(self, lines: int = 30) -> str:
        return "the last words"


def first(fleet: Fleet) -> Replica:
    return fleet.replicas[0]


@pytest.fixture
def starts() -> list[Handle]:
    return [Handle("ready")]


@pytest.fixture
def ways(request: pytest.FixtureRequest, starts: list[Handle]) -> dict[str, Any]:
    return request.param(starts) if hasattr(request, "param") else {}


@pytest.fixture
def supervised(
    starts: list[Handle], ways: dict[str, Any]
) -> Iterator[tuple[Fleet, Supervisor]]:
    def restart() -> Any:
        starts.append(Handle())
        return starts[-1]

    server: Any = starts[0]
    other: Any = Handle("ready")
    fleet = Fleet(
        [
            Replica(
                **{"url": server.url, "handle": server, "restart": restart, **ways}
            ),
            Replica(url="http://10.0.0.2:1", handle=other),
        ]
    )
    nothing: Any = SimpleNamespace(adapters=None, poll=None, give_up=lambda url: None)
    supervisor = Supervisor(
        fleet,
        nothing,
        nothing,
        progress=lambda: (0, 0),
        recall=nothing,
        poller=nothing,
        max_restarts=1,
        times=TIMES,
    )
    # Nothing is polled.
    fleet.paused = True
    starts[0].state = "dead"
    yield fleet, supervisor
    supervisor.stop()


@pytest.fixture
def fleet(supervised: tuple[Fleet, Supervisor]) -> Fleet:
    """A server that is started again once at most, and one that runs."""
    return supervised[0]


def test_a_start_that_a_sleep_cancels_does_not_count(fleet, starts):
    for count in range(2, 6):
        wait_until(lambda count=count: len(starts) == count)
        fleet.apply(FellAsleep(tags=ASLEEP))
        wait_until(lambda: starts[-1].state == "stopped")
        assert (first(fleet).state, first(fleet).restarts) == ("down", 0)
        fleet.apply(WokeUp(tags=ASLEEP))
    wait_until(lambda: len(starts) == 6)
    starts[-1].end()
    wait_until(lambda: first(fleet).state == "stale")
    assert (first(fleet).handle, first(fleet).restarts) == (starts[-1], 1)


def test_a_start_that_finds_no_place_does_not_count(fleet, starts):
    for count in range(2, 5):
        wait_until(lambda count=count: len(starts) == count)
        starts[-1].end(NotStartedError("There is no room."))
    wait_until(lambda: len(starts) == 5)
    assert "There is no room." in first(fleet).reason
    starts[-1].end()
    wait_until(lambda: first(fleet).state == "stale")
    assert first(fleet).restarts == 1


def test_a_start_that_ends_during_a_sleep_does_not_count(fleet, starts):
    wait_until(lambda: len(starts) == 2)
    fleet.apply(FellAsleep(tags=ASLEEP))
    late: Any = Handle("ready")
    started = Started(rank=0, handle=late, url=late.url)
    assert fleet.apply(started) == (Stop(handle=late),)
    assert (first(fleet).state, first(fleet).restarts) == ("down", 0)


def test_a_start_that_fails_counts(fleet, starts):
    wait_until(lambda: len(starts) == 2)
    starts[-1].end(ServerStartError("It has no memory."))
    wait_until(lambda: first(fleet).state == "lost")
    assert len(starts) == 2
    assert "It has no memory." in first(fleet).reason


def lost() -> Any:
    raise LookupError("no such node")


@pytest.mark.parametrize("ways", [lambda starts: {"locate": lost}], indirect=True)
def test_a_server_that_cannot_be_located_is_stopped(fleet, starts):
    wait_until(lambda: len(starts) == 2)
    starts[-1].end()
    wait_until(lambda: first(fleet).state == "lost")
    assert "no such node" in first(fleet).reason
    assert starts[-1].state == "stopped"


@pytest.mark.parametrize(
    "ways", [lambda starts: {"restart": lambda: starts[0]}], indirect=True
)
def test_a_launcher_that_returns_the_same_handle(fleet, starts):
    wait_until(lambda: first(fleet).state == "lost")
    assert "the handle of the earlier start" in first(fleet).reason


def slow_start(starts: list[Handle]) -> dict[str, Any]:
    def restart() -> Handle:
        starts.append(Handle())
        while not getattr(starts[0], "closed", False):
            time.sleep(0.01)
        return starts[-1]

    return {"restart": restart}


@pytest.mark.parametrize("ways", [slow_start], indirect=True)
def test_a_start_that_outlasts_the_engine_is_stopped(supervised, starts):
    """Nobody waits until the server is ready."""
    wait_until(lambda: len(starts) == 2)
    supervised[1].times = replace(TIMES, stop=0.05)
    supervised[1].stop()
    starts[0].closed = True
    begun = time.monotonic()
    wait_until(lambda: starts[1].state == "stopped")
    # A start that is waited for takes longer.
    assert time.monotonic() - begun < SECONDS / 2
