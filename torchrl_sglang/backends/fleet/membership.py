"""The servers of an engine, and their current state.

Events come from any thread. :meth:`Fleet.apply` replaces the state under a lock by the
result of :func:`.reconcile`, and hands the actions to the engine's loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any

from torchrl_sglang.backends.fleet.actions import Action, Check
from torchrl_sglang.backends.fleet.adapters import AdapterState
from torchrl_sglang.backends.fleet.reconcile import (
    Changed,
    Ended,
    Learned,
    Suspected,
    UpdateBegan,
    UpdateEnded,
    reconcile,
)
from torchrl_sglang.backends.fleet.replica import (
    LEAVING,
    REMOVED,
    Directory,
    RemoteRouter,
    Replica,
    RouterHandle,
    ServerHandle,
    StartMore,
    stop_all,
)
from torchrl_sglang.backends.fleet.routing import Routing
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.fleet.step import Event
from torchrl_sglang.backends.fleet.weights_state import (
    RequestGate,
    ServedWeights,
    WeightUpdate,
)
from torchrl_sglang.errors import ServerUnavailableError
from torchrl_sglang.support.forks import after_fork

FEW_SERVERS = 16
"""Up to this number of servers, each request checks all their processes."""

DEATH_CHECK_SHARE = 0.05
"""Largest share of the time spent on checks of a larger number of processes."""


class Fleet:
    """The servers of one engine."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        weight_version: str = "default",
        *,
        router: RouterHandle | None = None,
        start_router: Callable[[Sequence[str]], RouterHandle] | None = None,
        stop_servers: Callable[[Iterable[ServerHandle]], None] = stop_all,
        directory: Directory | None = None,
        start_more: StartMore | None = None,
    ) -> None:
        ranked = (replace(replica, rank=rank) for rank, replica in enumerate(replicas))
        self._state = FleetState(
            replicas=tuple(ranked),
            weights=ServedWeights.reported(weight_version),
            owner=os.getpid(),
            starts_more=start_more is not None,
            next_rank=len(replicas),
            in_router=frozenset(replica.url for replica in replicas),
        )
        self.router = router
        self.start_router = start_router
        """Begins to restart the router for these servers."""
        self.start_more = start_more
        """Starts further servers of the same kind; ``None``: they run elsewhere."""
        self._stop_servers = stop_servers
        self.directory = directory
        """Addresses of moved servers, for copies of this engine."""
        self.gate = RequestGate()
        """Holds requests back during a weight update."""
        self._act: Callable[[Sequence[Action]], object] = lambda actions: None
        self._routing = Routing()
        self._check_deaths_at = 0.0
        # Callbacks of tasks waiting for a state.
        self._wakes: list[Callable[[], object]] = []
        self._lock = RLock()
        after_fork(self._begin_in_this_process)
        self.publish()

    def _begin_in_this_process(self) -> None:
        # Lock holders and weight senders are in the parent.
        self._lock, self._wakes = RLock(), []
        self.gate = RequestGate()
        adapters = self._state.adapters.in_another_process()
        self._set(updating=None, draining=False, paused=False, adapters=adapters)

    @property
    def state(self) -> FleetState:
        return self._state

    def apply(self, event: Event) -> Sequence[Action]:
        """Applies an event; the engine's loop executes its actions."""
        with self._lock:
            now = time.monotonic()
            self._state, actions = reconcile(self._state, event, now)
            if actions:
                self._act(actions)
            for wake in self._wakes:
                wake()
        return actions

    async def until(
        self, condition: Callable[[FleetState], object], deadline: float
    ) -> None:
        """Waits until the state meets a condition, or for the deadline."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        wake = partial(loop.call_soon_threadsafe, changed.set)
        with self._lock:
            self._wakes.append(wake)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                while not condition(self._state):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._wakes.remove(wake)

    def change(self, change: Callable[[FleetState], FleetState]) -> None:
        """Replaces the state of the fleet, without actions."""
        self.apply(Changed(change=change))

    def learn(self, asked: Replica, change: Callable[[Replica], Replica]) -> None:
        """Replaces the state of a server, unless the server was started again since."""
        self.apply(Learned(asked=asked, change=change))

    def watch(self) -> None:
        """Lets the loop of the engine watch the servers: a request was sent."""
        self._act([Check(at_once=False)])

    def act_with(self, act: Callable[[Sequence[Action]], object]) -> None:
        """Hands actions to the engine's loop from now on; ``act`` does not wait."""
        self._act = act

    # Read by every part of the engine.

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self._state.replicas

    @property
    def weights(self) -> ServedWeights:
        return self._state.weights

    @property
    def membership_epoch(self) -> int:
        return self._state.weights.membership_epoch

    @property
    def urls(self) -> tuple[str, ...]:
        return self._state.urls

    @property
    def serving(self) -> tuple[str, ...]:
        return self._state.serving

    @property
    def asleep(self) -> frozenset[str]:
        return self._state.asleep

    @property
    def paused(self) -> bool:
        return self._state.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._set(paused=paused)

    def _set(self, **fields: Any) -> None:
        self.change(lambda now: replace(now, **fields))

    # Requests.

    def pick(
        self,
        session: str | None,
        avoid: Sequence[str],
        *,
        direct: bool = False,
        prefer: str | None = None,
    ) -> str:
        """Returns the address for a request: ``prefer`` if it serves, not ``avoid``."""
        if self._state.closed:
            raise ServerUnavailableError("The engine was shut down; make a new one.")
        if self._state.asleep:
            self._state.check_awake()
        self._notice_deaths_in_time()
        state, router = self._state, self.router
        if (
            router is not None
            and router.usable
            and not direct
            and router.url not in avoid
            and (session is None or router.keyed)
            and _chooses_well(router, state)
        ):
            return router.url
        if prefer is not None and prefer not in avoid and prefer in state.serving:
            return prefer
        chosen = self._routing.choose(state.replicas, session, avoid)
        if chosen is None:
            raise state.no_server_error()
        return chosen.url

    def is_router(self, url: str) -> bool:
        """Returns whether a request to this address went through the router."""
        return self.router is not None and url == self.router.url

    def failed(self, url: str) -> None:
        """Records a failed request to this address."""
        self._routing.failed(url)
        self.apply(Suspected(url=url))

    def _notice_deaths_in_time(self) -> None:
        """Checks processes for a request; for many servers, only now and then."""
        now = time.monotonic()
        if now < self._check_deaths_at:
            return
        self.notice_deaths()
        if len(self.replicas) > FEW_SERVERS:
            spent = time.monotonic() - now
            self._check_deaths_at = now + spent / DEATH_CHECK_SHARE

    def notice_deaths(self) -> None:
        """Checks the processes of the running servers."""
        for replica in self.replicas:
            handle = replica.handle
            if handle is not None and replica.runs and handle.state == "dead":
                text = f"The server at {replica.url} has ended. The end of its log:"
                reason = f"{text}\n{handle.log_tail()}"
                self.apply(Ended(replica=replica, reason=reason))

    # Weights, adapters and sleep.

    def change_weights(self, change: Callable[[ServedWeights], ServedWeights]) -> None:
        """Replaces the state of the weights."""
        self.change(lambda now: replace(now, weights=change(now.weights)))

    def change_adapters(self, change: Callable[[AdapterState], AdapterState]) -> None:
        """Replaces the state of the LoRA adapters."""
        self.change(lambda now: replace(now, adapters=change(now.adapters)))

    @contextmanager
    def weight_update(self) -> Iterator[WeightUpdate]:
        """Fixes the servers of a weight update; a commit gives them its version."""
        self._state.check_weights_awake()
        self.apply(UpdateBegan())
        update = WeightUpdate(self.change_weights, self.weights, self.gate)
        try:
            yield update
        finally:
            self.gate.open()
            self.apply(UpdateEnded(version=update.version))

    @contextmanager
    def drain(self) -> Iterator[None]:
        """Refuses new requests while in-flight requests finish."""
        self._set(draining=True)
        try:
            yield
        finally:
            self._set(draining=False)

    def route(self, urls: Set[str]) -> None:
        """Records servers as added to the router, or removed."""
        self.change(lambda now: replace(now, in_router=now.in_router ^ urls))

    def set_router(self, router: RouterHandle, known: Sequence[str]) -> None:
        """Adopts a restarted router, and its servers."""
        with self._lock:
            self.router = router
            self._set(in_router=frozenset(known))

    def drop_remote_router(self) -> None:
        """Bypasses a remote router: another owner's router has other servers."""
        if isinstance(self.router, RemoteRouter):
            self.router = None

    # The end.

    def publish(self) -> None:
        """Publishes the server addresses for copies of the engine."""
        state = self._state
        if self.directory is not None and state.owns_any:
            urls = [REMOVED] * state.next_rank
            for replica in state.replicas:
                mark = LEAVING if replica.state == "leaving" else ""
                # Copies cannot attribute the weights of a foreign server.
                is_public = replica.runs and not replica.foreign_version
                urls[replica.rank] = f"{replica.url}{mark}" if is_public else ""
            self.directory.publish(urls)

    def close(self) -> None:
        """Refuses requests and new servers from now on."""
        self._set(closed=True)

    def stop(self) -> None:
        """Stops the router and the servers of this engine."""
        try:
            if self.router is not None:
                self.router.stop()
        finally:
            handles = (replica.handle for replica in self.replicas)
            self._stop_servers([handle for handle in handles if handle is not None])

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process has addresses, and owns no server. None of its
        # requests could have been aborted by an update.
        state, router = self._state, self.router
        return {
            "replicas": [replica.without_handle() for replica in state.replicas],
            "known": {
                "weights": state.weights.for_copy(),
                "adapters": state.adapters.for_copy(),
                "asleep": state.asleep,
                "closed": state.closed,
                "next_rank": state.next_rank,
            },
            "router": None if router is None else RemoteRouter(url=router.url),
            "directory": self.directory,
            "sessions": dict(self._routing.sessions),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Fleet.__init__(
            self,
            state["replicas"],
            router=state["router"],
            directory=state["directory"],
        )
        # With their ranks, which have gaps where servers were removed.
        self._set(replicas=tuple(state["replicas"]), **state["known"])
        self._routing = Routing(state["sessions"])

    def __repr__(self) -> str:
        return f"Fleet({list(self.replicas)}, {self.weights})"


def _chooses_well(router: RouterHandle, state: FleetState) -> bool:
    """Returns whether a router excludes servers out of rotation here."""
    if len(state.serving) == len(state.replicas):
        return True
    # A remote router keeps its list whatever happens here.
    alike = not isinstance(router, RemoteRouter) and state.in_router.issubset(
        state.serving
    )
    return alike and bool(state.serving)
