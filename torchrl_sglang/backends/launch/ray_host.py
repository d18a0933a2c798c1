"""ServerHost: the Ray actor of a server on its node.

It does the work of a launcher on its machine: it checks the arguments, leases the
ports, starts the process tree with its watchdog and reads its log. The tree ends with
the actor, which ends with its driver, and with its node.

Modules with slow imports are imported in methods, because a mere reservation of a GPU
needs none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_sglang.backends.launch.ports import PortLease
    from torchrl_sglang.backends.launch.process import Command, ServerProcess

MEETING_PORTS = 10
"""Ports of ``dist_init_addr``: SGLang listens on the following ports, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInfo:
    """Machine and GPUs of an actor, by Ray's choice."""

    node_id: str
    address: str
    """Address at which the other nodes reach it."""
    gpus: tuple[str, ...]
    """Assigned GPUs, under the names of ``CUDA_VISIBLE_DEVICES``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedServer:
    """A server, ready to be started."""

    url: str
    gpus: tuple[str, ...] | None
    """GPUs of its ranks on this node; ``None``: unknown."""
    visible_gpus: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedServer:
    """A server whose process runs."""

    pid: int
    """Process id of the root of its tree, on its node."""
    log_path: str


class ServerHost:
    """Runs a server on its node, or a node's part of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._command: Command | None = None
        self._server: ServerProcess | None = None
        self._meeting: tuple[PortLease, ...] = ()
        self._stopped = False

    def describe(self) -> HostInfo:
        """Returns where the actor is."""
        import ray

        context = ray.get_runtime_context()
        return HostInfo(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    def lease_meeting(self, address: str) -> str:
        """Leases the rendezvous port of a server's nodes; returns HOST:PORT."""
        from torchrl_sglang.backends.launch.ports import lease_neighbours

        self._meeting = lease_neighbours(address, MEETING_PORTS)
        return f"{address}:{self._meeting[0].port}"

    def prepare(self, spec: Mapping[str, Any], port: int | None) -> PreparedServer:
        """Checks a server's arguments on this node and leases its ports.

        ``port`` is its earlier port; it gets another port if this port is taken.
        """
        from torchrl_sglang.backends.launch.local import find_gpus
        from torchrl_sglang.backends.launch.ports import is_free_port
        from torchrl_sglang.backends.launch.server_command import make_server_command

        if port is not None and is_free_port(spec["host"], port):
            spec = {**spec, "port": port}
        self._command = make_server_command(**spec)
        gpus, visible = find_gpus(spec)
        return PreparedServer(url=self._command.url, gpus=gpus, visible_gpus=visible)

    def start(self, name: str, start_timeout: float) -> StartedServer:
        """Begins to start the server."""
        from torchrl_sglang.backends.launch.process import ServerProcess

        with self._lock:
            if self._command is None or self._stopped:
                raise RuntimeError(f"The {name} was stopped before it was started.")
            self._server = ServerProcess(
                self._command, name=name, start_timeout=start_timeout
            )
        return StartedServer(pid=self._server.pid, log_path=str(self._server.log_path))

    def wait_ready(self) -> None:
        """Waits until the server answers; raises ServerStartError otherwise."""
        if self._server is not None:
            self._server.wait_ready()

    def wait_end(self) -> str:
        """Waits until the server has ended or was stopped; returns its last lines."""
        wait = threading.Event().wait
        while not (self._stopped or self._has_ended()):
            wait(0.1)
        return self.log_tail()

    def _has_ended(self) -> bool:
        return self._server is not None and self._server.state in ("dead", "stopped")

    def log_tail(self, lines: int = 30) -> str:
        """Returns the last lines of the server's log."""
        return "" if self._server is None else self._server.log_tail(lines)

    def stop(self) -> None:
        """Stops the server, and releases unused reservations."""
        with self._lock:
            self._stopped = True
        if self._server is not None:
            self._server.stop()
        if self._command is not None:
            self._command.release()
        for lease in self._meeting:
            lease.release()
