"""RayServers: the launcher of servers on the nodes of a Ray cluster.

Each server is run by an actor on its node (:class:`.ServerHost`), a multi-node server
by an actor on each node. The actors run in bundles of a placement group, so Ray
reserves and assigns their resources. If a node dies, Ray moves its bundles to another
node, and a restarted server follows them.

A handle never blocks for long: it polls the calls in progress.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from yarl import URL

from torchrl_sglang.backends.client.http import get
from torchrl_sglang.backends.fleet.replica import (
    Location,
    NotStartedError,
    ServerHandle,
    stop_all,
)
from torchrl_sglang.backends.launch.launcher import PROGRESS_SECONDS, Launcher
from torchrl_sglang.backends.launch.process import (
    HEALTH_TIMEOUT_SECONDS,
    READY_POLL_SECONDS,
    STOP_TIMEOUT_SECONDS,
)
from torchrl_sglang.backends.launch.ray_directory import RayDirectory, is_connected
from torchrl_sglang.backends.launch.ray_host import HostInfo, PreparedServer, ServerHost
from torchrl_sglang.backends.launch.ray_placement import Demand, Seat, Seats
from torchrl_sglang.errors import ConfigurationError, ServerStartError, SGLangError
from torchrl_sglang.support.log import torchrl_logger

ACTOR_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Otherwise an ending actor kills the watchdog, and the processes below it remain."""

_LEFT = "this process has left the Ray cluster"

MAX_CONCURRENCY = 8
"""Concurrent calls of an actor; two of them last as long as its server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """A placement group for some servers."""

    group: Any
    seats: Sequence[Seats]
    release: Callable[[], object]
    """Removes the group, unless the user has made it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Placement group, and the seats of its servers."""

    group: Any
    runtime_env: Mapping[str, Any] | None
    timeout: float
    """Timeout of Ray's placement of a server's actors, in seconds."""
    demand: Demand

    def create(self, seat: Seat) -> Any:
        """Begins to create an actor."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(seat.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": seat.gpus,
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_concurrency": MAX_CONCURRENCY,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=seat.bundle
            ),
        }
        environment = dict(self.runtime_env or {})
        variables = {**ACTOR_VARIABLES, **(environment.get("env_vars") or {})}
        options["runtime_env"] = {**environment, "env_vars": variables}
        return ray.remote(**options)(ServerHost).remote()


