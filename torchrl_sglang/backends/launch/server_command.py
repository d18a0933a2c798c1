"""The command, environment and ports of a server: every decision before its start.

The commands of all servers of an engine are made before the first one starts, so that a
wrong argument, a port in use or a missing GPU is found before anything runs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.gpus import (
    assign_devices,
    device_environment,
    devices_per_server,
)
from torchrl_sglang.backends.launch.ports import PortLease, lease_port, ports_to_hold
from torchrl_sglang.backends.launch.process import Command
from torchrl_sglang.backends.launch.server_flags import (
    check_names,
    find_flags,
    to_flags,
)
from torchrl_sglang.backends.launch.vllm_arguments import INERT, translate_vllm_names
from torchrl_sglang.backends.support.gpus import default_device, visible_devices
from torchrl_sglang.backends.support.urls import is_loopback, url_of
from torchrl_sglang.errors import ConfigurationError

__all__ = ["make_server_command"]

SERVER_ENVIRONMENT = {
    # Otherwise /health generates a token, which takes a second and fails while
    # generation is paused.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Log-probs of sampled tokens before the temperature, as the trained model computes
    # them. Where a server still returns others, the engine scores whole responses.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # The last lines of a killed server are the ones worth reading.
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every server."""

SECRETS = ("api_key", "admin_api_key")
"""Arguments that other users of the machine must not see."""


def make_server_command(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    python: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    sglang_version: str | None = None,
    cuda_devices: Sequence[Any] | None = None,
    **server_args: Any,
) -> Command:
    """Checks a server's arguments and leases its ports; see make_sglang_server()."""
    for name in INERT.keys() & server_args.keys():
        why = INERT[name]
        torchrl_logger.info(f"{name}={server_args[name]!r} changes nothing: {why}")
    arguments = translate_vllm_names({"model": model, **server_args})
    device = default_device() if device is None else device
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f"device={device!r} is not one that a server can be started on; give "
            f"'cuda' or 'cpu'."
        )
    _check_local_model(model)
    _check_nodes(arguments)
    secrets = _take_secrets(arguments)
    # A line for each request would fill the disk in days.
    arguments.setdefault("log_level_http", "warning")
    host = str(arguments.setdefault("host", "127.0.0.1"))
    if not is_loopback(host) and "api_key" not in secrets:
        raise ConfigurationError(
            f"host={host!r} lets other machines reach the server, whose requests can "
            f"replace its weights; give it an api_key=..., or leave host out."
        )
    gpus = _confine_to_gpus(device, cuda_devices, arguments)
    if device == "cpu":
        program = cpu.launch_command(sglang_version, python)
        arguments = {**cpu.default_server_args(), **arguments}
        own = cpu.engine_environment(sglang_version, python)
    else:
        interpreter = str(python) if python is not None else sys.executable
        program = [interpreter, "-m", "sglang.launch_server"]
        arguments = {"device": device, **arguments}
        own = device_environment(gpus, os.environ)
    variables = inherited_environment(
        os.environ, own_python=program[0] != sys.executable
    )
    if is_loopback(host) and int(arguments.get("nnodes") or 1) == 1:
        # Otherwise gloo listens on the address that the machine's name resolves to.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    variables |= SERVER_ENVIRONMENT | own | dict(environment or {})
    flags = find_flags(program[0], variables)
    check_names({**arguments, **secrets}, flags)
    with ExitStack() as undo:
        leases = _lease_ports(host, arguments, variables, undo)
        line = to_flags(arguments, flags)
        undo.pop_all()
    return Command(
        line=(*program, *line),
        environment=variables,
        url=url_of(host, arguments["port"]),
        config=secrets,
        # SGLang writes its arguments, keys included, to its log.
        hidden=tuple(secrets.values()),
        leases=leases,
    )


def _check_local_model(model: str | os.PathLike[str]) -> None:
    # A hub name is "owner/name"; anything that looks like a path must exist.
    text = os.fspath(model)
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_local and not Path(text).is_dir():
        raise ConfigurationError(
            f"There is no model folder {text!r}; give the path of a folder with "
            f"config.json, or a hub name like 'Qwen/Qwen2.5-0.5B'."
        )


def _check_nodes(arguments: Mapping[str, Any]) -> None:
    nodes = int(arguments.get("nnodes") or 1)
    rank = int(arguments.get("node_rank") or 0)
    if not 0 <= rank < nodes:
        raise ConfigurationError(
            f"node_rank={rank} is not one of nnodes={nodes}; they count from 0."
        )
    if nodes > 1 and not arguments.get("dist_init_addr"):
        raise ConfigurationError(
            f"nnodes={nodes} needs dist_init_addr='HOST:PORT', the same for every "
            f"node: an address of the node with node_rank=0, where they meet."
        )


def _take_secrets(arguments: dict[str, Any]) -> dict[str, str]:
    secrets = {name: arguments.pop(name, None) for name in SECRETS}
    secrets = {name: value for name, value in secrets.items() if value is not None}
    for name, value in secrets.items():
        # It is sent as an HTTP header, and given to the server as a flag.
        if not isinstance(value, str) or not re.fullmatch(r"(?!-)[!-~]+", value):
            raise ConfigurationError(
                f"{name} is not a key; give a string of printable ASCII characters "
                f"without spaces, which does not begin with '-'."
            )
    return secrets


def _confine_to_gpus(
    device: str, cuda_devices: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the only GPUs that a server may see; none: all that the trainer sees."""
    if cuda_devices is None:
        return ()
    others = ("base_gpu_id", "gpu_id_step")
    if device == "cpu" or any(arguments.get(name) is not None for name in others):
        raise ConfigurationError(
            f"cuda_devices={list(cuda_devices)!r} is for device='cuda' without "
            f"base_gpu_id and gpu_id_step; leave it out."
        )
    return assign_devices(
        1,
        devices_per_server(arguments),
        cuda_devices=cuda_devices,
        available=visible_devices(),
    )[0]


def _lease_ports(
    host: str,
    arguments: dict[str, Any],
    environment: Mapping[str, str],
    undo: ExitStack,
) -> tuple[PortLease, ...]:
    """Leases every port of a server, and adds those it found to the arguments."""

    def lease(name: str, port: object) -> PortLease:
        found = lease_port(host, port, name=name)
        undo.callback(found.release)
        if port is None or name == "port":
            arguments[name] = found.port
        return found

    http = lease("port", arguments.get("port"))
    held = ports_to_hold(arguments, environment)
    return (http, *(lease(name, port) for name, port in held.items()))
