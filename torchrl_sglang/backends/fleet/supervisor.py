"""Keeps a fleet alive: notices what has ended or hangs, and starts it again.

It runs on the background loop for as long as somebody holds the fleet. What it may do
is limited: a replica that keeps ending is given up, and one that holds other weights
than its siblings gets no traffic until a weight update has reached it.

An engine that owns no server starts none: its watch only runs while one of the servers
is out of rotation, and takes it back when it has what the others have.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.client.liveness import hangs
from torchrl_sglang.backends.fleet.follower import Follower
from torchrl_sglang.backends.fleet.membership import (
    Fleet,
    OwnedProcess,
    Replica,
    RouterLike,
)
from torchrl_sglang.backends.support.event_loop import get_loop
from torchrl_sglang.errors import ServerUnavailableError, SGLangError
from torchrl_sglang.types import ServerCapabilities

__all__ = ["Supervisor"]

P = TypeVar("P", OwnedProcess, RouterLike)

LOOK_SECONDS = 0.5
"""How often processes are looked at."""

PROGRESS_SECONDS = 120.0
"""Default for how long no request may end, of those under way, before servers are asked
to generate: long responses are no fault."""

KEEP_SECONDS = 2.0
"""How often an engine looks whether servers that it does not own still have the LoRA
adapters that it has loaded: whoever starts such a server again does not have them."""

FIRST_RESTART_SECONDS = 0.5
"""Wait before a server is started again; it doubles with each start that fails."""

LONGEST_SECONDS = 60.0
"""Longest wait before a server is started again."""

STOP_SECONDS = 10.0
"""Budget for starts that are under way to be given up."""

STOP_POLL_SECONDS = 0.02
"""How often they are looked for."""

PROBE_BUDGET_SECONDS = 20.0
"""Budget for the router to answer."""


class Supervisor:
    """Watches one fleet.

    Args:
        fleet: the servers; held weakly.
        http: connections.
        capabilities: what the servers can do.
        progress: returns (requests under way, requests completed).
        may_probe: returns whether the servers of a fleet are expected to generate:
            not while generation is paused. It must not hold the fleet.
        follower: asks servers what they have.
        max_restarts: how often a replica is started again before it is given up.
        progress_seconds: see :data:`PROGRESS_SECONDS`.
    """

    def __init__(
        self,
        fleet: Fleet,
        http: HttpClient,
        capabilities: ServerCapabilities,
        *,
        progress: Callable[[], tuple[int, int]],
        may_probe: Callable[[Fleet], bool],
        follower: Follower,
        max_restarts: int,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._fleet = weakref.ref(fleet)
        self._http = http
        self._capabilities = capabilities
        self._progress = progress
        self._may_probe = may_probe
        self._max_restarts = max_restarts
        self._follower = follower
        self._progress_seconds = progress_seconds
        self._stopped = threading.Event()
        self._begin_in_this_process()
        fleet.on_change, fleet.look = self.wake, self.look_now
        if any(fleet.owns(replica) for replica in fleet.replicas):
            self.begin()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._wake = asyncio.Event()
        # Address -> handle of a server or router that starts; None before its start.
        self._starting: dict[str, OwnedProcess | RouterLike | None] = {}
        self._router_failures = 0
        self._routing: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._last_progress = (time.monotonic(), 0)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begins to watch, unless it does so. Can be called from any thread."""
        if not self._stopped.is_set() and not sys.is_finalizing():
            get_loop().call_soon_threadsafe(self._begin)

    def wake(self) -> None:
        """Has the fleet looked at now. Can be called from any thread."""
        if not self._stopped.is_set() and not sys.is_finalizing():
            get_loop().call_soon_threadsafe(self._begin, True)

    def _begin(self, at_once: bool = False) -> None:
        if self._pid != os.getpid():
            # A fork watches by itself, and owns nothing.
            self._begin_in_this_process()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._watch())
        if at_once:
            self._wake.set()

    async def look_now(self) -> None:
        """Looks at the servers that are out of rotation or suspected."""
        fleet = self._fleet()
        if fleet is not None and self._may_probe(fleet):
            await self._follower.look(fleet)

    def stop(self) -> None:
        """Ends the watch, and what it is starting."""
        self._stopped.set()
        if self._pid != os.getpid():
            return
        for task in (self._task, self._following):
            if task is not None:
                get_loop().call_soon_threadsafe(task.cancel)
        deadline = time.monotonic() + STOP_SECONDS
        # A start is seen a moment after it began.
        while self._starting and time.monotonic() < deadline:
            for url in list(self._starting):
                self._stop_start(url)
            time.sleep(STOP_POLL_SECONDS)

    def _stop_start(self, url: str) -> None:
        starting = self._starting.get(url)
        if starting is not None:
            starting.stop()

    async def _watch(self) -> None:
        while not self._stopped.is_set():
            fleet = self._fleet()
            if fleet is None:
                return
            try:
                await self._look(fleet)
            except Exception as error:  # noqa: BLE001 - The watch goes on, always.
                if sys.is_finalizing() or self._stopped.is_set():
                    return
                torchrl_logger.warning(f"While watching the servers: {error!r}")
            wait = self._next_look(fleet)
            if wait is None:
                return
            del fleet
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)

    def _next_look(self, fleet: Fleet) -> float | None:
        """Returns how soon to look again, or None where there is nothing to watch."""
        busy = self._following is not None and not self._following.done()
        if busy or fleet.unsettled or any(fleet.owns(each) for each in fleet.replicas):
            return LOOK_SECONDS
        return KEEP_SECONDS if self._follower.keeps_adapters else None

    async def _look(self, fleet: Fleet) -> None:
        self._follow(fleet)
        if not any(fleet.owns(replica) for replica in fleet.replicas):
            if self._follower.keeps_adapters and not fleet.unsettled:
                await self._follower.look_at_adapters()
            return
        fleet.notice_deaths()
        if self._is_stuck() and self._may_probe(fleet):
            await asyncio.gather(
                self._probe_router(fleet),
                *(
                    self._probe(fleet, replica)
                    for replica in fleet.replicas
                    if replica.state == "serving"
                ),
            )
        for replica in fleet.replicas:
            if replica.state != "down":
                continue
            if fleet.asleep:
                # Others use the memory that it would take.
                await asyncio.to_thread(self._stop_start, replica.url)
            elif replica.url not in self._starting:
                self._start_again(fleet, replica)
        self._look_after_router(fleet)

    def _is_stuck(self) -> bool:
        """Returns whether requests are under way and none has ended for long."""
        now = time.monotonic()
        in_flight, completed = self._progress()
        since, before = self._last_progress
        if not in_flight or completed != before:
            self._last_progress = (now, completed)
            return False
        if now - since < self._progress_seconds:
            return False
        self._last_progress = (now, completed)
        return True

    async def _probe(self, fleet: Fleet, replica: Replica) -> None:
        """Starts a server again that hangs, and none that somebody has paused."""
        if not await hangs(self._http, self._capabilities, replica.url):
            return
        if not self._may_probe(fleet) or replica.state != "serving":
            return
        torchrl_logger.warning(f"The server at {replica.url} does not generate.")
        process = replica.process
        fleet.mark_down(
            replica, f"The server at {replica.url} answered and did not generate."
        )
        if process is not None:
            # Its requests fail now, and go to the others.
            await asyncio.to_thread(process.stop)

    async def _probe_router(self, fleet: Fleet) -> None:
        router = fleet.router
        if router is None or fleet.start_router is None or not router.usable:
            return
        if not await self._answers(f"{router.url}/workers"):
            torchrl_logger.warning(f"{router!r} does not answer.")
            await asyncio.to_thread(router.stop)

    async def _answers(self, url: str) -> bool:
        try:
            answer = await self._http.request("GET", url, timeout=PROBE_BUDGET_SECONDS)
            answer.raise_for_status()
        except SGLangError as error:
            torchrl_logger.debug(f"A probe failed: {error}")
            return False
        return True

    def _follow(self, fleet: Fleet) -> None:
        # In a task of its own: a server can take long to answer.
        idle = self._following is None or self._following.done()
        if idle and fleet.unsettled and self._may_probe(fleet):
            self._following = asyncio.ensure_future(self._follower.look(fleet))

    def _look_after_router(self, fleet: Fleet) -> None:
        router = fleet.router
        if router is None:
            return
        if router.usable:
            # In a task of its own: the router can take long over a server.
            if self._routing is None or self._routing.done():
                self._routing = asyncio.ensure_future(fleet.update_router())
        elif (
            fleet.start_router is not None
            and router.url not in self._starting
            and fleet.serving
        ):
            self._start_router_again(fleet, router)

    def _start_router_again(self, fleet: Fleet, router: RouterLike) -> None:
        """Until it is there, requests go to the servers directly."""
        torchrl_logger.warning(f"{router!r} has ended and is started again.")
        known, start = fleet.serving, fleet.start_router
        assert start is not None

        def begin() -> RouterLike:
            router.stop()
            self._wait(self._router_failures)
            return start(known)

        def done(fleet: Fleet, found: RouterLike) -> None:
            self._router_failures = 0
            fleet.router_joined(found, known)

        def failed(error: BaseException) -> None:
            self._router_failures += 1
            torchrl_logger.warning(f"The router did not start: {error}")

        self._in_thread(router.url, begin, done, failed)

    def _start_again(self, fleet: Fleet, replica: Replica) -> None:
        restart = replica.restart
        if restart is None:
            return
        if replica.restarts >= self._max_restarts:
            replica.state = "lost"
            torchrl_logger.warning(
                f"The server at {replica.url} was started again {replica.restarts} "
                f"times and has ended again; it is given up. {_first_line(replica)}"
            )
            return
        replica.restarts += 1
        torchrl_logger.warning(
            f"The server at {replica.url} is started again ({replica.restarts} of "
            f"{self._max_restarts}). {_first_line(replica)}"
        )

        def begin() -> OwnedProcess:
            if replica.process is not None:
                # Its log and what is left of its tree; the new one takes the same port.
                replica.process.stop()
            self._wait(replica.failures)
            return restart()

        def done(fleet: Fleet, process: OwnedProcess) -> None:
            replica.failures = 0
            fleet.joined(replica, process)

        def failed(error: BaseException) -> None:
            replica.failures += 1
            replica.reason = f"The server at {replica.url} did not start: {error}"

        self._in_thread(replica.url, begin, done, failed)

    def _wait(self, failures: int) -> None:
        """Waits before a start: what was killed needs a moment to let its port go."""
        delay = min(FIRST_RESTART_SECONDS * 2.0**failures, LONGEST_SECONDS)
        if self._stopped.wait(delay):
            raise ServerUnavailableError("The engine was shut down meanwhile.")

    def _in_thread(
        self,
        url: str,
        begin: Callable[[], P],
        done: Callable[[Fleet, P], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Starts something in a thread that the interpreter's end does not wait for."""
        self._starting[url] = None
        reference = self._fleet

        def work() -> None:
            try:
                found = begin()
                self._starting[url] = found
                found.wait_ready()
                fleet = reference()
                if fleet is None or self._stopped.is_set():
                    found.stop()
                else:
                    done(fleet, found)
            except BaseException as error:  # noqa: BLE001 - A thread has no caller.
                failed(error)
            finally:
                # Last of all: until then nobody starts it a second time.
                del self._starting[url]
            if not sys.is_finalizing():
                self.wake()

        threading.Thread(target=work, name="torchrl_sglang-start", daemon=True).start()


def _first_line(replica: Replica) -> str:
    return replica.reason.partition("\n")[0].removesuffix(" The end of its log:")
