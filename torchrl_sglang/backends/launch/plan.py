"""From what a user asks for to what is to be run: every decision before a start.

A plan is made for every server of a group before the first one is started, so that a
wrong argument, a taken port or a GPU that is not there costs nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.gpus import (
    assign_devices,
    device_environment,
    devices_per_server,
    visible_devices,
)
from torchrl_sglang.backends.launch.ports import PortLease, lease_port, ports_to_hold
from torchrl_sglang.backends.launch.server_command import (
    check_names,
    inert_arguments,
    to_flags,
    translate_vllm_names,
)
from torchrl_sglang.backends.launch.server_flags import find_flags
from torchrl_sglang.backends.support.urls import is_loopback, url_of
from torchrl_sglang.errors import ConfigurationError

__all__ = ["ServerPlan", "default_device", "plan_server"]

SERVER_ENVIRONMENT = {
    # Otherwise /health generates a token, which takes a second, and fails while
    # generation is paused.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Log-probs of sampled tokens are those before the temperature, as the trained model
    # computes them; the engine scores whole responses where they are not.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # The last lines of a server that is killed are the ones worth reading.
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every server, whatever it runs on."""

SECRETS = ("api_key", "admin_api_key")
"""Arguments that nobody else may see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPlan:
    """All that a server's start takes."""

    command: tuple[str, ...]
    """Its command line, without secrets."""
    environment: Mapping[str, str] = field(repr=False)
    """Its whole environment."""
    url: str
    """Where it will answer."""
    device: str
    """``"cuda"`` or ``"cpu"``."""
    cuda_devices: tuple[str, ...] = ()
    """The GPUs that it is confined to; none for all that the trainer sees."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Arguments that must stay off the command line."""
    leases: tuple[PortLease, ...] = ()
    """Its ports."""

    def release(self) -> None:
        """Gives the ports of a plan back that is not carried out."""
        for lease in self.leases:
            lease.release()


def default_device() -> str:
    """Returns ``"cuda"`` where there is a GPU, and ``"cpu"`` elsewhere."""
    import torch

    # Unlike is_available, this does not initialise CUDA, so the trainer can fork.
    return "cuda" if torch.cuda.device_count() else "cpu"


def plan_server(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    python: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    sglang_version: str | None = None,
    cuda_devices: Sequence[Any] | None = None,
    **server_args: Any,
) -> ServerPlan:
    """Decides how a server is to be started; see :func:`make_sglang_server`.

    Raises:
        ConfigurationError: if an argument is wrong or no engine is installed.
    """
    arguments = translate_vllm_names(server_args)
    for name, reason in inert_arguments(server_args).items():
        torchrl_logger.info(f"{name}={server_args[name]!r} changes nothing: {reason}")
    path = arguments.pop("model_path", None)
    if path is not None:
        raise ConfigurationError(
            f"The model is given twice, as {model!r} and as {path!r}; give one."
        )
    device = default_device() if device is None else device
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f"device={device!r} is not one that a server can be started on; give "
            f"'cuda' or 'cpu'."
        )
    check_names(arguments, None)
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
    groups = _device_groups(device, cuda_devices, arguments)
    if device == "cpu":
        takes_lora = arguments.get("enable_lora") or arguments.get("lora_paths")
        extra = cpu.lora_server_args() if takes_lora else {}
        arguments = {**cpu.default_server_args(), **extra, **arguments}
        command = cpu.launch_command(sglang_version, python)
        own = cpu.engine_environment(sglang_version, python)
    else:
        interpreter = str(python) if python is not None else sys.executable
        command = [interpreter, "-m", "sglang.launch_server"]
        arguments = {"device": device, **arguments}
        own = device_environment(groups, os.environ)
    own_python = command[0] != sys.executable
    variables = {
        **_loopback_environment(host, arguments),
        **inherited_environment(os.environ, own_python=own_python),
        **SERVER_ENVIRONMENT,
        **own,
        **(environment or {}),
    }
    flags = find_flags(command[0], variables)
    check_names({**arguments, **secrets}, flags)
    with ExitStack() as undo:
        leases = _lease(host, arguments, variables, undo)
        line = to_flags({"model_path": os.fspath(model), **arguments}, flags)
        undo.pop_all()
    return ServerPlan(
        command=(*command, *line),
        environment=variables,
        url=url_of(host, arguments["port"]),
        device=device,
        cuda_devices=groups,
        secrets=secrets,
        leases=leases,
    )


def _loopback_environment(host: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns variables that keep a server's own groups off the network."""
    if not is_loopback(host) or int(arguments.get("nnodes") or 1) > 1:
        return {}
    # Otherwise gloo listens on the address that the machine's name stands for.
    return {"GLOO_SOCKET_IFNAME": "lo"}


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
    secrets = {}
    for name in SECRETS:
        value = arguments.pop(name, None)
        if value is None:
            continue
        # It is sent as an HTTP header, and given to the server as a flag.
        if (
            not isinstance(value, str)
            or not value
            or not all("!" <= character <= "~" for character in value)
            or value.startswith("-")
        ):
            raise ConfigurationError(
                f"{name} is not a key; give a string of printable ASCII characters "
                f"without spaces, which does not begin with '-'."
            )
        secrets[name] = value
    return secrets


def _device_groups(
    device: str, cuda_devices: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    if cuda_devices is None:
        return ()
    if device == "cpu":
        raise ConfigurationError(
            f"cuda_devices={list(cuda_devices)!r} is for device='cuda'; leave it out."
        )
    for name in ("base_gpu_id", "gpu_id_step"):
        if arguments.get(name) is not None:
            raise ConfigurationError(
                f"{name} and cuda_devices both say which GPUs to take; give one."
            )
    return assign_devices(
        1,
        tp_size=devices_per_server(arguments),
        cuda_devices=cuda_devices,
        available=visible_devices(),
    )[0]


def _lease(
    host: str,
    arguments: dict[str, Any],
    environment: Mapping[str, str],
    undo: ExitStack,
) -> tuple[PortLease, ...]:
    """Holds every port of a server, and puts those found into its arguments."""

    def hold(name: str, port: object) -> PortLease:
        lease = lease_port(host, port, name=name)
        undo.callback(lease.release)
        return lease

    leases = [hold("port", arguments.get("port"))]
    arguments["port"] = leases[0].port
    for name, port in ports_to_hold(arguments, environment).items():
        leases.append(hold(name, port))
        if port is None:
            arguments[name] = leases[-1].port
    return tuple(leases)


def _check_local_model(model: str | os.PathLike[str]) -> None:
    # A hub name is "owner/name"; anything that looks like a path must exist.
    text = os.fspath(model)
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_local and not Path(text).is_dir():
        raise ConfigurationError(
            f"There is no model folder {text!r}; give the path of a folder with "
            f"config.json, or a hub name like 'Qwen/Qwen2.5-0.5B'."
        )
