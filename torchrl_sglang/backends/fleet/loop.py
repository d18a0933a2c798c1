"""Supervises the servers of an engine, and restarts ended and hanging servers.

A task on the background loop runs while the engine holds the fleet. It polls the
servers, applies the observations to the fleet, and executes the actions of
:func:`.reconcile`. A server that keeps ending is given up. An engine without servers of
its own restarts none: its task runs while a server is out of rotation, and polls it. It
also runs while requests are in flight, to move a hanging server's requests elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.actions import (
    Action,
    CancelStart,
    Check,
    DropAdapter,
    FailRequests,
    LoadAdapter,
    Poll,
    Publish,
    Recall,
    Restart,
    Route,
    StartRouter,
    Stop,
    Tell,
)
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.observe import ServerPoller, hangs
from torchrl_sglang.backends.fleet.reconcile import (
    Ended,
    Moved,
    Started,
    StartFailed,
    Tick,
)
from torchrl_sglang.backends.fleet.replica import (
    NotStartedError,
    Replica,
    RouterHandle,
    ServerHandle,
)
from torchrl_sglang.errors import ServerStartError, ServerTimeoutError, SGLangError
from torchrl_sglang.support.event_loop import get_loop
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import ServerCapabilities

H = TypeVar("H", ServerHandle, RouterHandle)

ROUTER = "router"
"""Key of the router among the ranks of restarted servers."""

ROUTER_CALLS = 8
"""Largest number of concurrent calls to add servers to a router or remove them."""

POLLS_PER_SECOND = 128
"""Most polls per second, on average; a poll takes about 2 ms."""

SCHEDULER_TIMEOUT = 20.0
"""Timeout for a router, or for a scheduler busy with a long prompt."""


@dataclass(frozen=True, kw_only=True)
class WatchTimes:
    """Intervals and timeouts of a :class:`Supervisor`, in seconds."""

    check: float = 0.5
    """Interval between checks of the processes."""
    adapters: float = 2.0
    """Interval between checks for the LoRA adapters of this engine on servers of
    another owner."""
    in_flight: float = 2.0
    """Interval between progress checks of requests to servers of other owners."""
    progress: float = 120.0
    """Time without a completed request, while some are in flight, before servers are
    probed with a generation."""
    probe: float = 5.0
    """Timeout for a server's report of its pause."""
    first_restart: float = 0.5
    """Wait before a restart; it doubles with each failed start."""
    longest_restart: float = 60.0
    """Longest wait before a restart."""
    directory: float = 2.0
    """Interval between lookups of server addresses in another owner's directory."""
    stop: float = 10.0
    """Timeout for pending starts to be cancelled."""


async def revive(fleet: Fleet, control: ControlPlane, *, timeout: float) -> None:
    """Restarts unresponsive servers, and waits for all servers except lost servers.

    A scheduler waiting in a collective for a dead trainer answers nothing, while its
    process runs and its HTTP server reports itself as healthy.
    """
    deadline = time.monotonic() + timeout
    fleet.notice_deaths()
    replicas = fleet.replicas
    outcomes = await control.schedulers_answer(timeout=SCHEDULER_TIMEOUT)
    for replica in replicas:
        error, now = outcomes.get(replica.url), fleet.state.find(replica.rank)
        # The server may have been started again meanwhile, or removed.
        if error is None or now is None or not now.runs:
            continue
        if (now.url, now.handle) != (replica.url, replica.handle):
            continue
        if replica.handle is None:
            raise type(error)(
                f"{error} This engine does not own the server at {replica.url}, so it "
                f"cannot start it again; its owner has to."
            ) from error
        fleet.apply(Ended(replica=replica, reason=str(error)))
        await asyncio.to_thread(replica.handle.stop)
    # Owned servers are restarted here; others wait for their owner.
    while down := fleet.state.restarting:
        if time.monotonic() > deadline:
            reasons = " ".join(r.reason for r in fleet.replicas if r.url in down)
            raise ServerTimeoutError(
                f"Servers that were started again are not there after {timeout:g} s. "
                f"{reasons}"
            )
        await asyncio.sleep(0.2)
    if not fleet.urls:
        raise fleet.state.no_server_error()


