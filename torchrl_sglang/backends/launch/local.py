"""Everything that an engine starts: its servers, and the router in front of them.

All of it, or nothing: what was started is ended again if the rest fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.fleet.replica import Replica, stop_all
from torchrl_sglang.backends.fleet.routing import RouterHandle
from torchrl_sglang.backends.launch.plan import plan_server
from torchrl_sglang.backends.launch.process import stop_unreachable
from torchrl_sglang.backends.launch.replicas import find_gpus, replica_specs
from torchrl_sglang.backends.launch.router import (
    RouterProcess,
    check_router,
    make_sglang_router,
)
from torchrl_sglang.backends.launch.server import (
    ServerProcess,
    begin_start,
    start_servers,
)
from torchrl_sglang.errors import ConfigurationError

__all__ = ["Launch", "Launched", "launch"]

ROUTER_START_SECONDS = 60.0
"""Budget for a router whose servers run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is to be started."""

    spec: Mapping[str, Any]
    """Arguments of :func:`make_sglang_server`, the same for each server."""
    num_replicas: int
    """Number of servers."""
    cuda_devices: Sequence[Any] | None
    """GPUs for all, or a group of them for each."""
    router_policy: str | None
    """How the router chooses; ``None`` for no router."""
    router_args: Mapping[str, Any]
    """Further arguments of the router."""
    start_timeout: float
    """Budget for the start of each server, in seconds."""
    parallel: bool | Literal["staggered"] | None
    """How many start at a time; see :func:`start_servers`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What runs."""

    replicas: list[Replica]
    """The servers."""
    router: RouterHandle | None
    """The router, where there are several."""
    start_router: Any
    """Starts it again for the servers with these addresses; ``None`` without one."""

    def stop(self) -> None:
        """Ends all of it."""
        if self.router is not None:
            self.router.stop()
        stop_all(replica.handle for replica in self.replicas)


def launch(what: Launch) -> Launched:
    """Starts servers, and a router if there are several.

    Raises:
        ConfigurationError: if an argument is wrong.
        ServerStartError: if one of them does not become ready; the message carries the
            end of its log. The others have been stopped.
    """
    if what.num_replicas == 1 and what.router_args:
        raise ConfigurationError(
            f"router_args={dict(what.router_args)!r} is for several servers, and "
            f"num_replicas is 1; leave it out."
        )
    if what.num_replicas > 1 and what.router_policy is not None:
        check_router(what.router_policy, what.router_args)
    stop_unreachable()
    specs = replica_specs(what.num_replicas, what.spec, cuda_devices=what.cuda_devices)
    if what.num_replicas > 1:
        # Servers on one CPU that each take all of its cores take turns at waiting.
        threads = max(len(os.sched_getaffinity(0)) // what.num_replicas, 1)
        for spec in specs:
            own = spec.get("environment") or {}
            spec["environment"] = {"OMP_NUM_THREADS": str(threads), **own}
    servers = start_servers(
        specs,
        start_timeout=what.start_timeout,
        parallel=what.parallel,
        # One server is quiet about what comes next: the engine is there, or an error.
        progress=torchrl_logger.debug if what.num_replicas == 1 else None,
    )
    try:
        places = [find_gpus(spec) for spec in specs]
        replicas = [
            Replica(
                url=server.url,
                handle=server,
                restart=_restarter(spec, server, what.start_timeout),
                gpus=place.gpus,
                visible_gpus=place.visible,
            )
            for spec, server, place in zip(specs, servers, places, strict=True)
        ]
        if what.num_replicas == 1 or what.router_policy is None:
            return Launched(replicas=replicas, router=None, start_router=None)
        arguments = {
            "policy": what.router_policy,
            "api_key": what.spec.get("api_key"),
            "start_timeout": ROUTER_START_SECONDS,
            **what.router_args,
        }
        router = make_sglang_router([server.url for server in servers], **arguments)
        # On the same port, so that all who know its address find it again.
        arguments["port"] = _port(router.url)

        def start_router(urls: Sequence[str]) -> RouterHandle:
            return RouterProcess(urls, **arguments)
    except BaseException:
        stop_all(servers)
        raise
    return Launched(replicas=replicas, router=router, start_router=start_router)


def _restarter(
    spec: Mapping[str, Any], server: ServerProcess, start_timeout: float
) -> Callable[[], ServerProcess]:
    # On the same port, so that all who know its address find it again.
    again = {**spec, "port": _port(server.url)}
    return lambda: begin_start(plan_server(**again), start_timeout)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
