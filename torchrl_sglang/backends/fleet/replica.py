"""A server and the router as the fleet sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torchrl_sglang.errors import ServerStartError

ReplicaState = Literal["serving", "stale", "leaving", "down", "lost"]
"""Only serving servers get requests. ``stale``: runs with older weights or without
adapters; ``leaving``: finishes its requests before its removal; ``down``: ended or does
not answer; ``lost``: was restarted too often, or ended while it was leaving."""


REMOVED = "removed"
"""Address of a removed server in the directory."""

LEAVING = "#leaving"
"""Suffix of the address of a server without new requests."""


class NotStartedError(ServerStartError):
    """A start was cancelled, or no machine had room: no server has failed."""


class ServerHandle(Protocol):
    """A server of this engine, wherever it runs."""

    @property
    def url(self) -> str:
        """Address of the server."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def host(self) -> str:
        """Name or address of its machine."""

    @property
    def log_file(self) -> str:
        """Path of the log; ``""`` if it is unknown before the server runs."""

    @property
    def state(self) -> str:
        """``"starting"``, ``"ready"``, ``"dead"`` (it ended) or ``"stopped"``."""

    @property
    def age(self) -> float:
        """Seconds since its start."""

    def log_tail(self, lines: int = 30) -> str:
        """Returns the last lines of its log."""

    def check_ready(self) -> bool:
        """Returns whether the server serves; raises ServerStartError if it never will.

        For a server stopped before, it is a :class:`NotStartedError`.
        """

    def wait_ready(self) -> None:
        """Waits until the server serves; else stops it and raises ServerStartError."""

    def request_stop(self) -> None:
        """Begins to stop it; does not wait."""

    def stop(self) -> None:
        """Stops the server and waits for its end."""


def stop_all(handles: Iterable[ServerHandle | None]) -> None:
    """Stops several servers at the same time."""
    owned = [handle for handle in handles if handle is not None]
    for handle in owned:
        handle.request_stop()
    for handle in owned:
        handle.stop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Place of a server: its machine, process and log."""

    host: str
    """Name of the machine."""
    gpus: tuple[str, ...] | None
    """GPUs of its ranks, in order; none on CPU; ``None``: unknown."""
    visible_gpus: tuple[str, ...] | None
    """Visible GPUs of the server's processes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Replica:
    """Known state of a server; only :func:`.reconcile` makes the next."""

    url: str
    """Address of the server, which can change when the server is started again."""
    rank: int = 0
    """Place among the servers of the engine, which stays the same."""
    handle: ServerHandle | None = None
    """Set where this engine started it."""
    restart: Callable[[], ServerHandle] | None = None
    """Begins a restart, on this machine or another."""
    release: Callable[[], object] | None = None
    """Releases the reservation of a permanently stopped server."""
    locate: Callable[[], Location] | None = None
    """Returns the place of the server."""
    location: Location | None = None
    """Place of a server of this engine, or of the engine that it is a copy of."""
    state: ReplicaState = "serving"
    reason: str = ""
    """Reason why the server does not serve: usually the end of its log."""
    away_since: float | None = None
    """Monotonic time of its end or of its last answer; ``None`` while the server
    serves. The last serving server gets requests all the same."""
    restarts: int = 0
    """Number of restarts."""
    restarted: bool = False
    """Whether the server was restarted and has not served since."""
    suspected: bool = False
    """Whether the server is polled although it serves: a request failed there."""
    start_id: str = ""
    """Differs after each start; see :class:`.ServerCapabilities`."""
    version: str = ""
    """Last reported weight version; empty: not queried."""
    foreign_version: str = ""
    """Weight version from another sender before it joined; empty: none."""
    held_adapters: frozenset[str] = frozenset()
    """Its LoRA adapters, under the servers' names."""
    released: frozenset[str] = frozenset()
    """Released kinds of memory. A second release ends a server."""

    @property
    def runs(self) -> bool:
        """Whether the process runs, as far as is known."""
        return self.state in ("serving", "stale", "leaving")

    @property
    def status(self) -> str:
        """State of the server, or its released memory."""
        if self.unreachable:
            return "unreachable"
        asleep = self.runs and self.released
        return f"asleep: {format_tags(self.released)}" if asleep else self.state

    @property
    def unreachable(self) -> bool:
        """Whether an unresponsive server gets requests, as no other serves."""
        return self.state == "serving" and self.away_since is not None

    def holding(self, adapters: Set[str], *, since: Replica) -> Replica:
        """Returns the server with its reported adapters and all changes since then."""
        added = self.held_adapters - since.held_adapters
        dropped = since.held_adapters - self.held_adapters
        return replace(self, held_adapters=added | (adapters - dropped))

    def with_adapter(self, served_as: str) -> Replica:
        """Returns the server with an added adapter."""
        return replace(self, held_adapters=self.held_adapters | {served_as})

    def without_handle(self) -> Replica:
        """Returns a copy for another process, which owns no server."""
        return replace(
            self,
            handle=None,
            restart=None,
            release=None,
            locate=None,
            # A server that is down now may be back when the copy polls it.
            state="serving" if self.state == "serving" else "stale",
            reason="",
            away_since=None,
            restarts=0,
            suspected=False,
            version="",
            held_adapters=frozenset(),
            released=self.released if self.runs else frozenset(),
        )

    def __repr__(self) -> str:
        return f"Replica({self.url!r}, {self.status!r}, version={self.version!r})"


def format_tags(tags: Iterable[str]) -> str:
    """Returns kinds of memory for a message, the weights first."""
    return ", ".join(sorted(tags, reverse=True))


class RouterHandle(Protocol):
    """The router in front of the servers."""

    @property
    def url(self) -> str:
        """Address to which requests go."""

    @property
    def usable(self) -> bool:
        """Whether the process runs, as far as is known."""

    @property
    def keyed(self) -> bool:
        """Whether the router keeps requests with equal routing keys on a server."""

    def wait_ready(self) -> None:
        """Waits until its servers are in rotation."""

    def stop(self) -> None:
        """Stops the router, if this engine started it."""

    async def add_worker(self, url: str) -> None:
        """Adds a server to the router."""

    async def remove_worker(self, url: str) -> None:
        """Removes a server from the router; its in-flight requests finish."""


@dataclass(frozen=True, kw_only=True)
class RemoteRouter:
    """A router of another owner, who stops and configures it."""

    url: str
    usable: bool = True
    keyed: bool = True

    def wait_ready(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""

    async def add_worker(self, url: str) -> None:
        """Does nothing."""

    async def remove_worker(self, url: str) -> None:
        """Does nothing."""


class Directory(Protocol):
    """Addresses of the servers of an engine, for its copies.

    Their engine publishes them; copies of the engine in other processes read them.
    Copies are pickled with it.
    """

    def publish(self, urls: Sequence[str]) -> None:
        """Records each server's address, by rank. Does not wait.

        It is empty while the server is down, ends with :data:`LEAVING` while it
        leaves, and is :data:`REMOVED` afterwards.
        """

    async def urls(self) -> Sequence[str]:
        """Returns the last published addresses, or raises an SGLangError."""


class StartMore(Protocol):
    """Starts more servers for a running engine."""

    def __call__(
        self,
        count: int,
        *,
        cuda_devices: Sequence[Any] | None,
        begun: Callable[[ServerHandle], object],
    ) -> Sequence[Replica]:
        """Starts servers and waits until they are ready: all of them, or none.

        ``begun`` is called with each starting server; if it raises, all are stopped.
        """
