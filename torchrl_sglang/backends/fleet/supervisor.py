"""Keeps the servers of an engine running: restarts those that end or hang.

It runs on the background loop while the engine holds the fleet. A server that keeps
ending is given up. An engine that owns no server restarts none: its supervisor runs
while a server is out of rotation, and polls it. It also runs while requests are in
flight, so that those of a server that hangs go elsewhere.

Neither a server that hangs nor a paused one gives a token, and a server is paused
during a weight update of any engine object that uses it. So a missing token counts only
if the server reports, before and after, that it generates.
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
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.poller import ServerPoller
from torchrl_sglang.backends.fleet.replica import (
    NotStartedError,
    Replica,
    RouterHandle,
    ServerHandle,
)
from torchrl_sglang.errors import ServerTimeoutError, SGLangError
from torchrl_sglang.support.event_loop import get_loop
from torchrl_sglang.types import ServerCapabilities

H = TypeVar("H", ServerHandle, RouterHandle)

Started = Replica | str
"""What is started again: a server, or the router, under its address."""

CHECK_SECONDS = 0.5
"""Interval between checks of the processes."""

POLLS_PER_SECOND = 128
"""Most servers that are polled per second, on average; a poll takes about 2 ms."""

ADAPTER_CHECK_SECONDS = 2.0
"""Interval between checks that servers of another owner still hold the LoRA adapters
that this engine loaded."""

IN_FLIGHT_SECONDS = 2.0
"""Interval between checks that requests to servers of others make progress."""

PROGRESS_SECONDS = 120.0
"""Default time without a completed request, while some are in flight, after which
servers are asked to generate."""

FIRST_RESTART_SECONDS = 0.5
"""Wait before a restart; it doubles with each start that fails."""

LONGEST_RESTART_SECONDS = 60.0

FOLLOW_SECONDS = 2.0
"""Interval between looks at where servers of another owner run, in its directory."""

DIRECTORY_SECONDS = 10.0
"""Timeout of such a look."""

STOP_SECONDS = 10.0
"""Timeout for pending starts to be cancelled."""

ANSWER_SECONDS = 20.0
"""Timeout for a router, or for a scheduler, which a long prompt keeps busy."""

TOKEN_SECONDS = 15.0
"""Timeout for a token. After 20 s without one, SGLang reports that it is unhealthy, and
no longer whether it is paused."""

FRONT_SECONDS = 5.0
"""Timeout for an answer that a server gives without its scheduler."""

_REFUSED = {
    "input_ids": [0],
    "sampling_params": {"temperature": -1.0, "max_new_tokens": 1},
}
"""An invalid request: a server refuses it, or lets it wait while it is paused."""


async def revive(fleet: Fleet, control: ControlPlane, *, timeout: float) -> None:
    """Restarts servers that do not answer, and waits for all that are not lost.

    A scheduler that waits in a collective for a trainer that is gone answers nothing,
    while its process runs and its HTTP server reports that it is healthy.
    """
    deadline = time.monotonic() + timeout
    fleet.notice_deaths()
    asked = {each: (each.url, each.handle) for each in fleet.replicas}
    outcomes = await control.schedulers_answer(timeout=ANSWER_SECONDS)
    for replica, (url, handle) in asked.items():
        error, same = outcomes.get(url), (url, handle) == (replica.url, replica.handle)
        # The supervisor may have started it again meanwhile.
        if error is None or not replica.runs or not same:
            continue
        if handle is None:
            raise type(error)(
                f"{error} This engine does not own the server at {replica.url}, so it "
                f"cannot start it again; its owner has to."
            ) from error
        fleet.mark_down(replica, str(error), ended=True)
        await asyncio.to_thread(handle.stop)
    # The supervisor starts owned servers again; others wait for their owner.
    while down := fleet.restarting:
        if time.monotonic() > deadline:
            reasons = " ".join(r.reason for r in fleet.replicas if r.url in down)
            raise ServerTimeoutError(
                f"Servers that were started again are not there after {timeout:g} s. "
                f"{reasons}"
            )
        await asyncio.sleep(0.2)
    if not fleet.urls:
        raise fleet.no_server_error()


class Supervisor:
    """Watches one fleet, which it holds weakly: its servers end with it.

    ``progress`` returns how many requests are in flight and how many have completed;
    ``recall`` takes back those that a router was sent.
    """

    def __init__(
        self,
        fleet: Fleet,
        http: HttpClient,
        capabilities: ServerCapabilities,
        *,
        progress: Callable[[], tuple[int, int]],
        recall: Callable[[str], Coroutine[Any, Any, None]],
        poller: ServerPoller,
        max_restarts: int,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._fleet = weakref.ref(fleet)
        self._http = http
        self._capabilities = capabilities
        self._progress = progress
        self._recall = recall
        self._poller = poller
        self._max_restarts = max_restarts
        self._progress_seconds = progress_seconds
        self._stopped = threading.Event()
        self._begin_in_this_process()
        fleet.on_change, fleet.poll = lambda: self.begin(at_once=True), self.poll_now
        fleet.on_end, fleet.on_request = self._ended, self.begin
        if fleet.owns_any:
            self.begin()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._wake = asyncio.Event()
        # The handle of each server, or router, that starts; None before its start.
        self._starting: dict[Started, ServerHandle | RouterHandle | None] = {}
        # Starts that failed in a row.
        self._failures: Counter[Started] = Counter()
        self._last_progress = (time.monotonic(), 0)
        # When the next round of polls may begin.
        self._poll_at = 0.0
        self._publish_at = 0.0
        # Whether a router may have requests for a machine that is gone.
        self._lost_behind_router = False
        # The watch, and what it does not wait for: a server or a router can take long.
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, *, at_once: bool = False) -> None:
        """Begins to watch, from any thread; ``at_once`` checks without delay."""
        if not self._stopped.is_set() and not sys.is_finalizing():
            get_loop().call_soon_threadsafe(self._begin, at_once)

    def _begin(self, at_once: bool) -> None:
        if self._pid != os.getpid():
            # A forked process watches by itself, and owns nothing.
            self._begin_in_this_process()
        self._do("watch", self._watch)
        if at_once:
            self._wake.set()

    def _runs(self, name: str) -> bool:
        return name in self._tasks and not self._tasks[name].done()

    def _do(
        self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *args: object
    ) -> None:
        """Begins a task, unless it runs."""
        if not self._runs(name):
            self._tasks[name] = asyncio.ensure_future(work(*args))

    def _ended(self, url: str, elsewhere: bool) -> None:
        """Fails the requests to a server that ended; its machine may be gone."""
        if not sys.is_finalizing():
            self._lost_behind_router |= elsewhere
            get_loop().call_soon_threadsafe(self._http.give_up, url)

    async def poll_now(self) -> None:
        """Polls the servers that are out of rotation or suspected."""
        if (fleet := self._fleet()) is None:
            return
        if not fleet.owns_any:
            await self._follow(fleet)
        if fleet.generates:
            await self._poller.poll(fleet)
            # The watch may have begun to poll some of them just before.
            if self._runs("poll"):
                await asyncio.wait([self._tasks["poll"]])

    def stop(self) -> None:
        """Ends the watch and cancels pending starts."""
        self._stopped.set()
        if self._pid != os.getpid():
            return
        for task in list(self._tasks.values()):
            get_loop().call_soon_threadsafe(task.cancel)
        deadline = time.monotonic() + STOP_SECONDS
        # A server can be found a moment after its start began.
        while self._starting and time.monotonic() < deadline:
            for started in list(self._starting):
                self._cancel_start(started)
            time.sleep(0.02)

    def _cancel_start(self, started: Started) -> None:
        if (starting := self._starting.get(started)) is not None:
            starting.stop()

    async def _watch(self) -> None:
        # Nothing was in flight while nobody watched.
        self._last_progress = (time.monotonic(), self._progress()[1])
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
        if self._runs("poll") or fleet.to_poll or fleet.owns_any:
            return CHECK_SECONDS
        if fleet.directory is not None:
            return FOLLOW_SECONDS
        if self._poller.adapters is not None:
            return ADAPTER_CHECK_SECONDS
        in_flight, _ = self._progress()
        return IN_FLIGHT_SECONDS if in_flight else None

    async def _check(self, fleet: Fleet) -> None:
        now, to_poll = time.monotonic(), fleet.to_poll
        if to_poll and fleet.generates and now >= self._poll_at:
            # Without a wait where the next check is late enough.
            wait = len(to_poll) / POLLS_PER_SECOND - CHECK_SECONDS
            self._poll_at = now + max(wait, 0.0)
            self._do("poll", self._poller.poll, fleet)
        if not fleet.owns_any:
            self._do("follow", self._follow, fleet)
            await self._probe_stuck(fleet)
            adapters = self._poller.adapters
            if adapters is not None and not fleet.to_poll:
                await adapters.discover_changes()
            return
        fleet.notice_deaths()
        if time.monotonic() >= self._publish_at:
            # Once more, in case that the directory was started again.
            self._publish_at = time.monotonic() + FOLLOW_SECONDS
            fleet.publish()
        await self._probe_stuck(fleet)
        for replica in fleet.replicas:
            if replica.state != "down":
                continue
            if fleet.asleep:
                # A trainer uses the memory that it would take.
                await asyncio.to_thread(self._cancel_start, replica)
            elif replica not in self._starting:
                self._restart(fleet, replica)
        self._check_router(fleet)

    async def _follow(self, fleet: Fleet) -> None:
        """Takes over from the directory where servers of another owner run."""
        if fleet.directory is not None:
            try:
                async with asyncio.timeout(DIRECTORY_SECONDS):
                    urls = await fleet.directory.urls()
            except (SGLangError, TimeoutError) as error:
                torchrl_logger.debug(f"The directory of servers says nothing: {error}")
            else:
                fleet.follow(urls)
        # The copy sends nothing more through the router until all servers serve.
        await self._recall_lost(fleet)

    async def _recall_lost(self, fleet: Fleet) -> None:
        if self._lost_behind_router:
            self._lost_behind_router = False
            if fleet.router is not None:
                await self._recall(fleet.router.url)

    def _is_stuck(self) -> bool:
        """Returns whether requests are in flight and none has completed for long."""
        now = time.monotonic()
        in_flight, completed = self._progress()
        since, before = self._last_progress
        waits = bool(in_flight) and completed == before
        if waits and now - since < self._progress_seconds:
            return False
        self._last_progress = (now, completed)
        return waits

    async def _probe_stuck(self, fleet: Fleet) -> None:
        """Probes what serves if no request has completed for long."""
        if self._is_stuck() and fleet.generates:
            serving = [each for each in fleet.replicas if each.state == "serving"]
            probes = fan_out(lambda each: self._probe(fleet, each), serving)
            await asyncio.gather(self._probe_router(fleet), probes)

    async def _probe(self, fleet: Fleet, replica: Replica) -> None:
        """Marks a server that hangs as down and stops it, unless it is paused."""
        hanging = await hangs(self._http, self._capabilities, replica.url)
        if hanging and fleet.generates and replica.state == "serving":
            handle = replica.handle
            fleet.mark_down(
                replica,
                f"The server at {replica.url} answered and did not generate.",
                ended=True,
            )
            if handle is not None:
                await asyncio.to_thread(handle.stop)
            else:
                torchrl_logger.warning(
                    f"{replica.reason} It gets no requests until it answers."
                )

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

    def _check_router(self, fleet: Fleet) -> None:
        """Tells the router which servers serve, or starts it again."""
        router, start, known = fleet.router, fleet.start_router, fleet.serving
        if router is None:
            return
        if router.usable:
            self._do("router", self._update_router, fleet)
        elif start is not None and known and router.url not in self._starting:
            torchrl_logger.warning(f"{router!r} has ended and is started again.")
            # Meanwhile requests go to servers directly.
            self._start(
                router,
                router.url,
                partial(start, known),
                lambda fleet, found: fleet.set_router(found, known),
                lambda _, error: torchrl_logger.warning(
                    f"The router did not start: {error}"
                ),
            )

    async def _update_router(self, fleet: Fleet) -> None:
        await fleet.update_router()
        await self._recall_lost(fleet)

    def _restart(self, fleet: Fleet, replica: Replica) -> None:
        if replica.restart is None:
            return
        why = replica.reason.partition("\n")[0].removesuffix(" The end of its log:")
        if not fleet.may_restart(replica, self._max_restarts):
            torchrl_logger.warning(
                f"The server at {replica.url} was started again {replica.restarts} "
                f"times and has ended again; it is given up. {why}"
            )
            return
        torchrl_logger.warning(
            f"The server at {replica.url} is started again ({replica.restarts + 1} "
            f"of {self._max_restarts}). {why}"
        )
        self._start(
            replica.handle,
            replica,
            replica.restart,
            lambda fleet, handle: fleet.joined(replica, handle),
            lambda fleet, error: fleet.start_failed(replica, error),
        )

    def _start(
        self,
        old: H | None,
        what: Started,
        start: Callable[[], H],
        done: Callable[[Fleet, H], None],
        failed: Callable[[Fleet, BaseException], None],
    ) -> None:
        """Starts a server in a thread that the interpreter's exit does not wait for."""
        self._starting[what] = None

        def work() -> None:
            try:
                if old is not None:
                    # Removes its log and what is left of its process tree.
                    old.stop()
                # A killed process needs a moment to release its port.
                delay = FIRST_RESTART_SECONDS * 2.0 ** self._failures[what]
                if self._stopped.wait(min(delay, LONGEST_RESTART_SECONDS)):
                    return
                found = start()
                self._starting[what] = found
                found.wait_ready()
                fleet = self._fleet()
                if fleet is None or self._stopped.is_set():
                    found.stop()
                else:
                    self._failures[what] = 0
                    done(fleet, found)
            except BaseException as error:  # noqa: BLE001 - A thread has no caller.
                self._failures[what] += not isinstance(error, NotStartedError)
                if (fleet := self._fleet()) is not None:
                    failed(fleet, error)
            finally:
                # Last: until then it is not started a second time.
                del self._starting[what]
            self.begin(at_once=True)

        threading.Thread(target=work, name="torchrl_sglang-start", daemon=True).start()


