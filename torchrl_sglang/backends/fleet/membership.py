"""The servers of one engine: which of them get requests and weight updates.

:class:`Fleet` decides from what servers report; ``supervisor`` and ``poller`` act on
that. Servers join from other threads, so every replica is changed here, under the lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.fleet.replica import (
    Directory,
    NotStartedError,
    RemoteRouter,
    Replica,
    ReplicaState,
    RouterHandle,
    Routing,
    ServerHandle,
    format_tags,
    stop_all,
)
from torchrl_sglang.backends.fleet.weights_state import (
    Weights,
    WeightsState,
    WeightUpdate,
)
from torchrl_sglang.errors import (
    ServerDiedError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.support.checks import some_of

ROUTER_CALLS = 8
"""Most servers at once that a router adds or removes."""

FEW_SERVERS = 16
"""Up to so many servers are looked at for every request."""

DEATH_CHECK_SHARE = 0.05
"""How much of the time is spent on looking at more, at most."""


class Fleet:
    """The servers of one engine."""

    def __init__(
        self,
        replicas: list[Replica],
        weight_version: str = "default",
        *,
        router: RouterHandle | None = None,
        start_router: Callable[[Sequence[str]], RouterHandle] | None = None,
        stop_servers: Callable[[Iterable[ServerHandle]], None] = stop_all,
        directory: Directory | None = None,
    ) -> None:
        self.replicas = replicas
        self.weights_state = WeightsState(weight_version)
        self.router = router
        self.start_router = start_router
        """Begins to start the router again for these servers."""
        self._stop_servers = stop_servers
        self.directory = directory
        """Where copies of this engine find servers that have another address."""
        self.asleep: frozenset[str] = frozenset()
        """Kinds of memory that are released: no requests, and no server starts."""
        self.draining = False
        """Whether running requests finish and new ones are refused."""
        self.paused = False
        """Whether this engine object paused generation."""
        self.closed = False
        self.wanted_adapters: frozenset[str] = frozenset()
        """LoRA adapters that requests may name, under the servers' names."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when the supervisor should act."""
        self.on_request: Callable[[], object] = lambda: None
        """Called when a request is sent while no other is in flight."""
        self.on_end: Callable[[str, bool], object] = lambda url, elsewhere: None
        """Called when a server at an address has ended, here or ``elsewhere``: nobody
        may have closed its connections."""
        self.poll: Callable[[], Awaitable[None]] | None = None
        """Polls the servers of :attr:`to_poll` now."""
        self._pid = os.getpid()
        # Servers of the weight update in progress, as they ran when it began.
        self._updating: dict[str, ServerHandle | None] | None = None
        self._in_router = {replica.url for replica in replicas}
        self._routing = Routing()
        self._check_deaths_at = 0.0
        self._lock = threading.RLock()
        self.publish()

    # Reading.

    @property
    def weights(self) -> Weights:
        """Version and consistency of the weights; ``weights_state`` changes them."""
        return self.weights_state.now

    @property
    def membership_epoch(self) -> int:
        """Grows when a server joins or leaves."""
        return self.weights.membership_epoch

    @property
    def running(self) -> list[Replica]:
        """Replicas that run, in the order of their ranks."""
        return [replica for replica in self.replicas if replica.runs]

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers that run; in a weight update, those that ran when it began."""
        if (updating := self._updating) is not None:
            return tuple(updating)
        return tuple(replica.url for replica in self.running)

    @property
    def serving(self) -> list[str]:
        """Servers that get requests."""
        return [r.url for r in self.replicas if r.state == "serving"]

    @property
    def awaits_weights(self) -> bool:
        """Whether none serves, and one that was started again waits for weights."""
        stale = any(replica.state == "stale" for replica in self.replicas)
        return stale and not self.serving and self.generates

    @property
    def restarting(self) -> list[str]:
        """Servers that have ended and are started again."""
        return [r.url for r in self.replicas if r.state == "down" and self.owns(r)]

    @property
    def generates(self) -> bool:
        """Whether servers should generate: nothing updates, pauses or releases them."""
        stopped = self.paused or self.draining or self.asleep
        updating = self._updating is not None
        return not (stopped or updating or self.weights.inconsistent)

    @property
    def to_poll(self) -> list[Replica]:
        """Replicas that are out of rotation or suspected.

        Not those that this engine started and that ended: they are started again.
        """
        return [
            replica
            for replica in self.replicas
            if replica.state == "stale"
            or (replica.state == "down" and not self.owns(replica))
            or (replica.state == "serving" and replica.suspected)
            or replica.unreachable
        ]

    @property
    def needs_poll(self) -> bool:
        """Whether there are replicas to poll, or to start again."""
        return bool(self.to_poll) or any(r.state != "serving" for r in self.replicas)

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence on each server that does not serve, of many on the first ones."""
        away = (r for r in self.replicas if r.state != "serving" or r.unreachable)
        return tuple(some_of(map(_problem, away)))

    @property
    def owns_any(self) -> bool:
        """Whether this process started a server."""
        return any(map(self.owns, self.replicas))

    def owns(self, replica: Replica) -> bool:
        """Returns whether this process started a server, and starts it again."""
        return replica.handle is not None and self._pid == os.getpid()

    def misses_adapters(self, replica: Replica) -> bool:
        """Returns whether a server that was started again lacks wanted adapters."""
        return replica.restarted and not self.wanted_adapters <= replica.held_adapters

    @property
    def base_problem(self) -> str | None:
        """Why adapters must not be trained over what the servers hold."""
        now = self.weights
        if now.inconsistent is not None:
            return f"The weights of the servers are inconsistent: {now.inconsistent}"
        if any(replica.state == "stale" for replica in self.replicas):
            return "A server that was started again holds other weights than the rest."
        if now.version != now.checkpoint_version:
            return (
                f"The servers hold weights of version {now.version!r}, not the "
                f"checkpoint that they were started with."
            )
        return None

    def check_awake(self) -> None:
        """Raises :class:`WeightSyncStateError` while requests are refused."""
        if self.asleep:
            raise WeightSyncStateError(
                f"The engine is asleep ({format_tags(self.asleep)}) and does not "
                f"generate; call wake_up() first."
            )
        if self.draining:
            raise WeightSyncStateError(
                "The engine is being put to sleep and takes no more requests; call "
                "wake_up() when it is asleep."
            )

    def check_weights_awake(self) -> None:
        """Raises :class:`WeightSyncStateError` if new weights have no memory."""
        if "weights" in self.asleep:
            raise WeightSyncStateError(
                "The weights are asleep, and an update would have no memory to go to; "
                "call wake_up('weights') first."
            )

    def no_server_error(self) -> SGLangError:
        """Returns the error that says why no server gets requests."""
        stale = [replica for replica in self.replicas if replica.state == "stale"]
        reasons = filter(None, (replica.reason for replica in stale or self.replicas))
        told = (" " if stale else "\n").join(some_of(reasons))
        current = (each for each in stale if each.version == self.weights.version)
        if any(map(self.misses_adapters, current)):
            return ServerUnavailableError(
                f"The servers that run were started again and are being given their "
                f"LoRA adapters; try again in a few seconds. {told}"
            )
        if stale:
            return WeightSyncStateError(
                f"No server has the current weights. {told} They generate again after "
                f"the next weight update; send the weights."
            )
        if all(replica.handle is not None for replica in self.replicas):
            return ServerDiedError(
                f"No server of the engine is left; each is started again up to "
                f"max_restarts times. {told}"
            )
        return ServerUnavailableError(f"No server of the engine is left. {told}")

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
        if self.closed:
            raise ServerUnavailableError("The engine was shut down; make a new one.")
        if self.asleep:
            self.check_awake()
        self._notice_deaths_in_time()
        router = self.router
        if (
            router is not None
            and router.usable
            and not direct
            and router.url not in avoid
            and (session is None or router.keyed)
            and self._router_chooses_well(router)
        ):
            return router.url
        if prefer is not None and prefer not in avoid and prefer in self.serving:
            return prefer
        chosen = self._routing.choose(self.replicas, session, avoid)
        if chosen is None:
            raise self.no_server_error()
        return chosen.url

    def is_router(self, url: str) -> bool:
        """Returns whether a request to this address went through the router."""
        return self.router is not None and url == self.router.url

    def _router_chooses_well(self, router: RouterHandle) -> bool:
        """Returns whether a router chooses no server that is out of rotation here."""
        if all(replica.state == "serving" for replica in self.replicas):
            return True
        serving = {*self.serving}
        # Nothing here changes the list of a remote one.
        alike = not isinstance(router, RemoteRouter) and self._in_router <= serving
        return alike and bool(serving)

    def failed(self, url: str) -> None:
        """Records that a request to this address failed."""
        self._routing.failed(url)
        self.suspect(url)

    def suspect(self, url: str | None = None) -> None:
        """Lets a server, or each one, be polled although it serves."""
        with self._lock:
            for replica in self.replicas:
                replica.suspected |= url in (None, replica.url)
        self.on_change()

    # Weights.

    @contextmanager
    def weight_update(self) -> Iterator[WeightUpdate]:
        """Fixes the servers of a weight update; a commit gives them its version."""
        self.check_weights_awake()
        with self._lock:
            self._updating = {replica.url: replica.handle for replica in self.running}
        update = self.weights_state.begin()
        try:
            yield update
        finally:
            self.weights_state.release_requests()
            self._end_update(update.version)

    def _end_update(self, version: str | None) -> None:
        with self._lock:
            updated, self._updating = self._updating or {}, None
            for replica in self.running if version is not None else ():
                # A server that was started again meanwhile has not taken part.
                took_part = updated.get(replica.url, self) is replica.handle
                replica.version = version if version and took_part else ""
                if took_part and not self.misses_adapters(replica):
                    self._move(replica, "serving", "")
                else:
                    self._move(replica, "stale", replica.reason)
        self.on_change()

    def report_version(self, replica: Replica, version: str) -> None:
        """Records a server's version, which is current if no server has a newer one."""
        with self._lock:
            replica.version = version
            if self._updating is not None or self.closed or not replica.runs:
                return
            if self.weights_state.observe(version):
                # The others are polled before their answers count.
                self.suspect()
                replica.suspected = False
            reason = self._why_stale(replica)
            if reason and replica.state == "serving":
                torchrl_logger.warning(f"{reason} It gets no requests.")
            self._move(replica, "stale" if reason else "serving", reason)

    def _move(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        """Changes whether a server gets requests."""
        before, replica.state, replica.reason = replica.state, state, reason
        if state == "serving":
            replica.restarted = False
            self._tell_of_return(replica)
        elif state != before:
            # A server that begins to serve was counted when it came back.
            self.weights_state.begin_membership_epoch()
        if state != before:
            self.on_change()

    @staticmethod
    def _tell_of_return(replica: Replica) -> None:
        if replica.away_since is not None:
            seconds = time.monotonic() - replica.away_since
            replica.away_since = None
            torchrl_logger.info(
                f"The server at {replica.url} serves again, after {seconds:.0f} s."
            )

    def _why_stale(self, replica: Replica) -> str:
        current = self.weights.version
        if replica.version != current:
            return (
                f"The server at {replica.url} has weights of version "
                f"{replica.version!r}, and the current ones are {current!r}."
            )
        if not self.misses_adapters(replica):
            return ""
        missing = ", ".join(sorted(self.wanted_adapters - replica.held_adapters))
        return (
            f"The server at {replica.url} was started again without the LoRA adapters "
            f"{missing}. The engine object that has loaded them loads them again; if "
            f"it is gone, unload them."
        )

    # Servers that leave and join.

    def change(self, replica: Replica, **fields: Any) -> None:
        """Changes fields of a replica that do not decide whether it serves."""
        with self._lock:
            vars(replica).update(fields)

    def _notice_deaths_in_time(self) -> None:
        """Notices deaths for a request: of many servers, now and then."""
        now = time.monotonic()
        if now < self._check_deaths_at:
            return
        self.notice_deaths()
        if len(self.replicas) > FEW_SERVERS:
            spent = time.monotonic() - now
            self._check_deaths_at = now + spent / DEATH_CHECK_SHARE

    def notice_deaths(self) -> None:
        """Marks servers whose process has ended as down."""
        for replica in self.replicas:
            handle = replica.handle
            if handle is not None and replica.runs and handle.state == "dead":
                ended = f"The server at {replica.url} has ended. The end of its log:"
                reason = f"{ended}\n{handle.log_tail()}"
                self.mark_down(replica, reason, ended=True)

    def mark_down(self, replica: Replica, reason: str, *, ended: bool = False) -> None:
        """Takes a server out of rotation until it is started again or answers.

        The requests of one that has ``ended`` fail now.
        """
        with self._lock:
            self._move(replica, "down", reason)
            replica.away_since = replica.away_since or time.monotonic()
            if ended:
                handle = replica.handle
                elsewhere = handle is None or handle.host != socket.gethostname()
                self.on_end(replica.url, elsewhere)
            self.publish()

    def does_not_answer(self, replica: Replica, reason: str) -> bool:
        """Records that the last server that serves does not answer; False: known."""
        with self._lock:
            known = replica.unreachable
            replica.reason = reason
            replica.away_since = replica.away_since or time.monotonic()
            return not known

    def publish(self) -> None:
        """Tells copies of the engine where its servers run."""
        if self.directory is not None and self.owns_any:
            urls = [each.url if each.runs else "" for each in self.replicas]
            self.directory.publish(urls)

    def may_restart(self, replica: Replica, max_restarts: int) -> bool:
        """Returns False if there were too many restarts: it is lost."""
        with self._lock:
            if replica.restarts >= max_restarts:
                replica.state = "lost"
                return False
            return True

    def start_failed(self, replica: Replica, error: BaseException) -> None:
        """Counts a restart that failed, not one that was cancelled."""
        with self._lock:
            replica.restarts += not isinstance(error, NotStartedError)
            replica.reason = f"The server at {replica.url} did not start: {error}"

    def joined(self, replica: Replica, handle: ServerHandle) -> None:
        """Takes a server that was started again; it is polled before it serves."""
        with self._lock:
            if not (self.closed or self.asleep):
                replica.restarts += 1
                replica.handle, replica.released = handle, frozenset()
                if replica.locate is not None:
                    replica.location = replica.locate()
                self._take_address(replica, handle.url)
                reason = f"The server at {replica.url} was started again."
                self._return(replica, "", reason)
                self.publish()
                return
        handle.stop()

    def follow(self, urls: Sequence[str]) -> None:
        """Takes over where a directory says that servers of another owner run."""
        with self._lock:
            for replica, url in zip(self.replicas, urls, strict=False):
                if self.owns(replica) or url == replica.url:
                    continue
                if replica.runs:
                    reason = f"Its owner says that the server at {replica.url} ended."
                    self.mark_down(replica, reason, ended=True)
                if url:
                    self._take_address(replica, url)
                    reason = f"The server at {url} was started again."
                    self._return(replica, "", reason)

    def _take_address(self, replica: Replica, url: str) -> None:
        if url != replica.url:
            torchrl_logger.info(f"The server at {replica.url} is now at {url}.")
            self._routing.forget(replica.url)
            # A poll may have begun after its end.
            self.on_end(replica.url, False)
            replica.url = url

    def is_back(self, replica: Replica, start_id: str) -> None:
        """Takes a server that another process owns and that answers again."""
        with self._lock:
            if replica.state == "down" and not self.owns(replica):
                same = start_id != "" and start_id == replica.start_id
                restarted = replica.restarted or not same
                self._return(replica, start_id, replica.reason, restarted=restarted)

    def _return(
        self, replica: Replica, start_id: str, reason: str, *, restarted: bool = True
    ) -> None:
        replica.start_id, replica.restarted = start_id, restarted
        replica.held_adapters, replica.version = set(), ""
        self._move(replica, "stale", reason)

    def was_restarted(self, replica: Replica, start_id: str) -> None:
        """Takes a server out of rotation that its owner has started again."""
        with self._lock:
            replica.start_id, replica.restarted = start_id, True
            if replica.state == "serving":
                self._move(replica, "stale", self._why_stale(replica))

    # LoRA adapters.

    def report_adapters(
        self, replica: Replica, held: Collection[str], before: Collection[str]
    ) -> None:
        """Records what a server reports, beside what it did not hold ``before``."""
        with self._lock:
            added = replica.held_adapters - set(before)
            replica.held_adapters = {*held, *added}

    def adapter_loaded(
        self, replica: Replica, handle: ServerHandle | None, served_as: str
    ) -> None:
        """Records that a server holds an adapter, unless it was started again."""
        with self._lock:
            if replica.handle is handle:
                replica.held_adapters.add(served_as)

    def adapter_dropped(self, served_as: str) -> None:
        """Records that servers drop an adapter."""
        with self._lock:
            for replica in self.replicas:
                replica.held_adapters.discard(served_as)

    def want_adapters(self, names: frozenset[str], *, found: bool = False) -> bool:
        """Sets what requests may name, if ``found`` or if all serving ones hold it."""
        with self._lock:
            added = names - self.wanted_adapters
            serving = (each for each in self.replicas if each.state == "serving")
            held = found or all(added <= each.held_adapters for each in serving)
            if held:
                self.wanted_adapters = names
            return held

    # Sleep.

    @contextmanager
    def drain(self) -> Iterator[None]:
        """Refuses new requests while those that run finish."""
        self.draining = True
        try:
            yield
        finally:
            self.draining = False

    def fall_asleep(self, tags: frozenset[str]) -> list[Replica]:
        """Refuses requests and new servers from now on; returns those that run."""
        with self._lock:
            self.asleep |= tags
            running = self.running
        self.on_change()
        return running

    def wake_up(self, tags: frozenset[str]) -> None:
        """Takes requests again for memory that no running server has released."""
        with self._lock:
            still = frozenset[str]().union(*(each.released for each in self.running))
            self.asleep -= tags - still
        self.on_change()

    # The router.

    def set_router(self, router: RouterHandle, known: Sequence[str]) -> None:
        """Takes a router that was started again for these servers."""
        with self._lock:
            self.router, self._in_router = router, set(known)

    async def update_router(self) -> None:
        """Adds serving replicas to the router and removes the others."""
        router = self.router
        if router is None or not router.usable:
            return
        serving = set(self.serving)

        async def change(url: str) -> None:
            call = router.add_worker if url in serving else router.remove_worker
            try:
                await call(url)
            except SGLangError as error:
                torchrl_logger.warning(
                    f"The router at {router.url} does not take {url}: {error}"
                )
            else:
                self._in_router ^= {url}

        # First: requests go there meanwhile. A removed server finishes its own.
        await fan_out(change, sorted(self._in_router - serving), at_once=ROUTER_CALLS)
        await fan_out(change, sorted(serving - self._in_router), at_once=ROUTER_CALLS)

    # The end.

    def close(self) -> None:
        """Refuses requests and new servers from now on."""
        with self._lock:
            self.closed = True

    def stop(self) -> None:
        """Stops the router and the servers that this engine started."""
        try:
            if self.router is not None:
                self.router.stop()
        finally:
            handles = (replica.handle for replica in self.replicas)
            self._stop_servers([handle for handle in handles if handle is not None])

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process owns no server: it knows addresses.
        router = self.router
        return {
            "replicas": [replica.without_handle() for replica in self.replicas],
            "weights_state": self.weights_state,
            "router": None if router is None else RemoteRouter(url=router.url),
            "directory": self.directory,
            "asleep": self.asleep,
            "closed": self.closed,
            "_routing": Routing(dict(self._routing.sessions)),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Fleet.__init__(self, state["replicas"])
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"Fleet({self.replicas}, {self.weights_state})"


def _problem(replica: Replica) -> str:
    # The rest is usually the end of a log.
    reason = replica.reason.partition("\n")[0] or "The reason is unknown."
    return f"The server at {replica.url} is {replica.status}. {reason}"
