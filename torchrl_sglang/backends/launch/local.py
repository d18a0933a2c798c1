"""The launcher of servers on this machine: each runs as a process tree."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import Any

from yarl import URL

from torchrl_sglang.backends.fleet.replica import Location, ServerHandle, stop_all
from torchrl_sglang.backends.launch.gpus import (
    VISIBLE_DEVICES,
    assign_devices,
    default_device,
    devices_per_server,
    free_devices,
    visible_devices,
)
from torchrl_sglang.backends.launch.launcher import (
    Launcher,
    ParallelStart,
    start_servers,
)
from torchrl_sglang.backends.launch.local_directory import LocalDirectory
from torchrl_sglang.backends.launch.paths import absolute_paths
from torchrl_sglang.backends.launch.ports import wait_for_port
from torchrl_sglang.backends.launch.process import (
    START_TIMEOUT_SECONDS,
    Command,
    ServerProcess,
    stop_unreachable,
)
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.backends.launch.vllm_arguments import translate_vllm_names
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count, check_seconds
from torchrl_sglang.support.urls import LOOPBACK
from torchrl_sglang.types import WeightLoader

CORES_PER_START = 2
"""Processes of a starting server, busy with imports."""

COUNTED = ("random_seed", "seed", "port", "nccl_port", "grpc_port")
"""Arguments counted up per server, for different samples."""


class LocalPlacement:
    """Places servers on this machine; the :class:`.Placement` ``"local"``."""

    def bind(
        self,
        num_replicas: int,
        spec: Mapping[str, Any],
        *,
        start_timeout: float,
        parallel: ParallelStart,
        cuda_devices: Sequence[Any] | None,
    ) -> LocalLauncher:
        return LocalLauncher(
            replica_specs(num_replicas, spec, cuda_devices=cuda_devices),
            start_timeout=start_timeout,
            parallel=parallel,
            alike=spec,
            directory=LocalDirectory(),
        )


def make_sglang_server(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    python: str | os.PathLike[str] | None = None,
    start_timeout: float = START_TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
    sglang_version: str | None = None,
    cuda_devices: Sequence[Any] | None = None,
    weight_loader: WeightLoader = "sglang",
    **server_args: Any,
) -> ServerProcess:
    """Starts an SGLang server and waits until it is ready.

    The server listens on loopback, unless ``host`` is given; other hosts need an
    ``api_key``, which no other user of this machine sees.

    For a model on several machines, call this on each of them at about the same time,
    with the same ``nnodes`` and ``dist_init_addr`` (``"HOST:PORT"`` of the first) and
    its own ``node_rank``. Each call returns when all machines have loaded. Send
    requests to the ``url`` of rank 0; the other ranks answer only ``/health``.

    Args:
        model: path or hub name of the model.
        device: ``"cuda"`` or ``"cpu"``; by default ``"cuda"`` if there is a GPU.
        python: interpreter with sglang. Defaults to this interpreter on CUDA, and on
            CPU to the environment of ``python -m torchrl_sglang.cli.cpu.install``.
        start_timeout: timeout for the start, in seconds.
        environment: variables to add to the server's environment, or to override. Rank
            variables of the trainer's launcher (torchrun, accelerate, DeepSpeed, Slurm,
            MPI, Ray) are not inherited; see ``LAUNCHER_VARIABLES`` in
            ``backends/launch/environment.py``.
        sglang_version: on CPU, the installed version to run.
        cuda_devices: the only visible GPUs of the server, such as ``[2, 3]``. By
            default it sees this process's visible GPUs, and takes the first.
        weight_loader: ``"traced"`` loads weight updates by copies traced once in the
            model's own loader; see :meth:`.AsyncSGLang.from_pretrained`. Defaults to
            ``"sglang"``.
        **server_args: arguments of SGLang's server under its own names, such as
            ``tp_size`` and ``mem_fraction_static``, or under vLLM's. Unknown names are
            refused.

    Returns:
        The running server, a :class:`.ServerHandle`. It ends with ``stop()``, with this
        process, or with the last reference to it.

    Raises:
        ConfigurationError: if an argument is wrong or no engine is installed.
        ServerStartError: if the server ends or is not ready within the timeout.

    Examples:
        >>> server = make_sglang_server(tiny_model_path, device="cpu")
        >>> server.state
        'ready'
        >>> server.stop()
    """
    spec = {
        "model": model,
        "device": device,
        "python": python,
        "environment": environment,
        "sglang_version": sglang_version,
        "cuda_devices": cuda_devices,
        "weight_loader": weight_loader,
        **server_args,
    }
    launcher = LocalLauncher([spec], start_timeout=start_timeout)
    server: ServerProcess
    (server,) = start_servers(launcher)  # type: ignore[assignment]
    return server


class LocalLauncher(Launcher):
    """Starts servers as processes on this machine; see :class:`.Launcher`.

    ``specs`` has the arguments of :func:`make_sglang_server` for each server. They
    start all at once (``parallel=True``), one after the other (``False``), or one per
    few cores (``"staggered"``); by default all at once on GPUs, and staggered on CPU.
    ``alike`` are the arguments of added servers.
    """

    def __init__(
        self,
        specs: Sequence[Mapping[str, Any]],
        *,
        start_timeout: float = START_TIMEOUT_SECONDS,
        parallel: ParallelStart = None,
        alike: Mapping[str, Any] | None = None,
        directory: LocalDirectory | None = None,
    ) -> None:
        # Unreachable servers keep their GPUs until Python collects them.
        stop_unreachable()
        self._start_timeout = check_seconds("start_timeout", start_timeout)
        if parallel not in (None, True, False, "staggered"):
            raise ConfigurationError(
                f"parallel={parallel!r} is none of True, False and 'staggered'."
            )
        self.num_servers = len(specs)
        self.at_once = starts_at_once(
            parallel,
            count=len(specs),
            cores=len(os.sched_getaffinity(0)),
            on_cpu=not all(_is_on_gpu(spec) for spec in specs),
        )
        self.api_key = next((spec.get("api_key") for spec in specs), None)
        # Copies of the engine may be in other folders.
        self._alike = None if alike is None else absolute_paths(alike)
        self.directory = self._directory = directory
        self._specs: dict[int, dict[str, Any]] = {}
        self._commands: dict[int, Command] = {}
        self._adding = RLock()
        for rank, spec in enumerate(specs):
            try:
                self._reserve(rank, spec)
            except ConfigurationError as error:
                self.stop([])
                if len(specs) > 1:
                    error.add_note(f"It is server {rank + 1} of {len(specs)}.")
                raise

    def _reserve(self, rank: int, given: Mapping[str, Any]) -> None:
        """Checks the arguments of a server, and reserves its ports."""
        spec = absolute_paths(given)
        self._commands[rank] = command = make_server_command(**spec)
        # A restart keeps the address.
        self._specs[rank] = {**spec, "port": URL(command.url).port}

    def add(self, count: int, *, cuda_devices: Sequence[Any] | None = None) -> range:
        """Makes places for more servers; by default on GPUs without a server."""
        if self._alike is None:
            return super().add(count, cuda_devices=cuda_devices)
        with self._adding:
            gpus_in_use = {
                gpu
                for rank in self._specs
                for gpu in self.where(rank).visible_gpus or ()
            }
            available = visible_devices()
            if cuda_devices is None:
                available = tuple(free_devices(available, gpus_in_use))
            specs = replica_specs(
                count,
                self._alike,
                cuda_devices=cuda_devices,
                available=available,
                first=self.num_servers,
                running=len(self._specs),
            )
            ranks = range(self.num_servers, self.num_servers + count)
            try:
                for rank, spec in zip(ranks, specs, strict=True):
                    self._reserve(rank, spec)
            except BaseException:
                for rank in ranks:
                    self.remove(rank)
                raise
            self.num_servers += count
        return ranks

    def remove(self, rank: int) -> None:
        """Releases the GPUs of a stopped server, and the ports of an unused command."""
        with self._adding:
            self._specs.pop(rank, None)
        if (command := self._commands.pop(rank, None)) is not None:
            command.release()

    def start(self, rank: int) -> ServerProcess:
        return self._run(rank, self._commands.pop(rank))

    def restart(self, rank: int) -> ServerProcess:
        """Begins to restart an ended server, at the same address."""
        spec = self._specs[rank]
        # The command refuses a port in use.
        wait_for_port(spec.get("host") or LOOPBACK, spec["port"], timeout=15.0)
        return self._run(rank, make_server_command(**spec))

    def _run(self, rank: int, command: Command) -> ServerProcess:
        number = f" {rank + 1} of {self.num_servers}" if self.num_servers > 1 else ""
        return ServerProcess(
            command, name=f"SGLang server{number}", start_timeout=self._start_timeout
        )

    def stop(self, servers: Iterable[ServerHandle]) -> None:
        try:
            stop_all(servers)
        finally:
            while self._commands:
                self._commands.popitem()[1].release()
            if self._directory is not None:
                self._directory.end()

    def where(self, rank: int) -> Location:
        gpus, visible = find_gpus(self._specs[rank])
        return Location(host=socket.gethostname(), gpus=gpus, visible_gpus=visible)


def starts_at_once(
    parallel: ParallelStart, *, count: int, cores: int, on_cpu: bool
) -> int:
    """Returns the number of concurrent starts."""
    if parallel is None:
        parallel = "staggered" if on_cpu else True
    if parallel == "staggered":
        return max(1, min(count, cores // CORES_PER_START))
    return max(1, count) if parallel else 1


def replica_specs(
    num_replicas: int,
    spec: Mapping[str, Any],
    *,
    cuda_devices: Sequence[Any] | None = None,
    available: Sequence[str] | None = None,
    first: int = 0,
    running: int = 0,
) -> list[dict[str, Any]]:
    """Returns the arguments of each of several servers, with their own GPUs and seeds.

    ``available`` are the free GPUs; default: the GPUs of this process. Servers added
    to ``running`` others have ranks from ``first`` on.
    """
    arguments = known_arguments(spec)
    specs = counted_specs(num_replicas, spec, first=first)
    if num_replicas + running > 1:
        _check_replicable(arguments)
        # Servers with all cores of a CPU each slow each other down.
        cores = len(os.sched_getaffinity(0))
        threads = max(cores // (running + num_replicas), 1)
        limit = {"OMP_NUM_THREADS": str(threads)}
        for server_spec in specs:
            server_spec["environment"] = {**limit, **(spec.get("environment") or {})}
    if _is_on_gpu(spec) and arguments.get("base_gpu_id") is None:
        groups = assign_devices(
            num_replicas,
            devices_per_server(arguments),
            cuda_devices=cuda_devices,
            available=visible_devices() if available is None else available,
        )
        for server_spec, group in zip(specs, groups, strict=True):
            server_spec["cuda_devices"] = group
    elif cuda_devices is not None:
        raise ConfigurationError(
            f"cuda_devices={cuda_devices!r} is for device='cuda' without base_gpu_id; "
            f"leave it out."
        )
    return specs


def counted_specs(
    num_replicas: int, spec: Mapping[str, Any], *, first: int = 0
) -> list[dict[str, Any]]:
    """Returns the arguments of servers with their own seeds, by rank from ``first``."""
    specs = [dict(spec) for _ in range(check_count("num_replicas", num_replicas))]
    for index, server_spec in enumerate(specs, first):
        for name in COUNTED:
            if index and server_spec.get(name) is not None:
                server_spec[name] = int(server_spec[name]) + index
    return specs


def find_gpus(
    spec: Mapping[str, Any], *, available: Sequence[str] | None = None
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Returns the GPUs of a server's ranks, and its visible GPUs; None: unknown."""
    if not _is_on_gpu(spec):
        return (), ()
    arguments = known_arguments(spec)
    if VISIBLE_DEVICES in (arguments.get("environment") or {}):
        return None, None
    visible = tuple(arguments.get("cuda_devices") or available or visible_devices())
    first = int(arguments.get("base_gpu_id") or 0)
    step = int(arguments.get("gpu_id_step") or 1)
    places = [first + step * i for i in range(devices_per_server(arguments))]
    if int(arguments.get("nnodes") or 1) > 1 or max(places) >= len(visible):
        return None, visible
    return tuple(visible[place] for place in places), visible


def known_arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a server's arguments under SGLang's names."""
    return translate_vllm_names({n: v for n, v in spec.items() if n != "model"})


def _is_on_gpu(spec: Mapping[str, Any]) -> bool:
    return (spec.get("device") or default_device()) == "cuda"


def _check_replicable(known: Mapping[str, Any]) -> None:
    for name in ("base_gpu_id", "gpu_id_step", "nnodes", "node_rank"):
        if known.get(name) is not None:
            raise ConfigurationError(
                f"{name}={known[name]!r} is for one server, and there are several; "
                f"leave it out, or start each with make_sglang_server."
            )
