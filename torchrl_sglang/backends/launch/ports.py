"""Port numbers that a server will listen on, held from the choice until its end.

A server binds its ports seconds after they were chosen. In between, nothing on the
network shows that they are spoken for; a lease does, to every process of this package
on the machine. It is a socket with a name in Linux's abstract namespace, which, like a
TCP port, belongs to the network namespace and goes away with its owner, however that
ends.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.errors import ConfigurationError

__all__ = ["PORTS", "PortLease", "find_free_port", "lease_port", "ports_to_hold"]

PORTS = range(20_000, 32_000)
"""Where a server's port is looked for.

It lies outside the range that Linux takes for outgoing connections, one of which could
otherwise take it while the server loads.
"""

ATTEMPTS = 1000
"""How many numbers are tried: some tens are taken on a machine, of 12,000."""

DP_PORT_OFFSETS = range(233, 241)
"""Data-parallel attention listens at these distances above the server's HTTP port."""


class PortLease:
    """A port number that no other process of this package takes meanwhile.

    Args:
        port: the number.

    Raises:
        OSError: if it is leased already.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        # Not inherited by what this process starts, which would hold it longer.
        self._holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._holder.bind(f"\0torchrl_sglang.port.{port}")
        except OSError:
            self._holder.close()
            raise

    def release(self) -> None:
        """Lets others take the number. Safe to call twice."""
        self._holder.close()

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"PortLease({self.port})"


def lease_port(
    host: str = "127.0.0.1",
    port: object = None,
    *,
    name: str = "port",
    among: Sequence[int] = PORTS,
) -> PortLease:
    """Returns a lease of a port that nothing listens on.

    Args:
        host: address that the server will listen on.
        port: the number that the user wants; by default, one is found.
        name: what messages call it.
        among: the numbers of which one is found.

    Raises:
        ConfigurationError: if the port is taken, or is no port.
    """
    if port is not None:
        try:
            number = int(str(port))
            lease = PortLease(number) if _is_free(host, number) else None
        except (OSError, ValueError):
            lease = None
        if lease is None:
            raise ConfigurationError(
                f"{name}={port!r} is not a free port of {host!r}: another process, "
                f"perhaps a server that was left running, has it. Give another one, or "
                f"none."
            )
        return lease
    for _ in range(ATTEMPTS):
        # The system's randomness: seeded trainers would all try the same ports.
        number = among[secrets.randbelow(len(among))]
        try:
            lease = PortLease(number)
        except OSError:
            continue
        # Some sockets of a server listen on every address, whatever its host is.
        if _is_free(host, number) and _is_free("0.0.0.0", number):
            return lease
        lease.release()
    raise ConfigurationError(f"No port from {among} is free on {host!r}.")


def find_free_port(host: str = "127.0.0.1", *, among: Sequence[int] = PORTS) -> int:
    """Returns a port that nothing listens on and that no server here will.

    Nothing holds it afterwards; what listens for long takes :func:`lease_port`.
    """
    lease = lease_port(host, among=among)
    lease.release()
    return lease.port


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
    """Returns the ports that a server opens beside its HTTP port. Pure.

    ``None`` stands for a number that is to be found and given to the server.

    Args:
        arguments: the server's, under SGLang's names, with its port.
        environment: the server's.
    """
    held: dict[str, int | None] = {}
    if arguments.get("dist_init_addr") is None:
        # Left alone, SGLang draws one, and so may another server at the same time.
        held["nccl_port"] = arguments.get("nccl_port")
    seeded = "remote_instance_weight_loader_start_seed_via_transfer_engine"
    if arguments.get(seeded):
        held["engine_info_bootstrap_port"] = arguments.get("engine_info_bootstrap_port")
    if arguments.get("grpc_port") is not None:
        held["grpc_port"] = arguments["grpc_port"]
    elif environment.get("SGLANG_GRPC_PORT", "").isdigit():
        held["SGLANG_GRPC_PORT"] = int(environment["SGLANG_GRPC_PORT"])
    elif environment.get("SGLANG_ENABLE_GRPC", "").lower() in ("1", "true"):
        held["SGLANG_ENABLE_GRPC"] = int(arguments["port"]) + 10_000
    wide = [arguments.get(name) or 1 for name in ("dp_size", "attn_dp_size")]
    if arguments.get("enable_dp_attention") or max(int(size) for size in wide) > 1:
        for offset in DP_PORT_OFFSETS:
            held[f"port + {offset}"] = int(arguments["port"]) + offset
    return held
