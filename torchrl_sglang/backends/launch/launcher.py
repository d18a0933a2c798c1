"""Placement and Launcher: the start of an engine's servers, wherever they run.

A launcher knows the place and the start of its servers; :func:`launch` defines the
order: all servers start, or none, and then their router.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Protocol

from yarl import URL

from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import (
    Directory,
    Location,
    Replica,
    RouterHandle,
    ServerHandle,
    stop_all,
)
from torchrl_sglang.backends.launch.process import READY_POLL_SECONDS
from torchrl_sglang.backends.launch.router import RouterProcess
from torchrl_sglang.backends.launch.start_log import find_phase
from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.urls import LOOPBACK

PROGRESS_SECONDS = 10.0

MOST_TOLD = 4
"""Most servers with such a log line; a remote server's log is fetched for it."""

PHASE_LINES = 100
"""Last lines of a server's log, searched for its phase."""


ParallelStart = bool | Literal["staggered"] | None


class Launcher(abc.ABC):
    """Starts the servers of an engine. Each has a rank, from 0.

    ``torchrl_sglang.testing.launcher_contract`` has its contract tests.
    """

    num_servers: int
    """Number of servers."""
    at_once: int = 1
    """Number of concurrently starting servers."""
    api_key: str | None = None
    """Key of all servers; ``None``: no key."""
    directory: Directory | None = None
    """Addresses for copies of the engine; ``None`` if no server ever moves."""

    @property
    def router_host(self) -> str:
        """Address at which clients of the servers reach a router."""
        return LOOPBACK

    @abc.abstractmethod
    def start(self, rank: int) -> ServerHandle:
        """Begins to start a server; does not wait until it is ready."""

    def restart(self, rank: int) -> ServerHandle:
        """Begins to restart an ended server; returns its own handle.

        Its address may change and is known when it is ready; then there is a
        :attr:`directory`. By default, its start is repeated.
        """
        return self.start(rank)

    def stop(self, servers: Iterable[ServerHandle]) -> None:
        """Stops servers, and releases all reservations; none starts again."""
        stop_all(servers)

    def add(self, count: int, *, cuda_devices: Sequence[Any] | None = None) -> range:
        """Makes places for more servers of the same kind, and starts none of them.

        Copies of the engine discover them in the :attr:`directory`, if any.

        Args:
            count: number of servers.
            cuda_devices: as for :meth:`.Placement.bind`. Defaults to free GPUs.

        Returns:
            range: their ranks, which are new.

        Raises:
            UnsupportedByServerError: by default: servers cannot be added.
            ConfigurationError: if there is no place for them.
        """
        raise UnsupportedByServerError(
            f"A {type(self).__name__} cannot add servers to an engine that runs; it "
            f"does not override Launcher.add()."
        )

    def remove(self, rank: int) -> None:  # noqa: B027 - Not every launcher reserves.
        """Releases the reservation of a permanently stopped server."""

    def where(self, rank: int) -> Location:
        """Returns the current or last place of a server. By default it is unknown."""
        return Location(host="", gpus=None, visible_gpus=None)

    def start_router(self, urls: Sequence[str], **arguments: Any) -> RouterHandle:
        """Begins to start a router in front of servers with these addresses.

        By default it is a process on this machine.

        Args:
            urls: of the servers.
            **arguments: ``policy``, ``api_key``, ``host``, the ``port`` of its earlier
            start, if any, and the ``router_args``.
        """
        return RouterProcess(urls, **arguments)


class Placement(Protocol):
    """Place for the servers of an engine; ``launcher=`` takes any.

    ``"local"`` stands for :class:`.LocalPlacement` and ``"ray"`` for
    :class:`.RayLauncher`.
    """

    def bind(
        self,
        num_replicas: int,
        spec: Mapping[str, Any],
        *,
        start_timeout: float,
        parallel: ParallelStart,
        cuda_devices: Sequence[Any] | None,
    ) -> Launcher:
        """Returns a launcher of the servers, and starts none of them.

        Args:
            num_replicas: number of servers.
            spec: ``model`` and the other given arguments of
                :func:`~torchrl_sglang.make_sglang_server`, for each server the same.
            start_timeout: of each server, in seconds.
            parallel: the value of ``parallel_start``.
            cuda_devices: the user's value. A placement with its own choice of GPUs
            refuses it.

        Raises:
            ConfigurationError: if an argument is wrong.
        """


