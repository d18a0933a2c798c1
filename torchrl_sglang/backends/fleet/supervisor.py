"""Keeps the servers of an engine running: restarts those that end or hang.

It runs on the background loop while the engine holds the fleet. A server that keeps
ending is given up. An engine that owns no server restarts none: its supervisor only
runs while a server is out of rotation, and polls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.client.liveness import hangs
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.poller import ServerPoller
from torchrl_sglang.backends.fleet.replica import Replica, ServerHandle
from torchrl_sglang.backends.fleet.routing import RouterHandle
from torchrl_sglang.backends.support.event_loop import get_loop
from torchrl_sglang.errors import (
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import ServerCapabilities

__all__ = ["Supervisor", "revive"]

H = TypeVar("H", ServerHandle, RouterHandle)

CHECK_SECONDS = 0.5
"""Interval between checks of the processes."""

ADAPTER_CHECK_SECONDS = 2.0
"""Interval between checks that servers of another owner still hold the LoRA adapters
that this engine loaded: after a restart they do not."""

PROGRESS_SECONDS = 120.0
"""Default time without a completed request, while some are in flight, after which
servers are asked to generate: long responses are normal."""

FIRST_RESTART_SECONDS = 0.5
"""Wait before a restart; it doubles with each start that fails."""

LONGEST_RESTART_SECONDS = 60.0
"""Longest wait before a restart."""

STOP_SECONDS = 10.0
"""Timeout for pending starts to be cancelled."""

ANSWER_SECONDS = 20.0
"""Timeout for a router, or for a scheduler, which a long prompt keeps busy."""


async def revive(fleet: Fleet, control: ControlPlane, *, timeout: float) -> None:
    """Restarts servers that do not answer, and waits for all that are not lost.

    A scheduler that waits in a collective for a trainer that is gone answers nothing,
    while its process runs and its HTTP server reports that it is healthy.
    """
    deadline = time.monotonic() + timeout
    fleet.notice_deaths()
    asked = {replica.url: replica.handle for replica in fleet.replicas}
    outcomes = await control.schedulers_answer(timeout=ANSWER_SECONDS)
    for replica in fleet.replicas:
        error = outcomes.get(replica.url)
        # The supervisor may have started it again meanwhile.
        same = replica.handle is asked[replica.url]
        if error is None or not replica.runs or not same:
            continue
        if replica.handle is None:
            raise type(error)(
                f"{error} This engine does not own the server at {replica.url}, so it "
                f"cannot start it again; its owner has to."
            ) from error
        torchrl_logger.warning(f"{error} The server is started again.")
        fleet.mark_down(replica, str(error))
        await asyncio.to_thread(replica.handle.stop)
    # The supervisor starts owned servers again; others wait for their owner.
    while down := [r for r in fleet.replicas if r.state == "down" and fleet.owns(r)]:
        if time.monotonic() > deadline:
            reasons = " ".join(replica.reason for replica in down)
            raise ServerTimeoutError(
                f"Servers that were started again are not there after {timeout:g} s. "
                f"{reasons}"
            )
        await asyncio.sleep(0.2)
    if not fleet.urls:
        raise fleet.no_server_error()


class Supervisor:
    """Watches one fleet, which it holds weakly.

    ``progress`` returns how many requests are in flight and how many have completed;
    ``may_probe``, which must not hold the fleet, whether its servers should generate.
    """

    def __init__(
        self,
        fleet: Fleet,
        http: HttpClient,
        capabilities: ServerCapabilities,
        *,
        progress: Callable[[], tuple[int, int]],
        may_probe: Callable[[Fleet], bool],
        poller: ServerPoller,
        max_restarts: int,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._fleet = weakref.ref(fleet)
        self._http = http
        self._capabilities = capabilities
        self._progress = progress
        self._may_probe = may_probe
        self._poller = poller
        self._max_restarts = max_restarts
        self._progress_seconds = progress_seconds
        self._stopped = threading.Event()
        self._begin_in_this_process()
        fleet.on_change, fleet.poll = self.wake, self.poll_now
        if fleet.owns_any:
            self.begin()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._wake = asyncio.Event()
        # Address -> handle of a server or router that starts; None before its start.
        self._starting: dict[str, ServerHandle | RouterHandle | None] = {}
        # Address -> starts that failed in a row.
        self._failures: Counter[str] = Counter()
        self._routing: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._last_progress = (time.monotonic(), 0)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begins to watch, from any thread; does nothing if it watches already."""
        if not self._stopped.is_set() and not sys.is_finalizing():
            get_loop().call_soon_threadsafe(self._begin)

    def wake(self) -> None:
        """Checks the fleet now, from any thread."""
        if not self._stopped.is_set() and not sys.is_finalizing():
            get_loop().call_soon_threadsafe(self._begin, True)

    def _begin(self, at_once: bool = False) -> None:
        if self._pid != os.getpid():
            # A forked process watches by itself, and owns nothing.
            self._begin_in_this_process()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._watch())
        if at_once:
            self._wake.set()

    async def poll_now(self) -> None:
        """Polls the servers that are out of rotation or suspected."""
        fleet = self._fleet()
        if fleet is not None and self._may_probe(fleet):
            await self._poller.poll(fleet)

    def stop(self) -> None:
        """Ends the watch and cancels pending starts."""
        self._stopped.set()
        if self._pid != os.getpid():
            return
        for task in (self._task, self._polling):
            if task is not None:
                get_loop().call_soon_threadsafe(task.cancel)
        deadline = time.monotonic() + STOP_SECONDS
        # A server can be found a moment after its start began.
        while self._starting and time.monotonic() < deadline:
            for url in list(self._starting):
                self._cancel_start(url)
            time.sleep(0.02)

    def _cancel_start(self, url: str) -> None:
        starting = self._starting.get(url)
        if starting is not None:
            starting.stop()

    async def _watch(self) -> None:
        while not self._stopped.is_set():
            fleet = self._fleet()
            if fleet is None:
                return
            try:
                await self._check(fleet)
            except Exception as error:  # noqa: BLE001 - The watch goes on, always.
                if sys.is_finalizing() or self._stopped.is_set():
                    return
                torchrl_logger.warning(f"Watching the servers failed: {error!r}")
            wait = self._next_check(fleet)
            if wait is None:
                return
            del fleet
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)

    def _next_check(self, fleet: Fleet) -> float | None:
        """Returns the seconds to the next check; None if there is nothing to watch."""
        busy = self._polling is not None and not self._polling.done()
        if busy or fleet.to_poll or fleet.owns_any:
            return CHECK_SECONDS
        return ADAPTER_CHECK_SECONDS if self._poller.can_reload_adapters else None

    async def _check(self, fleet: Fleet) -> None:
        self._poll(fleet)
        if not fleet.owns_any:
            if self._poller.can_reload_adapters and not fleet.to_poll:
                await self._poller.discover_adapters()
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
                # A trainer uses the memory that it would take.
                await asyncio.to_thread(self._cancel_start, replica.url)
            elif replica.url not in self._starting:
                self._restart(fleet, replica)
        self._check_router(fleet)

    def _is_stuck(self) -> bool:
        """Returns whether requests are in flight and none has completed for long."""
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
        """Marks a server that hangs as down and stops it, unless it is paused."""
        if not await hangs(self._http, self._capabilities, replica.url):
            return
        if not self._may_probe(fleet) or replica.state != "serving":
            return
        torchrl_logger.warning(f"The server at {replica.url} does not generate.")
        handle = replica.handle
        fleet.mark_down(
            replica, f"The server at {replica.url} answered and did not generate."
        )
        if handle is not None:
            # Its requests fail now, and are sent to the others.
            await asyncio.to_thread(handle.stop)

    async def _probe_router(self, fleet: Fleet) -> None:
        router = fleet.router
        if router is None or fleet.start_router is None or not router.usable:
            return
        try:
            url = f"{router.url}/workers"
            response = await self._http.request("GET", url, timeout=ANSWER_SECONDS)
            response.raise_for_status()
        except SGLangError as error:
            torchrl_logger.warning(f"{router!r} does not answer: {error}")
            await asyncio.to_thread(router.stop)

    def _poll(self, fleet: Fleet) -> None:
        # As a task: a server can take long to answer.
        idle = self._polling is None or self._polling.done()
        if idle and fleet.to_poll and self._may_probe(fleet):
            self._polling = asyncio.ensure_future(self._poller.poll(fleet))

    def _check_router(self, fleet: Fleet) -> None:
        router = fleet.router
        if router is None:
            return
        if router.usable:
            # As a task: the router can take long over a server.
            if self._routing is None or self._routing.done():
                self._routing = asyncio.ensure_future(fleet.update_router())
        elif (
            fleet.start_router is not None
            and router.url not in self._starting
            and fleet.serving
        ):
            self._restart_router(fleet, router)

    def _restart_router(self, fleet: Fleet, router: RouterHandle) -> None:
        """Starts the router again; meanwhile requests go to servers directly."""
        torchrl_logger.warning(f"{router!r} has ended and is started again.")
        known, start = fleet.serving, fleet.start_router
        assert start is not None

        def begin() -> RouterHandle:
            router.stop()
            self._wait(router.url)
            return start(known)

        def done(fleet: Fleet, found: RouterHandle) -> None:
            fleet.set_router(found, known)

        def failed(error: BaseException) -> None:
            torchrl_logger.warning(f"The router did not start: {error}")

        self._in_thread(router.url, begin, done, failed)

    def _restart(self, fleet: Fleet, replica: Replica) -> None:
        restart = replica.restart
        if restart is None:
            return
        why = replica.reason.partition("\n")[0].removesuffix(" The end of its log:")
        if not fleet.begin_restart(replica, self._max_restarts):
            torchrl_logger.warning(
                f"The server at {replica.url} was started again {replica.restarts} "
                f"times and has ended again; it is given up. {why}"
            )
            return
        torchrl_logger.warning(
            f"The server at {replica.url} is started again ({replica.restarts} of "
            f"{self._max_restarts}). {why}"
        )

        def begin() -> ServerHandle:
            if replica.handle is not None:
                # Removes its log and what is left of its process tree.
                replica.handle.stop()
            self._wait(replica.url)
            return restart()

        def done(fleet: Fleet, handle: ServerHandle) -> None:
            fleet.joined(replica, handle)

        def failed(error: BaseException) -> None:
            if (fleet := self._fleet()) is not None:
                reason = f"The server at {replica.url} did not start: {error}"
                fleet.change(replica, reason=reason)

        self._in_thread(replica.url, begin, done, failed)

    def _wait(self, url: str) -> None:
        """Waits before a start: a killed process needs a moment to release its port."""
        delay = FIRST_RESTART_SECONDS * 2.0 ** self._failures[url]
        if self._stopped.wait(min(delay, LONGEST_RESTART_SECONDS)):
            raise ServerUnavailableError("The engine was shut down meanwhile.")

    def _in_thread(
        self,
        url: str,
        begin: Callable[[], H],
        done: Callable[[Fleet, H], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Starts a server in a thread that the interpreter's exit does not wait for."""
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
                    self._failures[url] = 0
                    done(fleet, found)
            except BaseException as error:  # noqa: BLE001 - A thread has no caller.
                self._failures[url] += 1
                failed(error)
            finally:
                # Last: until then it is not started a second time.
                del self._starting[url]
            if not sys.is_finalizing():
                self.wake()

        threading.Thread(target=work, name="torchrl_sglang-start", daemon=True).start()
