"""Port leases of servers, from the choice of a number to the end of the server.

A server binds its ports seconds after their choice. A lease marks a port as taken for
every process of this package on the machine. It is a socket with a name in Linux's
abstract namespace, which, like a TCP port, belongs to the network namespace and
disappears with its owner.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_port

PORTS = range(20_000, 32_000)
"""Range of ports for servers, below Linux's ephemeral ports."""

ATTEMPTS = 1000
"""Number of random ports to try."""

DP_PORT_OFFSETS = range(233, 241)
"""Offsets from the HTTP port of the ports for data-parallel attention."""


class PortLease:
    """Reserves a port among the processes of this package; OSError: it is leased."""

    def __init__(self, port: int) -> None:
        self.port = port
        # Child processes do not inherit it; they would hold it longer.
        self._holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._holder.bind(f"\0torchrl_sglang.port.{port}")
        except OSError:
            self._holder.close()
            raise

    def release(self) -> None:
        """Ends the lease. Can be called twice."""
        self._holder.close()

    def __del__(self) -> None:
        self.release()


def lease_port(
    host: str = "127.0.0.1",
    port: object = None,
    *,
    name: str = "port",
    among: Sequence[int] = PORTS,
) -> PortLease:
    """Leases the given port, or a free port of ``among``; errors call it ``name``."""
    if port is not None:
        is_text = isinstance(port, str) and port.isdecimal()
        check_port(name, int(str(port)) if is_text else port)
        lease = _try_to_lease(port, [host])
        if lease is None:
            raise ConfigurationError(
                f"{name}={port!r} is not a free port of {host!r}: another process, "
                f"perhaps a server that was left running, has it. Give another one, or "
                f"none."
            )
        return lease
    for _ in range(ATTEMPTS):
        # Not Python's randomness: seeded trainers would all try the same ports.
        number = among[secrets.randbelow(len(among))]
        # Some sockets of a server listen on every address, whatever its host.
        lease = _try_to_lease(number, [host, "0.0.0.0"])
        if lease is not None:
            return lease
    raise ConfigurationError(f"No port from {among} is free on {host!r}.")


def lease_neighbours(host: str, count: int) -> tuple[PortLease, ...]:
    """Leases consecutive free ports."""
    for _ in range(ATTEMPTS):
        first = find_free_port(host)
        ports = range(first, first + count)
        leases = [_try_to_lease(port, [host, "0.0.0.0"]) for port in ports]
        leased = tuple(lease for lease in leases if lease is not None)
        if len(leased) == count:
            return leased
        for lease in leased:
            lease.release()
    raise ConfigurationError(f"No {count} ports in a row are free on {host!r}.")


def _try_to_lease(port: object, hosts: Sequence[str]) -> PortLease | None:
    """Leases a port free on all hosts; None: it is in use."""
    try:
        lease = PortLease(int(str(port)))
    except (OSError, ValueError):
        return None
    if all(_is_free(host, lease.port) for host in hosts):
        return lease
    lease.release()
    return None


def find_free_port(host: str = "127.0.0.1", *, among: Sequence[int] = PORTS) -> int:
    """Returns a free port without a lease, and without a reservation."""
    lease = lease_port(host, among=among)
    lease.release()
    return lease.port


def is_free_port(host: str, port: int) -> bool:
    """Returns whether a port is neither in use nor leased, without a reservation."""
    lease = _try_to_lease(port, [host])
    if lease is not None:
        lease.release()
    return lease is not None


def wait_for_port(host: str, port: int, *, timeout: float) -> bool:
    """Waits up to ``timeout`` for a port; returns whether it is free.

    A killed process holds its ports until the last of its threads has ended, which on a
    busy machine takes seconds.
    """
    deadline = time.monotonic() + timeout
    while not (free := is_free_port(host, port)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return free


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return port > 0


def ports_to_hold(
    arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, int | None]:
    """Returns a server's ports beside its HTTP port; None: any free port."""
    held: dict[str, int | None] = {}
    port = int(arguments["port"])
    if arguments.get("dist_init_addr") is None:
        # By default, SGLang draws a random port, which another server may draw as well.
        held["nccl_port"] = arguments.get("nccl_port")
    if arguments.get("remote_instance_weight_loader_start_seed_via_transfer_engine"):
        held["engine_info_bootstrap_port"] = arguments.get("engine_info_bootstrap_port")
    if arguments.get("grpc_port") is not None:
        held["grpc_port"] = arguments["grpc_port"]
    elif environment.get("SGLANG_GRPC_PORT", "").isdigit():
        held["SGLANG_GRPC_PORT"] = int(environment["SGLANG_GRPC_PORT"])
    elif environment.get("SGLANG_ENABLE_GRPC", "").lower() in ("1", "true"):
        held["SGLANG_ENABLE_GRPC"] = port + 10_000
    sizes = [int(arguments.get(name) or 1) for name in ("dp_size", "attn_dp_size")]
    if arguments.get("enable_dp_attention") or max(sizes) > 1:
        held |= {f"port + {offset}": port + offset for offset in DP_PORT_OFFSETS}
    return held
