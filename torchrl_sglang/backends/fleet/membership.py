"""The servers of one engine: which of them generate, and where a request goes.

A replica is *serving*, *stale* (it runs, with older weights than the others), *down*
(its process has ended, or it does not progress) or *lost* (it could not be started
again). Only serving replicas get requests; weight updates reach every one that runs.

Decisions are made here, from what is known; ``supervisor.py`` acts on them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.errors import (
    ServerDiedError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)

__all__ = ["Fleet", "OwnedProcess", "Replica", "RouterLike", "version_order"]

ReplicaState = Literal["serving", "stale", "down", "lost"]

KNOWN_SESSIONS = 4096
"""Sessions whose server is remembered; a prefix cache holds fewer."""

REST_SECONDS = 1.0
"""A place that failed is chosen last for so long."""


class OwnedProcess(Protocol):
    """What a fleet needs to know of a process that this engine started."""

    @property
    def host(self) -> str:
        """Name or address of its machine."""

    @property
    def pid(self) -> int:
        """Process id of the tree's root."""

    @property
    def log_path(self) -> Path:
        """Its log."""

    @property
    def state(self) -> str:
        """``"dead"`` when it has ended by itself."""

    def log_tail(self, lines: int = 30) -> str:
        """Returns the last lines of its log."""

    def wait_ready(self) -> None:
        """Waits until it serves; raises ServerStartError and stops it otherwise."""

    def request_stop(self) -> None:
        """Begins to stop it; does not wait."""

    def stop(self) -> None:
        """Stops it and waits until it has ended."""


def stop_all(handles: Iterable[OwnedProcess | None]) -> None:
    """Stops several servers at the same time."""
    owned = [handle for handle in handles if handle is not None]
    for handle in owned:
        handle.request_stop()
    for handle in owned:
        handle.stop()


class RouterLike(Protocol):
    """What a fleet needs to know of the router in front of it."""

    @property
    def url(self) -> str:
        """Address that requests go to."""

    @property
    def usable(self) -> bool:
        """Whether it runs, as far as is known."""

    @property
    def keyed(self) -> bool:
        """Whether it keeps requests with one routing key together."""

    def wait_ready(self) -> None:
        """Waits until its servers are in rotation, if this engine started it."""

    def stop(self) -> None:
        """Ends it, if it is ours."""

    async def add_worker(self, url: str) -> None:
        """Lets it send requests to a server."""

    async def remove_worker(self, url: str) -> None:
        """Has it send no more requests to a server; those under way are finished."""


@dataclass(kw_only=True, eq=False)
class Replica:
    """One server."""

    url: str
    """Its address, which stays the same when it is started again."""
    process: OwnedProcess | None = None
    """The process, where this engine started it."""
    # Not shown: the arguments hold the key.
    restart: Callable[[], OwnedProcess] | None = field(default=None, repr=False)
    """Begins to start it again at its address."""
    gpus: tuple[str, ...] | None = None
    """The GPUs of its ranks, where this engine started it."""
    visible_gpus: tuple[str, ...] | None = None
    """The GPUs that it sees."""
    state: ReplicaState = "serving"
    restarts: int = 0
    """How often it was started again."""
    failures: int = 0
    """How many of the last starts failed, one after the other."""
    released: frozenset[str] = frozenset()
    """What of its memory it gave back: it survives neither doing so twice nor taking
    back what it holds."""
    reason: str = ""
    """Why it does not serve: the end of its log, usually."""
    adapters: set[str] = field(default_factory=set)
    """LoRA adapters that it holds, as it calls them."""
    start_id: str = ""
    """Which start of the server this is; see :class:`.ServerCapabilities`."""
    restarted: bool = False
    """Whether it was started again and has not served since."""
    version: str = ""
    """Version of its weights, as it said last; empty where it was not asked."""

    @property
    def runs(self) -> bool:
        """Whether its process runs, as far as is known."""
        return self.state in ("serving", "stale")

    @property
    def status(self) -> str:
        """Its state, and what of its memory is released."""
        if self.runs and self.released:
            return f"asleep: {in_order(self.released)}"
        return self.state


