"""Launcher: the protocol for starting an engine's servers, wherever they run.

A launcher knows where and how its servers run; :func:`launch` knows the order of
events: all servers start, or none, and then their router.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchrl._utils import logger as torchrl_logger
from yarl import URL

from torchrl_sglang.backends.fleet.replica import Replica, ServerHandle, stop_all
from torchrl_sglang.backends.fleet.routing import RouterHandle
from torchrl_sglang.backends.launch.router import RouterProcess, make_sglang_router

__all__ = [
    "Launched",
    "LaunchedServer",
    "Launcher",
    "Location",
    "launch",
    "start_servers",
]

READY_POLL_SECONDS = 0.1
"""How often starting servers are polled."""

PROGRESS_SECONDS = 30.0
"""How often a long start is logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where one server runs."""

    host: str
    """Name of the machine."""
    gpus: tuple[str, ...] | None
    """GPUs of its ranks, in order; none on CPU; ``None``: unknown."""
    visible_gpus: tuple[str, ...] | None
    """GPUs that its processes see."""


class LaunchedServer(ServerHandle, Protocol):
    """The handle of a server that a launcher started."""

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def age(self) -> float:
        """Seconds since its start."""

    def check_ready(self) -> bool:
        """Returns whether it serves; raises ServerStartError if it never will."""


class Launcher(Protocol):
    """Starts the servers of one engine. Each has a rank, from 0."""

    @property
    def num_servers(self) -> int:
        """Number of servers."""

    @property
    def at_once(self) -> int:
        """Number of servers that start at the same time."""

    def start(self, rank: int) -> LaunchedServer:
        """Begins to start a server; does not wait until it is ready."""

    def restart(self, rank: int) -> LaunchedServer:
        """Begins to start a server that has ended again, at the same address."""

    def stop(self, servers: Iterable[LaunchedServer]) -> None:
        """Stops servers, and releases what is reserved for those not started."""

    def where(self, rank: int) -> Location:
        """Returns where a server runs."""


def start_servers(
    launcher: Launcher, *, progress: Callable[[str], None] | None = None
) -> list[LaunchedServer]:
    """Starts all servers of a launcher and waits until they are ready, or starts none.

    ``progress`` is called with a line for each event; default: TorchRL's logger.
    """
    log = torchrl_logger.info if progress is None else progress
    servers: list[LaunchedServer] = []
    try:
        _start_all(launcher, servers, log)
    except BaseException:
        launcher.stop(servers)
        raise
    return servers


def _start_all(
    launcher: Launcher, servers: list[LaunchedServer], log: Callable[[str], None]
) -> None:
    """Starts the servers, and adds each to ``servers`` as it begins to start."""
    starting: list[LaunchedServer] = []
    last_log = time.monotonic()
    while len(servers) < launcher.num_servers or starting:
        while len(servers) < launcher.num_servers and len(starting) < launcher.at_once:
            gpus = launcher.where(len(servers)).gpus
            server = launcher.start(len(servers))
            servers.append(server)
            starting.append(server)
            on_gpus = f" on GPU {','.join(gpus)}" if gpus else ""
            log(f"{server.name} is starting at {server.url}{on_gpus}.")
        for server in list(starting):
            if server.check_ready():
                starting.remove(server)
                log(f"{server.name} is ready after {server.age:.0f} s.")
        if starting and time.monotonic() - last_log > PROGRESS_SECONDS:
            last_log = time.monotonic()
            for server in starting:
                log(
                    f"{server.name} is still starting after {server.age:.0f} s: "
                    f"{server.log_tail(1)}"
                )
        if starting:
            time.sleep(READY_POLL_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Running servers, and the router in front of them."""

    replicas: list[Replica]
    """The servers, by rank."""
    router: RouterHandle | None = None
    """The router, if there are several servers."""
    start_router: Callable[[Sequence[str]], RouterHandle] | None = None
    """Begins to start the router again for servers with these addresses."""

    def stop(self) -> None:
        """Stops the router and the servers."""
        if self.router is not None:
            self.router.stop()
        stop_all(replica.handle for replica in self.replicas)


def launch(launcher: Launcher, *, router: Mapping[str, Any] | None) -> Launched:
    """Starts a launcher's servers, and a router if it has arguments; all or none."""
    # The start of a single server is no news: the engine is there, or an error.
    progress = torchrl_logger.debug if launcher.num_servers == 1 else None
    servers = start_servers(launcher, progress=progress)
    try:
        replicas = [
            _make_replica(launcher, rank, server) for rank, server in enumerate(servers)
        ]
        if router is None:
            return Launched(replicas=replicas)
        running = make_sglang_router([server.url for server in servers], **router)
    except BaseException:
        launcher.stop(servers)
        raise
    # The same port, so that everyone who has its address finds it again.
    again = {**router, "port": URL(running.url).port}
    return Launched(
        replicas=replicas,
        router=running,
        start_router=lambda urls: RouterProcess(urls, **again),
    )


def _make_replica(launcher: Launcher, rank: int, server: LaunchedServer) -> Replica:
    location = launcher.where(rank)
    return Replica(
        url=server.url,
        handle=server,
        restart=functools.partial(launcher.restart, rank),
        gpus=location.gpus,
        visible_gpus=location.visible_gpus,
    )