async def hangs(
    http: HttpClient,
    capabilities: ServerCapabilities,
    url: str,
    *,
    timeout: float = TOKEN_SECONDS,
) -> bool:
    """Returns whether a server gives no token although nobody has paused it."""
    soon = min(timeout, FRONT_SECONDS)

    async def is_paused() -> bool:
        if capabilities.tells_paused:
            return await _succeeds(http, f"{url}/ready", soon) is False
        return await _holds_requests(http, url, soon)

    if await is_paused() or await _succeeds(http, f"{url}/health_generate", timeout):
        return False
    paused = await is_paused()
    if paused and capabilities.tells_paused:
        # A server that has noticed that it hangs reports the same.
        paused = await _holds_requests(http, url, soon)
    return not paused


async def _succeeds(http: HttpClient, url: str, timeout: float) -> bool | None:
    """Returns whether a GET succeeds; ``None`` where there is no answer."""
    try:
        return (await http.request("GET", url, timeout=timeout)).ok
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
        return None


async def _holds_requests(http: HttpClient, url: str, timeout: float) -> bool:
    """Returns whether requests wait in a server that is alive."""
    try:
        await http.request("POST", f"{url}/generate", _REFUSED, timeout=timeout)
    except ServerTimeoutError:
        return bool(await _succeeds(http, f"{url}/model_info", timeout))
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
    return False