def start_servers(
    launcher: Launcher, *, progress: Callable[[str], None] = torchrl_logger.info
) -> list[ServerHandle]:
    """Starts all servers of a launcher and waits for them; starts all or none."""
    servers: list[ServerHandle] = []
    with ExitStack() as undo:
        undo.callback(launcher.stop, servers)
        _start_each(launcher, range(launcher.num_servers), servers.append, progress)
        undo.pop_all()
    return servers


def _start_each(
    launcher: Launcher,
    ranks: range,
    begun: Callable[[ServerHandle], object],
    progress: Callable[[str], None] = torchrl_logger.info,
) -> list[ServerHandle]:
    """Starts servers and waits for them; calls ``begun`` with each."""
    servers: list[ServerHandle] = []
    starting: list[ServerHandle] = []
    for rank in ranks:
        _wait_for_fewer(starting, launcher.at_once, progress)
        gpus = launcher.where(rank).gpus
        server = launcher.start(rank)
        servers.append(server)
        starting.append(server)
        begun(server)
        on_gpus = f" on GPU {','.join(gpus)}" if gpus else ""
        log = f" Its log: {server.log_file}" if server.log_file else ""
        progress(f"{server.name} is starting at {server.url}{on_gpus}.{log}")
    _wait_for_fewer(starting, 1, progress)
    return servers


def start_more(
    launcher: Launcher,
    count: int,
    *,
    cuda_devices: Sequence[Any] | None,
    begun: Callable[[ServerHandle], object],
) -> list[Replica]:
    """Starts more servers, all or none; see :class:`.StartMore`."""
    ranks = launcher.add(count, cuda_devices=cuda_devices)
    started: list[ServerHandle] = []

    def begin(server: ServerHandle) -> None:
        started.append(server)
        begun(server)

    with ExitStack() as undo:
        for rank in ranks:
            undo.callback(launcher.remove, rank)
        # First, to free reservations.
        undo.callback(stop_all, started)
        servers = _start_each(launcher, ranks, begin)
        undo.pop_all()
    return [
        _make_replica(launcher, rank, server)
        for rank, server in zip(ranks, servers, strict=True)
    ]


def _wait_for_fewer(
    starting: list[ServerHandle],
    number: int,
    progress: Callable[[str], None],
    interval: float = PROGRESS_SECONDS,
) -> None:
    """Waits until fewer than ``number`` servers are starting; removes ready servers."""
    next_log = time.monotonic() + interval
    while len(starting) >= number:
        for server in list(starting):
            if server.check_ready():
                starting.remove(server)
                progress(f"{server.name} is ready after {server.age:.0f} s.")
        if time.monotonic() > next_log:
            _tell(starting, progress)
            next_log = time.monotonic() + interval
        if len(starting) >= number:
            time.sleep(READY_POLL_SECONDS)


def _tell(starting: list[ServerHandle], progress: Callable[[str], None]) -> None:
    """Reports the phase of the first pending starts, and the number of others."""
    for server in starting[:MOST_TOLD]:
        phase = find_phase(server.log_tail(PHASE_LINES))
        progress(f"{server.name} is {phase}; it started {server.age:.0f} s ago.")
    if len(starting) > MOST_TOLD:
        progress(f"{len(starting) - MOST_TOLD} more servers are starting.")


def launch(launcher: Launcher, *, router: Mapping[str, Any] | None) -> Fleet:
    """Starts a launcher's servers, and a router if it has arguments; all or none."""
    servers = start_servers(launcher)
    with ExitStack() as undo:
        undo.callback(launcher.stop, servers)
        replicas = [
            _make_replica(launcher, rank, server) for rank, server in enumerate(servers)
        ]
        running = start_router = None
        if router is not None:
            router = {"host": launcher.router_host, **router}
            router["api_key"] = launcher.api_key
            urls = [server.url for server in servers]
            running = launcher.start_router(urls, **router)
            undo.callback(running.stop)
            running.wait_ready()
            # The same port, to keep its known address valid.
            fixed = {**router, "port": URL(running.url).port}
            start_router = functools.partial(launcher.start_router, **fixed)
        fleet = Fleet(
            replicas,
            router=running,
            start_router=start_router,
            stop_servers=launcher.stop,
            directory=launcher.directory,
            start_more=functools.partial(start_more, launcher),
        )
        undo.pop_all()
    return fleet


def _make_replica(launcher: Launcher, rank: int, server: ServerHandle) -> Replica:
    return Replica(
        url=server.url,
        handle=server,
        restart=functools.partial(launcher.restart, rank),
        release=functools.partial(launcher.remove, rank),
        locate=functools.partial(launcher.where, rank),
        location=launcher.where(rank),
    )
