"""Keeps a fleet alive: notices what has ended or hangs, and starts it again.

It runs on the background loop for as long as somebody holds the fleet. What it may do
is limited: a replica that keeps ending is given up, and one that holds other weights
than its siblings gets no traffic until a weight update has reached it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.event_loop import get_loop, submit
from torchrl_sglang.backends.fleet import Fleet, Replica
from torchrl_sglang.backends.http import HttpClient
from torchrl_sglang.backends.process import stop_starting
from torchrl_sglang.errors import ServerUnavailableError, SGLangError

__all__ = ["Supervisor"]

LOOK_SECONDS = 0.5
"""How often processes are looked at."""

PROGRESS_SECONDS = 120.0
"""Default for how long no request may end, of those under way, before servers are asked
to generate: long responses are no fault, and servers that pause must not be taken for
ones that hang."""

FIRST_RESTART_SECONDS = 0.5
"""Wait before a server is started again; it doubles with each start that fails."""

LONGEST_SECONDS = 60.0
"""Longest wait before a server is started again."""

STOP_SECONDS = 10.0
"""Budget for starts that are under way to be given up."""

STOP_POLL_SECONDS = 0.02
"""How often they are looked for."""

PROBE_BUDGET_SECONDS = 20.0
"""Budget for a server to generate one token."""


class Supervisor:
    """Watches one fleet.

    Args:
        fleet: the servers; held weakly.
        http: connections.
        progress: returns (requests under way, requests completed).
        may_probe: returns whether servers are expected to generate: not while
            generation is paused.
        max_restarts: how often a replica is started again before it is given up.
        progress_seconds: see :data:`PROGRESS_SECONDS`.
    """

    def __init__(
        self,
        fleet: Fleet,
        http: HttpClient,
        *,
        progress: Callable[[], tuple[int, int]],
        may_probe: Callable[[], bool],
        max_restarts: int,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._fleet = weakref.ref(fleet)
        self._http = http
        self._progress = progress
        self._may_probe = may_probe
        self._max_restarts = max_restarts
        self._progress_seconds = progress_seconds
        self._wake = asyncio.Event()
        self._starting: set[str] = set()
        self._stopped = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            thread_name_prefix="torchrl_sglang-restart"
        )
        self._last_progress = (time.monotonic(), 0)
        fleet.on_change = self.wake
        self._task = submit(self._watch())

    def wake(self) -> None:
        """Has the fleet looked at now. Can be called from any thread."""
        get_loop().call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        """Ends the watch, and what it is starting."""
        self._stopped.set()
        self._task.cancel()
        deadline = time.monotonic() + STOP_SECONDS
        # A start is seen a moment after it began.
        while self._starting and time.monotonic() < deadline:
            for url in list(self._starting):
                stop_starting(url)
            time.sleep(STOP_POLL_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        while True:
            fleet = self._fleet()
            if fleet is None:
                return
            try:
                await self._look(fleet)
            except SGLangError as error:
                torchrl_logger.warning(f"While watching the servers: {error}")
            except RuntimeError:
                # The interpreter is going down, and takes no new threads.
                return
            del fleet
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)

    async def _look(self, fleet: Fleet) -> None:
        fleet.notice_deaths()
        if self._is_stuck() and self._may_probe():
            await asyncio.gather(
                *(
                    self._probe(fleet, replica)
                    for replica in fleet.replicas
                    if replica.state == "serving"
                )
            )
        for replica in fleet.replicas:
            if replica.state == "down" and replica.url not in self._starting:
                self._start_again(fleet, replica)
        if self._router_is_gone(fleet):
            self._start_router_again(fleet)
        await fleet.update_router()

    def _router_is_gone(self, fleet: Fleet) -> bool:
        router = fleet.router
        return (
            router is not None
            and not router.usable
            and fleet.start_router is not None
            and router.url not in self._starting
            and bool(fleet.serving)
        )

    def _start_router_again(self, fleet: Fleet) -> None:
        """Until it is there, requests go to the servers directly."""
        assert fleet.router is not None
        url = fleet.router.url
        torchrl_logger.warning(f"{fleet.router!r} has ended and is started again.")
        self._starting.add(url)
        known = fleet.serving
        reference = weakref.ref(fleet)
        future = self._threads.submit(self._restart_router, fleet, known)

        def done(outcome: concurrent.futures.Future[Any]) -> None:
            self._starting.discard(url)
            fleet = reference()
            if outcome.cancelled():
                return
            error = outcome.exception()
            if error is not None:
                torchrl_logger.warning(f"The router did not start: {error}")
            elif fleet is None or fleet.closed:
                outcome.result().stop()
            else:
                fleet.router_joined(outcome.result(), known)
            self.wake()

        future.add_done_callback(done)

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
        """Asks a server for one token, which a scheduler that hangs cannot give."""
        try:
            answer = await self._http.request(
                "GET", f"{replica.url}/health_generate", timeout=PROBE_BUDGET_SECONDS
            )
            answer.raise_for_status()
        except SGLangError as error:
            if not self._may_probe():
                return
            torchrl_logger.warning(
                f"The server at {replica.url} does not generate any more: {error}"
            )
            process = replica.process
            fleet.mark_down(
                replica, f"The server at {replica.url} answered and did not generate."
            )
            if process is not None:
                # Its requests fail now, and go to the others.
                await asyncio.to_thread(process.stop)

    def _start_again(self, fleet: Fleet, replica: Replica) -> None:
        if replica.restart is None:
            return
        if replica.restarts >= self._max_restarts:
            replica.state = "lost"
            torchrl_logger.warning(
                f"The server at {replica.url} was started again {replica.restarts} "
                f"times and has ended again; it is given up. {_first_line(replica)}"
            )
            return
        replica.restarts += 1
        self._starting.add(replica.url)
        torchrl_logger.warning(
            f"The server at {replica.url} is started again ({replica.restarts} of "
            f"{self._max_restarts}). {_first_line(replica)}"
        )
        # What was killed needs a moment to let its port go; what fails again and again
        # needs longer.
        delay = min(FIRST_RESTART_SECONDS * 2.0 ** (replica.failures), LONGEST_SECONDS)
        future = self._threads.submit(self._restart, replica, delay)
        reference = weakref.ref(fleet)

        def done(outcome: concurrent.futures.Future[Any]) -> None:
            self._starting.discard(replica.url)
            fleet = reference()
            if outcome.cancelled():
                return
            error = outcome.exception()
            if error is not None:
                replica.failures += 1
                replica.reason = f"The server at {replica.url} did not start: {error}"
            elif fleet is None or fleet.closed:
                outcome.result().stop()
            else:
                replica.failures = 0
                fleet.joined(replica, outcome.result())
            self.wake()

        future.add_done_callback(done)

    def _restart_router(self, fleet: Fleet, urls: list[str]) -> Any:
        assert fleet.router is not None
        assert fleet.start_router is not None
        fleet.router.stop()
        if self._stopped.wait(FIRST_RESTART_SECONDS):
            raise ServerUnavailableError("The engine was shut down meanwhile.")
        return fleet.start_router(urls)

    def _restart(self, replica: Replica, delay: float) -> Any:
        assert replica.restart is not None
        if replica.process is not None:
            # Its log and what is left of its tree; the new one takes the same port.
            replica.process.stop()
        if self._stopped.wait(delay):
            raise ServerUnavailableError("The engine was shut down meanwhile.")
        return replica.restart()


def _first_line(replica: Replica) -> str:
    return replica.reason.partition("\n")[0].removesuffix(" The end of its log:")