@dataclass(kw_only=True)
class Fleet:
    """The servers of one engine; see :class:`.data_plane.Targets`."""

    replicas: list[Replica]
    weight_version: str
    """Version of the weights that serving replicas generate with."""
    router: RouterLike | None = None
    start_router: Callable[[Sequence[str]], RouterLike] | None = field(
        default=None, repr=False
    )
    """Begins to start the router again for these servers."""
    doubt: str | None = None
    """Why the servers may hold a mix of weights; they are paused until an update."""
    asleep: frozenset[str] = frozenset()
    """What of the servers' memory is not to be used: nobody generates, and no server is
    started. One that could not be reached may hold some of it still."""
    draining: bool = False
    """Whether calls that have begun are finished and no other ones are taken."""
    closed: bool = False
    """Whether the engine was shut down."""
    interruptions: int = 0
    """How often a weight update aborted what was under way, to be sent again."""
    in_place_versions: frozenset[str] = frozenset()
    """Versions before which requests went on with state of the older weights."""
    clean_versions: frozenset[str] = frozenset()
    """Versions with which nothing of the older weights' KV cache was left."""
    newest: str = ""
    """Newest version that weights or an adapter have had."""
    checkpoint_version: str | None = None
    """What the weights that the servers were started with are called."""
    required_adapters: frozenset[str] = frozenset()
    """LoRA adapters that requests may name: a replica without them gets none."""
    on_change: Callable[[], None] = lambda: None
    """Called when something happened that the supervisor should look at."""
    look: Callable[[], Awaitable[None]] | None = field(default=None, repr=False)
    """Looks at the servers that are out of rotation or suspected, now."""
    suspects: set[str] = field(default_factory=set, repr=False)
    """Servers that are to be looked at although they serve: a request failed there."""
    _initial_version: str = ""
    _pid: int = field(default_factory=os.getpid, repr=False)
    _updating: dict[str, OwnedProcess | None] | None = None
    _members: int = 0
    # Servers join on threads of their own, while others look and update.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _registered: set[str] = field(default_factory=set)
    _failures: dict[str, float] = field(default_factory=dict)
    _homes: dict[str, str] = field(default_factory=dict)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._initial_version = self.weight_version
        self.newest = self.weight_version
        if not self.weight_version.isdigit():
            # Nobody has sent any.
            self.checkpoint_version = self.weight_version
        self._registered = {replica.url for replica in self.replicas}

    @property
    def only(self) -> str | None:
        """The one server, where there is no other and no router."""
        if self.router is None and len(self.replicas) == 1:
            return self.replicas[0].url
        return None

    @property
    def urls(self) -> tuple[str, ...]:
        """Every server that runs, in the order of their ranks.

        In a weight update, those that ran when it began: one that joins meanwhile has
        not taken part from the beginning.
        """
        updating = self._updating
        if updating is not None:
            return tuple(updating)
        return tuple(replica.url for replica in self.replicas if replica.runs)

    @property
    def membership(self) -> int:
        """Changes whenever a replica joins or leaves: a process group holds for one."""
        return self._members

    def begin_update(self) -> None:
        """Holds the set of servers that a weight update goes to."""
        with self._lock:
            self._updating = {r.url: r.process for r in self.replicas if r.runs}

    def end_update(self, version: str | None) -> None:
        """Lets the set go; with a version, all of it has these weights now.

        A server that joined meanwhile, even one that had been part of it before it was
        started again, has not.
        """
        with self._lock:
            updated, self._updating = self._updating or {}, None
            if version is not None:
                self.weight_version = version
            for replica in self.replicas:
                if not replica.runs:
                    continue
                whole = updated.get(replica.url, self) is replica.process
                equipped = not self.lacks_adapters(replica)
                if version is not None:
                    replica.state = "serving" if whole and equipped else "stale"
                    replica.version = version if whole else ""
                    replica.restarted &= replica.state == "stale"
        self.on_change()

    def joined(self, replica: Replica, process: OwnedProcess) -> None:
        """Takes note of a replica that was started again.

        It has the checkpoint's weights and no adapters, and serves when it was looked
        at: others may have sent the rest newer ones.
        """
        with self._lock:
            if not (self.closed or self.asleep):
                replica.adapters, replica.version = set(), ""
                replica.process = process
                replica.released = frozenset()
                replica.start_id, replica.restarted = "", True
                replica.state = "stale"
                replica.reason = (
                    f"The server at {replica.url} was started again and is asked what "
                    f"it has."
                )
                self._members += 1
                return
        process.stop()

    @property
    def unsettled(self) -> list[Replica]:
        """Replicas that are to be looked at: out of rotation, or suspected.

        One that this engine owns and that has ended is not: it is started again.
        """
        return [
            replica
            for replica in self.replicas
            if replica.state == "stale"
            or (replica.state == "down" and not self.owns(replica))
            or (replica.state == "serving" and replica.url in self.suspects)
        ]

    def owns(self, replica: Replica) -> bool:
        """Returns whether this process has started a server, and starts it again."""
        return replica.process is not None and self._pid == os.getpid()

    def suspect_all(self) -> None:
        """Has every server that serves looked at: one of them has older weights."""
        self.suspects.update(self.serving)
        self.on_change()

    def has_version(self, replica: Replica, version: str) -> None:
        """Takes note of the weights that a replica says it has.

        The newest that any server has are the current ones, whoever sent them; who has
        older ones waits for newer ones. Who was started again waits for every adapter
        that requests may name, too.
        """
        with self._lock:
            replica.version = version
            if self._updating is not None or self.closed or not replica.runs:
                return
            if version_order(version) > version_order(self.weight_version):
                self.weight_version = version
                self.note_version(version)
                # Whoever has older ones is found out before it answers.
                self.suspects.update(u for u in self.serving if u != replica.url)
            before = replica.state
            replica.reason = self._why_it_waits(replica)
            replica.state = "stale" if replica.reason else "serving"
            if replica.state == "serving":
                replica.restarted = False
            elif before == "serving":
                torchrl_logger.warning(f"{replica.reason} It gets no requests.")
                self._members += 1
        if self.suspects or before != replica.state:
            self.on_change()

    def _why_it_waits(self, replica: Replica) -> str:
        if replica.version != self.weight_version:
            return (
                f"The server at {replica.url} has weights of version "
                f"{replica.version!r}, and the current ones are "
                f"{self.weight_version!r}."
            )
        if not self.lacks_adapters(replica):
            return ""
        lacking = ", ".join(sorted(self.required_adapters - replica.adapters))
        return (
            f"The server at {replica.url} was started again and lacks LoRA adapters "
            f"that requests may name: {lacking}. The engine object that has loaded "
            f"them loads them again; if it is gone, unload them."
        )

    def lacks_adapters(self, replica: Replica) -> bool:
        """Returns whether a replica that was started again waits for adapters."""
        return replica.restarted and not self.is_equipped(replica)

    def holds(
        self, replica: Replica, adapters: Collection[str], before: Collection[str]
    ) -> None:
        """Takes note of the adapters that a replica says it holds.

        Args:
            replica: the server.
            adapters: what it says.
            before: what was known when it was asked; what has been loaded since stays.
        """
        with self._lock:
            replica.adapters = set(adapters) | (replica.adapters - set(before))

    def is_back(self, replica: Replica, start_id: str) -> None:
        """Takes note that a server of somebody else answers again; it waits."""
        with self._lock:
            if replica.state == "down" and not self.owns(replica):
                same = start_id != "" and start_id == replica.start_id
                replica.restarted = replica.restarted or not same
                replica.state, replica.start_id = "stale", start_id
                replica.adapters, replica.version = set(), ""
                self._members += 1

    def was_restarted(self, replica: Replica, start_id: str) -> None:
        """Takes a replica out that somebody else has started again."""
        with self._lock:
            replica.start_id, replica.restarted = start_id, True
            if replica.state == "serving":
                replica.state = "stale"
                replica.reason = self._why_it_waits(replica)
                self._members += 1
        self.on_change()

    def is_equipped(self, replica: Replica) -> bool:
        """Returns whether a replica holds every adapter that requests may name."""
        return self.required_adapters <= replica.adapters

    def require_adapters(
        self, names: frozenset[str], commit: Callable[[], None]
    ) -> bool:
        """Has requests name these adapters from now on, if every replica holds them.

        Args:
            names: as the servers call them.
            commit: makes requests name them; called while no server can join.

        Returns:
            Whether that was done. A replica that does not serve yet is given them
            before it does.
        """
        with self._lock:
            added = names - self.required_adapters
            if any(
                r.state == "serving" and not added <= r.adapters for r in self.replicas
            ):
                return False
            self.required_adapters = names
            commit()
            return True

    def fall_asleep(self, tags: frozenset[str]) -> list[Replica]:
        """Takes no more requests and no more servers; returns those that run."""
        with self._lock:
            self.asleep |= tags
            running = [replica for replica in self.replicas if replica.runs]
        self.on_change()
        return running

    def wake_up(self, tags: frozenset[str]) -> None:
        """Takes note of the memory that is back on every server that runs."""
        with self._lock:
            released = (replica.released for replica in self.replicas if replica.runs)
            self.asleep -= tags - set[str]().union(*released)
        self.on_change()

    def note_version(self, version: str) -> None:
        """Takes note of a version that was given out: it is never given out again."""
        if version.isdigit() and int(version) > int(
            self.newest if self.newest.isdigit() else -1
        ):
            self.newest = version

    @property
    def base_problem(self) -> str | None:
        """Why an adapter over what the servers hold may not make a policy."""
        if self.doubt is not None:
            return f"The weights of the servers are in doubt: {self.doubt}"
        if any(replica.state == "stale" for replica in self.replicas):
            return "A server that was started again holds other weights than the rest."
        if self.weight_version != self.checkpoint_version:
            return (
                f"The servers hold weights of version {self.weight_version!r}, not the "
                f"checkpoint that they were started with."
            )
        return None

    def check_awake(self) -> None:
        """Checks that requests are taken.

        Raises:
            WeightSyncStateError: if memory of the servers is released.
        """
        if self.asleep:
            raise WeightSyncStateError(
                f"The engine is asleep ({in_order(self.asleep)}) and does not "
                f"generate; call wake_up() first."
            )
        if self.draining:
            raise WeightSyncStateError(
                "The engine is being put to sleep and takes no more requests; call "
                "wake_up() when it is asleep."
            )

    def close(self) -> None:
        """Takes no more requests and no more servers."""
        with self._lock:
            self.closed = True

    def stop(self) -> None:
        """Ends every process that this engine started."""
        try:
            if self.router is not None:
                self.router.stop()
        finally:
            stop_all(replica.process for replica in self.replicas)

    @property
    def serving(self) -> list[str]:
        """Addresses of the replicas that get requests."""
        return [r.url for r in self.replicas if r.state == "serving"]

    def router_joined(self, router: RouterLike, known: Sequence[str]) -> None:
        """Takes a router that was started again for these servers."""
        self.router = router
        self._registered = set(known)

    async def update_router(self) -> None:
        """Has the router know the serving replicas, and no others."""
        router = self.router
        if router is None or not router.usable:
            return
        serving = set(self.serving)
        for url in self._registered - serving:
            with _one_of_several(router.url, url):
                await router.remove_worker(url)
                self._registered.discard(url)
        for url in serving - self._registered:
            with _one_of_several(router.url, url):
                await router.add_worker(url)
                self._registered.add(url)

    def notice_deaths(self) -> list[Replica]:
        """Marks replicas whose process has ended, and returns those that are new."""
        dead = [
            replica
            for replica in self.replicas
            if replica.runs
            and replica.process is not None
            and replica.process.state == "dead"
        ]
        for replica in dead:
            assert replica.process is not None
            self.mark_down(
                replica,
                f"The server at {replica.url} has ended. The end of its log:\n"
                f"{replica.process.log_tail()}",
            )
        return dead

    def mark_down(self, replica: Replica, reason: str) -> None:
        """Takes a replica out of rotation until it has been started again."""
        with self._lock:
            replica.state, replica.reason = "down", reason
            self._members += 1
        self.on_change()

    def pick(
        self,
        session: str | None,
        avoid: Sequence[str],
        *,
        direct: bool = False,
        prefer: str | None = None,
    ) -> str:
        """Returns where to send a request; see :class:`.data_plane.Targets`."""
        if self.closed:
            raise ServerUnavailableError("The engine was shut down; make a new one.")
        if self.asleep:
            self.check_awake()
        self.notice_deaths()
        serving = self.serving
        if not serving:
            raise self.why_nobody_serves()
        router = self.router
        if (
            router is not None
            and router.usable
            # Somebody else's does not know who is out of rotation here.
            and not (
                isinstance(router, RemoteRouter) and len(serving) < len(self.replicas)
            )
            and router.url not in avoid
            and not direct
            and (session is None or router.keyed)
        ):
            return router.url
        candidates = [url for url in serving if url not in avoid] or serving
        if prefer in candidates:
            return prefer
        return self._direct(session, candidates)

    def _direct(self, session: str | None, urls: Sequence[str]) -> str:
        now = time.monotonic()
        rested = [
            url
            for url in urls
            if now - self._failures.get(url, -REST_SECONDS) >= REST_SECONDS
        ] or urls
        if session is not None:
            return self._home(session, rested)
        self._turn += 1
        return rested[self._turn % len(rested)]

    def _home(self, session: str, urls: Sequence[str]) -> str:
        """Returns a session's server; a new one gets the server with the fewest."""
        home = self._homes.pop(session, "")
        if home not in urls:
            counts = Counter(self._homes.values())
            home = min(urls, key=lambda url: counts[url])
        # The latest last: the sessions that nobody uses are forgotten first.
        self._homes[session] = home
        while len(self._homes) > KNOWN_SESSIONS:
            del self._homes[next(iter(self._homes))]
        return home

    def failed(self, url: str) -> None:
        """Takes note that a request to this address failed."""
        self._failures[url] = time.monotonic()
        if any(replica.url == url for replica in self.replicas):
            self.suspects.add(url)
        self.on_change()

    def why_nobody_serves(self) -> SGLangError:
        """Returns the error that tells what has become of every server."""
        stale = [replica for replica in self.replicas if replica.state == "stale"]
        if any(
            replica.version == self.weight_version and self.lacks_adapters(replica)
            for replica in stale
        ):
            return ServerUnavailableError(
                "The servers that run were started again and are being given their "
                "LoRA adapters; try again in a few seconds. "
                + " ".join(replica.reason for replica in stale)
            )
        if stale:
            return WeightSyncStateError(
                "No server has the current weights. "
                + " ".join(replica.reason for replica in stale if replica.reason)
                + " They generate again after the next weight update; send the weights."
            )
        reasons = "\n".join(r.reason for r in self.replicas if r.reason)
        if all(replica.process is not None for replica in self.replicas):
            return ServerDiedError(
                f"No server of the engine is left; each is started again up to "
                f"max_restarts times. {reasons}"
            )
        return ServerUnavailableError(f"No server of the engine is left. {reasons}")

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process owns nothing: it knows addresses.
        return {
            # Who is down here may be back when the copy looks.
            "replicas": [
                Replica(
                    url=r.url,
                    state="serving" if r.state == "serving" else "stale",
                    released=r.released if r.runs else frozenset(),
                    gpus=r.gpus,
                    visible_gpus=r.visible_gpus,
                    start_id=r.start_id,
                    restarted=r.restarted,
                )
                for r in self.replicas
            ],
            "doubt": self.doubt,
            "asleep": self.asleep,
            "draining": False,
            "interruptions": 0,
            "in_place_versions": self.in_place_versions,
            "clean_versions": self.clean_versions,
            "newest": self.newest,
            "checkpoint_version": self.checkpoint_version,
            "weight_version": self.weight_version,
            "_initial_version": self._initial_version,
            "_pid": 0,
            "_updating": None,
            "_registered": set(self._registered),
            "start_router": None,
            "router": None
            if self.router is None
            else RemoteRouter(url=self.router.url),
            "_members": self._members,
            "required_adapters": frozenset(),
            "closed": self.closed,
            "on_change": _nothing,
            "look": None,
            "suspects": set(),
            "_failures": {},
            "_homes": dict(self._homes),
            "_turn": 0,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


def version_order(version: str) -> int:
    """Returns a weight version as a number; a name, such as ``default``, is oldest."""
    return int(version) if version.isdigit() else -1


def in_order(tags: Iterable[str]) -> str:
    """Returns kinds of memory for a message, the weights first."""
    return ", ".join(sorted(tags, reverse=True))


@contextmanager
def _one_of_several(router: str, url: str) -> Iterator[None]:
    """Keeps what fails with one server from the others; it is tried again soon."""
    try:
        yield
    except SGLangError as error:
        torchrl_logger.warning(f"The router at {router} does not take {url}: {error}")


@dataclass(frozen=True, kw_only=True)
class RemoteRouter:
    """A router that somebody else runs."""

    url: str
    """Its address."""
    usable: bool = True
    """Nothing is known to the contrary; a request that fails there goes direct."""
    keyed: bool = True
    """Its policy is its owner's; one that reads no key ignores it."""

    def wait_ready(self) -> None:
        """Does nothing: it runs."""

    def stop(self) -> None:
        """Does nothing: its owner does that."""

    async def add_worker(self, url: str) -> None:
        """Does nothing: its owner decides."""

    async def remove_worker(self, url: str) -> None:
        """Does nothing: its owner decides."""


def _nothing() -> None:
    pass