class RayServers(Launcher):
    """Starts servers on the nodes of a Ray cluster; see :class:`.Launcher`.

    ``specs`` has the arguments of each server, and ``seats`` its actors' seats by node.
    ``make_spec`` returns the arguments of an added server, and ``reserve`` reserves its
    resources in Ray.
    """

    def __init__(
        self,
        specs: Sequence[Mapping[str, Any]],
        seats: Sequence[Seats],
        place: Place,
        *,
        start_timeout: float,
        at_once: int,
        api_key: str | None,
        release: Callable[[], object],
        make_spec: Callable[[int], Mapping[str, Any]],
        reserve: Callable[[], Reserved],
    ) -> None:
        self.num_servers = len(specs)
        self.at_once = at_once
        self.api_key = api_key
        self._specs = [dict(spec) for spec in specs]
        self._seats = list(seats)
        self._places = [place] * len(specs)
        self._start_timeout = start_timeout
        self._make_spec = make_spec
        self._reserve = reserve
        self._adding = Lock()
        # Reservations are released even without a call of stop().
        self._release = weakref.finalize(self, release)
        # Releases of added servers' reservations, by rank.
        self._releases: dict[int, weakref.finalize[[], RayServers]] = {}
        # Seats of removed servers in a remaining group.
        self._vacant: list[tuple[Place, Seats]] = []
        self.directory = self._directory = RayDirectory()
        self._servers: list[RayServer] = []
        try:
            for rank in range(self.num_servers):
                self._servers.append(self._make(rank))
            self._prepare(range(self.num_servers))
        except BaseException:
            self.stop(self._servers)
            raise

    @property
    def router_host(self) -> str:
        """Address of this node, at which the other nodes reach a router."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    def _make(self, rank: int, before: RayServer | None = None) -> RayServer:
        number = f" {rank + 1} of {self.num_servers}" if self.num_servers > 1 else ""
        return RayServer(
            f"SGLang server{number}",
            self._specs[rank],
            self._seats[rank],
            self._places[rank],
            start_timeout=self._start_timeout,
            before=before,
        )

    def _prepare(self, ranks: range) -> None:
        """Waits until Ray has placed servers and their arguments are checked."""
        waiting = [(rank, self._servers[rank]) for rank in ranks]
        last_log = time.monotonic()
        while waiting:
            for rank, server in list(waiting):
                try:
                    if server.check_prepared():
                        waiting.remove((rank, server))
                except ConfigurationError as error:
                    if self.num_servers > 1:
                        error.add_note(
                            f"It is server {rank + 1} of {len(self._specs)}."
                        )
                    raise
            if waiting and time.monotonic() - last_log > PROGRESS_SECONDS:
                last_log = time.monotonic()
                for _, server in waiting:
                    doing = "being prepared" if server.placed else "waiting for Ray"
                    torchrl_logger.info(f"{server.name} is still {doing}.")
            if waiting:
                time.sleep(READY_POLL_SECONDS)

    def start(self, rank: int) -> RayServer:
        server = self._servers[rank]
        server.begin()
        return server

    def restart(self, rank: int) -> RayServer:
        replaced = self._servers[rank]
        # The reserved resources go to the new server.
        replaced.stop()
        server = self._servers[rank] = self._make(rank, replaced)
        server.begin()
        return server

    def stop(self, servers: Iterable[ServerHandle]) -> None:
        try:
            stop_all({*servers, *self._servers})
        finally:
            self._directory.end()
            for release in [self._release, *self._releases.values()]:
                release()

    def where(self, rank: int) -> Location:
        return self._servers[rank].location

    def add(self, count: int, *, cuda_devices: Sequence[Any] | None = None) -> range:
        """Places more servers in Ray, first on seats of removed servers."""
        if cuda_devices is not None:
            raise ConfigurationError(
                f"cuda_devices={cuda_devices!r} is for launcher='local': Ray assigns "
                f"the GPUs; leave it out."
            )
        with self._adding:
            ranks = range(self.num_servers, self.num_servers + count)
            try:
                for rank in ranks:
                    self._take_place(rank)
                self._prepare(ranks)
            except BaseException:
                for rank in ranks:
                    self.remove(rank)
                raise
        return ranks

    def _take_place(self, rank: int) -> None:
        spec = dict(self._make_spec(rank))
        vacant = self._vacant[-1:]
        if vacant:
            place, seats = vacant[0]
        else:
            reserved = self._reserve()
            self._releases[rank] = weakref.finalize(self, reserved.release)
            place, seats = (
                replace(self._places[0], group=reserved.group),
                reserved.seats[0],
            )
        # Replaces the entries of an earlier failed attempt.
        self._specs[rank:] = [spec]
        self._seats[rank:] = [seats]
        self._places[rank:] = [place]
        self._servers.append(self._make(rank))
        del self._vacant[len(self._vacant) - len(vacant) :]
        self.num_servers += 1

    def remove(self, rank: int) -> None:
        """Stops a server, and releases its reservation.

        A placement group for several servers stays: the next server gets the seats.
        """
        if rank < len(self._servers):
            self._servers[rank].stop()
        if (release := self._releases.pop(rank, None)) is not None:
            release()
        elif rank < len(self._servers) and self._release.alive:
            self._vacant.append((self._places[rank], self._seats[rank]))


class RayServer:
    """A server on the nodes of a Ray cluster, at the address of its predecessor."""

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        seats: Seats,
        place: Place,
        *,
        start_timeout: float,
        before: RayServer | None = None,
    ) -> None:
        self.name = name
        self.url: str = "" if before is None else before.url
        self.host: str = "" if before is None else before.host
        self.placed = False
        """Whether Ray has placed the server's actors."""
        self.pid = 0
        self.log_file = ""
        nowhere = Location(host="", gpus=None, visible_gpus=None)
        self.location: Location = nowhere if before is None else before.location
        self._spec = spec
        self._place = place
        self._start_timeout = start_timeout
        self._begun: float | None = None
        self._prepared = self._ready = self._stopped = False
        self._error: SGLangError | None = None
        self._stopping: list[Future[Any]] = []
        self._seats = seats
        actors = [[place.create(seat) for seat in node] for node in seats]
        self._actors = [actor for node in actors for actor in node]
        self._hosts = [node[0] for node in actors]
        self._ended = [_call(host, "wait_end") for host in self._hosts]
        self._kill = weakref.finalize(self, _kill, self._actors)
        self._steps = self._start(actors)

    @property
    def state(self) -> str:
        if self._stopped:
            return "stopped"
        if any(end.done() for end in self._ended) or not is_connected():
            return "dead"
        return "ready" if self._ready else "starting"

    @property
    def age(self) -> float:
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    def begin(self) -> None:
        """Lets the server start when it is prepared."""
        self._begun = time.monotonic()
        self._advance()

    def check_prepared(self) -> bool:
        """Returns whether the server is placed and checked, or raises an error."""
        if not self._prepared:
            self._advance()
        return self._prepared

    def check_ready(self) -> bool:
        if not self._ready:
            self._advance()
        return self._ready

    def wait_ready(self) -> None:
        try:
            while not self.check_ready():
                time.sleep(READY_POLL_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _advance(self) -> None:
        """Continues the start as far as possible."""
        if self._stopped:
            raise NotStartedError(f"The {self.name} was stopped before it was ready.")
        if not is_connected():
            raise ServerStartError(f"The {self.name} ended: {_LEFT}.")
        if self._error is not None:
            raise self._error
        try:
            next(self._steps, None)
        except SGLangError as error:
            self._error = error
            if self._stopping or self._stopped:
                self._error = NotStartedError(f"The {self.name} was stopped: {error}")
                raise self._error from error
            raise

    def _start(self, actors: list[list[Any]]) -> Generator[None]:
        """Places, prepares and starts the server; yields while it waits."""
        infos = yield from self._describe(actors)
        prepared = yield from self._prepare(infos)
        self.host = infos[0][0].address
        self.name += f" (node {self.host})"
        self.url = prepared[0].url
        # GPU names are ambiguous across several nodes.
        single = len(prepared) == 1
        self.location = Location(
            host=self.host,
            gpus=prepared[0].gpus if single else None,
            visible_gpus=prepared[0].visible_gpus if single else None,
        )
        self._prepared = True
        while self._begun is None:
            yield
        arguments = (self.name, self._start_timeout)
        started = yield from _results(
            [_call(host, "start", *arguments) for host in self._hosts]
        )
        self.pid, self.log_file = started[0].pid, started[0].log_path
        ready = [_call(host, "wait_ready") for host in self._hosts]
        yield from _results(ready)
        yield from self._reach()
        self._ready = True

    def _describe(
        self, actors: Sequence[Sequence[Any]]
    ) -> Generator[None, None, list[list[HostInfo]]]:
        """Waits until Ray has placed the actors of each node; returns where."""
        calls = [[_call(actor, "describe") for actor in node] for node in actors]
        placed = _results([call for node in calls for call in node])
        deadline = time.monotonic() + self._place.timeout
        for _ in placed:
            if time.monotonic() > deadline:
                raise NotStartedError(
                    f"Ray has not placed the {self.name} within "
                    f"{self._place.timeout:g} s; it takes {self._place.demand.text}. "
                    f"`ray status` shows the free resources. Give more time with "
                    f"RayLauncher(placement_timeout=...)."
                )
            yield
        infos = [[call.result() for call in node] for node in calls]
        for node in infos:
            if len({info.node_id for info in node}) > 1:
                addresses = ", ".join(info.address for info in node)
                raise ServerStartError(
                    f"The GPUs of the {self.name} are in bundles on several nodes "
                    f"({addresses}); a server with several nodes has nnodes=..."
                )
        if len({node[0].node_id for node in infos}) < len(infos):
            raise ServerStartError(
                f"Ray has placed several parts of the {self.name}, which has "
                f"nnodes={len(infos)}, on one node ({infos[0][0].address}). Give "
                f"RayLauncher(strategy='STRICT_SPREAD'), or a smaller nnodes."
            )
        self.placed = True
        return infos

    def _prepare(
        self, infos: Sequence[Sequence[HostInfo]]
    ) -> Generator[None, None, list[PreparedServer]]:
        addresses = [node[0].address for node in infos]
        specs = [{**self._spec, "host": address} for address in addresses]
        if len(specs) > 1:
            lease = _call(self._hosts[0], "lease_meeting", addresses[0])
            (meeting,) = yield from _results([lease])
            for rank, spec in enumerate(specs):
                spec |= {"node_rank": rank, "dist_init_addr": meeting}
        for spec, node in zip(specs, infos, strict=True):
            gpus = [gpu for info in node for gpu in info.gpus]
            if gpus:
                spec["cuda_devices"] = sorted(gpus, key=lambda name: (len(name), name))
        earlier = URL(self.url)
        port = earlier.port if earlier.host == addresses[0] else None
        calls = [
            _call(host, "prepare", spec, None if rank else port)
            for rank, (host, spec) in enumerate(zip(self._hosts, specs, strict=True))
        ]
        try:
            prepared: list[PreparedServer] = yield from _results(calls)
        except SGLangError as error:
            error.add_note(f"Found on node {', '.join(addresses)}.")
            raise
        return prepared

    def _reach(self) -> Generator[None]:
        """Waits until this process can reach the server."""
        deadline = time.monotonic() + 10.0
        while True:
            try:
                if get(f"{self.url}/health", timeout=HEALTH_TIMEOUT_SECONDS).ok:
                    return
                reason = "it answers with an error"
            except SGLangError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"The {self.name} answers on its own node, and not here at "
                    f"{self.url}: {reason}"
                )
            yield

    def log_tail(self, lines: int = 30) -> str:
        for end in self._ended:
            if end.done():
                try:
                    return "\n".join(end.result().splitlines()[-lines:])
                except Exception as error:  # noqa: BLE001 - Ray's, of many kinds.
                    return f"(the log ended with its actor or its node: {_why(error)})"
        if not is_connected():
            return f"(the log is gone: {_LEFT})"
        try:
            text: str = _call(self._hosts[0], "log_tail", lines).result(5.0)
        except Exception as error:  # noqa: BLE001 - Ray's, of many kinds.
            return f"(the log cannot be read: {error})"
        return text

    def request_stop(self) -> None:
        if self._stopping or not self.placed or not is_connected():
            return
        self._stopping = [_call(host, "stop") for host in self._hosts]

    def stop(self) -> None:
        if self._stopped:
            return
        self.request_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for call in self._stopping:
            with suppress(Exception):
                call.result(max(0.0, deadline - time.monotonic()))
        self._stopped = True
        self._kill()

    def __repr__(self) -> str:
        return f"RayServer({self.url!r}, state={self.state!r})"


def _call(actor: Any, method: str, *args: Any) -> Future[Any]:
    future: Future[Any] = getattr(actor, method).remote(*args).future()
    return future


def _results(calls: Sequence[Future[Any]]) -> Generator[None, None, list[Any]]:
    """Yields until all calls have returned; raises the first error."""
    while not all(call.done() for call in calls):
        for call in calls:
            if call.done():
                _result(call)
        yield
    return [_result(call) for call in calls]


def _result(call: Future[Any]) -> Any:
    """Returns the result of an actor's method, or raises its own error."""
    error = call.exception()
    if error is None:
        return call.result()
    cause = getattr(error, "cause", None)
    raise cause if isinstance(cause, SGLangError) else ServerStartError(_why(error))


def _why(error: BaseException) -> str:
    """Returns the first and the last line of a Ray error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or repr(error)


def _kill(actors: list[Any]) -> None:
    import ray

    for actor in actors if is_connected() else ():
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)