class Supervisor:
    """Supervises a fleet through a weak reference: its servers end with it.

    ``progress`` returns the numbers of in-flight and of completed requests; ``recall``
    resends the requests sent to a router.
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
        times: WatchTimes | None = None,
    ) -> None:
        self._fleet = weakref.ref(fleet)
        self._http = http
        self._capabilities = capabilities
        self._progress = progress
        self._recall = recall
        self._poller = poller
        self._max_restarts = max_restarts
        self.times = times or WatchTimes()
        self._stopped = threading.Event()
        self._begin_in_this_process()
        # A forked process watches by itself, and owns nothing.
        after_fork(self._begin_in_this_process)
        fleet.act_with(self._act)
        if fleet.state.owns_any:
            self.begin()

    def _begin_in_this_process(self) -> None:
        self._wake = asyncio.Event()
        # Rank or router -> handle of a pending start; None before its start.
        self._starting: dict[int | str, ServerHandle | RouterHandle | None] = {}
        # Successive failed starts.
        self._failures: Counter[int | str] = Counter()
        self._last_progress = (time.monotonic(), 0)
        # When the next round of polls may begin.
        self._poll_at = 0.0
        self._publish_at = 0.0
        # Whether a router may hold requests for a dead machine.
        self._lost_behind_router = False
        # The watch, and slow tasks, which run beside it.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Tasks to load or drop an adapter.
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, *, at_once: bool = False) -> None:
        """Begins to watch, from any thread; ``at_once`` checks without delay."""
        self._act([Check(at_once=at_once)])

    def _begin(self, at_once: bool) -> None:
        if self._stopped.is_set():
            return
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

    async def poll_now(self) -> None:
        """Polls servers out of rotation, and suspected servers."""
        if (fleet := self._fleet()) is None:
            return
        if not fleet.state.owns_any:
            await self._follow(fleet)
        if fleet.state.may_look:
            await self._poller.poll(fleet)
            # The watch may have begun to poll some of them just before.
            if self._runs("poll"):
                await asyncio.wait([self._tasks["poll"]])

    def stop(self) -> None:
        """Ends the watch and cancels pending starts."""
        self._stopped.set()
        for task in [*self._tasks.values(), *self._calls]:
            get_loop().call_soon_threadsafe(task.cancel)
        deadline = time.monotonic() + self.times.stop
        # A server can be found a moment after its start began.
        while self._starting and time.monotonic() < deadline:
            for started in list(self._starting):
                self._cancel_start(started)
            time.sleep(0.02)

    def _cancel_start(self, server: int | str) -> None:
        if (starting := self._starting.get(server)) is not None:
            starting.stop()

    # Observing.

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
        state = fleet.state
        soon = state.to_poll or state.owns_any or state.adapters.lingers
        if self._runs("poll") or soon:
            return self.times.check
        if fleet.directory is not None:
            return self.times.directory
        if state.adapters.can_reload:
            return self.times.adapters
        in_flight, _ = self._progress()
        return self.times.in_flight if in_flight else None

    async def _check(self, fleet: Fleet) -> None:
        owner = fleet.state.owns_any
        if owner:
            fleet.notice_deaths()
        actions = fleet.apply(self._tick(fleet))
        if owner and time.monotonic() >= self._publish_at:
            # Repeated, for a restarted directory.
            self._publish_at = time.monotonic() + self.times.directory
            fleet.publish()
        if owner:
            route = next(
                (action for action in actions if isinstance(action, Route)), None
            )
            self._do("router", self._update_router, fleet, route)
        else:
            self._do("follow", self._follow, fleet)
        await self._probe_stuck(fleet)
        may_be_lost = fleet.state.adapters.can_reload and not owner
        if may_be_lost and not fleet.state.to_poll:
            await self._poller.adapters.discover_changes(
                fleet, after=self.times.adapters
            )

    def _tick(self, fleet: Fleet) -> Tick:
        """Returns the conditions outside of the state."""
        router = fleet.router if fleet.state.owns_any else None
        # Threads that start a server change the dictionary.
        ranks = [rank for rank in list(self._starting) if isinstance(rank, int)]
        can_start = fleet.start_router is not None and ROUTER not in self._starting
        return Tick(
            max_restarts=self._max_restarts,
            starting=frozenset(ranks),
            may_poll=not self._runs("poll") and time.monotonic() >= self._poll_at,
            router=None if router is None else router.usable,
            may_start_router=can_start,
        )

    async def _follow(self, fleet: Fleet) -> None:
        """Adopts the server addresses of another owner's directory."""
        if fleet.directory is not None:
            try:
                async with asyncio.timeout(10.0):
                    urls = await fleet.directory.urls()
            except (SGLangError, TimeoutError) as error:
                torchrl_logger.debug(f"The directory of servers says nothing: {error}")
            else:
                fleet.apply(Moved(urls=tuple(urls)))
        # The copy sends nothing more through the router until all servers serve.
        await self._recall_lost(fleet)

    def _is_stuck(self) -> bool:
        """Returns whether requests are in flight and none has completed for long."""
        now = time.monotonic()
        in_flight, completed = self._progress()
        since, earlier = self._last_progress
        waits = bool(in_flight) and completed == earlier
        if waits and now - since < self.times.progress:
            return False
        self._last_progress = (now, completed)
        return waits

    async def _probe_stuck(self, fleet: Fleet) -> None:
        """Probes the serving servers if no request has completed for long."""
        if self._is_stuck() and fleet.state.generates:
            serving = [r for r in fleet.replicas if r.state == "serving"]
            probes = fan_out(lambda replica: self._probe(fleet, replica), serving)
            await asyncio.gather(self._probe_router(fleet), probes)

    async def _probe(self, fleet: Fleet, replica: Replica) -> None:
        """Marks a hanging server as down and stops it, unless it is paused."""
        hanging = await hangs(
            self._http, self._capabilities, replica.url, probe=self.times.probe
        )
        now = fleet.state.find(replica.rank)
        serves = now is not None and now.state == "serving"
        if hanging and fleet.state.generates and serves:
            reason = f"The server at {replica.url} answered and did not generate."
            fleet.apply(Ended(replica=replica, reason=reason))
            if replica.handle is not None:
                await asyncio.to_thread(replica.handle.stop)
            else:
                torchrl_logger.warning(
                    f"{reason} It gets no requests until it answers."
                )

    async def _probe_router(self, fleet: Fleet) -> None:
        router = fleet.router
        if router is None or fleet.start_router is None or not router.usable:
            return
        try:
            url = f"{router.url}/workers"
            response = await self._http.request("GET", url, timeout=SCHEDULER_TIMEOUT)
            response.raise_for_status()
        except SGLangError as error:
            torchrl_logger.warning(f"{router!r} does not answer: {error}")
            await asyncio.to_thread(router.stop)

    # Acting.

    def _act(self, actions: Sequence[Action]) -> None:
        """Executes the actions of an event, from any thread, without a wait."""
        for action in actions:
            if isinstance(action, Tell):
                log = torchrl_logger.warning if action.warning else torchrl_logger.info
                log(action.text)
        if not sys.is_finalizing():
            get_loop().call_soon_threadsafe(self._act_on_loop, actions)

    def _act_on_loop(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Check):
                self._begin(action.at_once)
            elif isinstance(action, FailRequests):
                self._http.give_up(action.url)
            elif isinstance(action, Recall):
                self._lost_behind_router |= _is_elsewhere(action.handle)
            elif (fleet := self._fleet()) is not None:
                self._act_on_servers(fleet, action)

    def _act_on_servers(self, fleet: Fleet, action: Action) -> None:
        if isinstance(action, Publish):
            fleet.publish()
        elif self._stopped.is_set():
            return
        elif isinstance(action, Poll):
            # Without a wait where the next check is late enough.
            wait = len(fleet.state.to_poll) / POLLS_PER_SECOND - self.times.check
            self._poll_at = time.monotonic() + max(wait, 0.0)
            self._do("poll", self._poller.poll, fleet)
        elif isinstance(action, CancelStart):
            name = f"cancel {action.rank}"
            self._do(name, asyncio.to_thread, self._cancel_start, action.rank)
        elif isinstance(action, LoadAdapter):
            self._begin_call(self._poller.adapters.load(fleet, action))
        elif isinstance(action, DropAdapter):
            self._begin_call(self._poller.adapters.drop(fleet, action))
        elif isinstance(action, Restart):
            if (replica := fleet.state.find(action.rank)) is not None:
                self._restart(replica)
        elif isinstance(action, StartRouter):
            self._start_router(fleet, action.urls)

    def _begin_call(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _update_router(self, fleet: Fleet, route: Route | None) -> None:
        router = fleet.router
        if router is not None and router.usable:
            if route is not None:
                await self._route(fleet, router, route)
            await self._recall_lost(fleet)

    async def _route(self, fleet: Fleet, router: RouterHandle, route: Route) -> None:

        async def change(url: str) -> None:
            removes = url in route.remove
            call = router.remove_worker if removes else router.add_worker
            try:
                await call(url)
            except SGLangError as error:
                torchrl_logger.warning(
                    f"The router at {router.url} does not take {url}: {error}"
                )
            else:
                fleet.route({url})

        # First: requests go there meanwhile. A removed server finishes its own.
        await fan_out(change, sorted(route.remove), at_once=ROUTER_CALLS)
        await fan_out(change, sorted(route.add), at_once=ROUTER_CALLS)

    async def _recall_lost(self, fleet: Fleet) -> None:
        if self._lost_behind_router:
            self._lost_behind_router = False
            if fleet.router is not None:
                await self._recall(fleet.router.url)

    def _start_router(self, fleet: Fleet, urls: Sequence[str]) -> None:
        router, start = fleet.router, fleet.start_router
        if router is None or start is None:
            return
        torchrl_logger.warning(f"{router!r} has ended and is started again.")
        # Meanwhile requests go to servers directly.
        self._start(
            router,
            ROUTER,
            partial(start, urls),
            lambda fleet, found: fleet.set_router(found, urls),
            lambda _, error: torchrl_logger.warning(
                f"The router did not start: {error}"
            ),
        )

    def _restart(self, replica: Replica) -> None:
        rank, locate = replica.rank, replica.locate

        def started(fleet: Fleet, handle: ServerHandle) -> None:
            place = None if locate is None else locate()
            event = Started(rank=rank, handle=handle, url=handle.url, location=place)
            if any(isinstance(action, Stop) for action in fleet.apply(event)):
                handle.stop()

        def failed(fleet: Fleet, error: BaseException) -> None:
            counts = not isinstance(error, NotStartedError)
            fleet.apply(StartFailed(rank=rank, reason=str(error), counts=counts))

        if replica.restart is not None:
            self._start(replica.handle, rank, replica.restart, started, failed)

    def _start(
        self,
        old: H | None,
        server: int | str,
        start: Callable[[], H],
        done: Callable[[Fleet, H], None],
        failed: Callable[[Fleet, BaseException], None],
    ) -> None:
        """Starts a server in a daemon thread, which does not delay the exit."""
        if server in self._starting:
            return
        self._starting[server] = None

        def work() -> None:
            handle: H | None = None
            try:
                if old is not None:
                    # Removes its log and the rest of its process tree.
                    old.stop()
                # A killed process needs a moment to release its port.
                delay = self.times.first_restart * 2.0 ** self._failures[server]
                if self._stopped.wait(min(delay, self.times.longest_restart)):
                    return
                handle = start()
                _check_new(handle, old)
                self._starting[server] = handle
                if not self._stopped.is_set():
                    handle.wait_ready()
                fleet = self._fleet()
                if fleet is None or self._stopped.is_set():
                    handle.stop()
                else:
                    self._failures[server] = 0
                    done(fleet, handle)
            except BaseException as error:  # noqa: BLE001 - A thread has no caller.
                self._failures[server] += not isinstance(error, NotStartedError)
                if handle is not None:
                    # Nobody else owns the new server.
                    with contextlib.suppress(Exception):
                        handle.stop()
                if (fleet := self._fleet()) is not None:
                    failed(fleet, error)
            finally:
                # Last: until then it is not started a second time.
                del self._starting[server]
            self.begin(at_once=True)

        threading.Thread(target=work, name="torchrl_sglang-start", daemon=True).start()


def _check_new(handle: Any, old: Any) -> None:
    if handle is old:
        raise ServerStartError(
            "The launcher returned the handle of the earlier start; each start needs "
            "one of its own."
        )


def _is_elsewhere(handle: ServerHandle | None) -> bool:
    """Returns whether a server's machine may be gone with it."""
    return handle is None or handle.host != socket.gethostname()
