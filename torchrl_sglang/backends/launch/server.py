"""Starting SGLang servers: one, or several that belong together.

``plan.py`` decides what is to be run, ``process.py`` holds what runs; here is the
order of events in between.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.fleet.replica import stop_all
from torchrl_sglang.backends.launch.plan import ServerPlan, plan_server
from torchrl_sglang.backends.launch.ports import PORTS, find_free_port
from torchrl_sglang.backends.launch.process import (
    READY_POLL_SECONDS,
    START_TIMEOUT_SECONDS,
    ServerProcess,
)
from torchrl_sglang.backends.support.checks import check_seconds
from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "PORTS",
    "START_TIMEOUT_SECONDS",
    "ServerProcess",
    "find_free_port",
    "make_sglang_server",
    "start_servers",
]

CORES_PER_START = 2
"""A starting server keeps its launcher and its scheduler busy with imports."""

STILL_STARTING_SECONDS = 30.0
"""How often a long start says that it goes on."""


def make_sglang_server(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    python: str | os.PathLike[str] | None = None,
    start_timeout: float = START_TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
    sglang_version: str | None = None,
    cuda_devices: Sequence[Any] | None = None,
    **server_args: Any,
) -> ServerProcess:
    """Starts one SGLang server and waits until it is ready.

    It listens on this machine alone, unless ``host`` says otherwise; then it must be
    given an ``api_key``, which no other user of this machine sees.

    A model that spans several machines is one server with a process tree on each. Call
    this on every one of them, at about the same time, with the same ``nnodes`` and
    ``dist_init_addr`` (``"HOST:PORT"`` of the first) and with its own ``node_rank``.
    Each call returns when all of them have loaded. Requests go to the ``url`` of rank
    0; that of another rank answers to ``/health`` alone, and is there to be stopped.

    Args:
        model: path or hub name of the model.
        device: ``"cuda"`` or ``"cpu"``; by default ``"cuda"`` where there is one.
        python: interpreter that has sglang installed. By default this one on CUDA, and
            on CPU that of the environment which
            ``python -m torchrl_sglang.backends.launch.cpu.install`` made.
        start_timeout: budget for the start, in seconds.
        environment: variables to add to the server's environment, or to have instead of
            the trainer's. What a launcher of ranks (torchrun, accelerate, DeepSpeed,
            Slurm, MPI, Ray) set in the trainer's is not inherited; see
            :data:`~torchrl_sglang.backends.launch.environment.LAUNCHER_VARIABLES`.
        sglang_version: on CPU, which of the installed versions to run.
        cuda_devices: the GPUs to confine the server to, such as ``[2, 3]``; see
            :func:`.gpus.assign_devices`. By default it sees
            what this process sees, and takes the first ones.
        **server_args: arguments of SGLang's server under its own names, such as
            ``tp_size``, ``mem_fraction_static`` and ``context_length``, or under
            vLLM's names. An unknown name is refused before anything is started.

    Returns:
        The running server. It ends with :meth:`ServerProcess.stop`, with this
        process, or with the last reference to it.

    Raises:
        ConfigurationError: if an argument is wrong or no engine is installed.
        ServerStartError: if the server ends or is not ready within the budget.

    Examples:
        >>> server = make_sglang_server(tiny_model_path, device="cpu")
        >>> server.state
        'ready'
        >>> server.stop()
    """
    check_seconds("start_timeout", start_timeout)
    plan = plan_server(
        model,
        device=device,
        python=python,
        environment=environment,
        sglang_version=sglang_version,
        cuda_devices=cuda_devices,
        **server_args,
    )
    server = begin_start(plan, start_timeout)
    server.wait_ready()
    return server


def start_servers(
    specs: Sequence[Mapping[str, Any]],
    *,
    parallel: bool | Literal["staggered"] | None = None,
    start_timeout: float = START_TIMEOUT_SECONDS,
    progress: Callable[[str], None] | None = None,
) -> list[ServerProcess]:
    """Starts several servers: all of them, or none.

    Args:
        specs: for each server, the keyword arguments of :func:`make_sglang_server`
            with ``model`` and without ``start_timeout``.
        parallel: ``True`` to start all at once, ``False`` to start one when the one
            before is ready, ``"staggered"`` for as many at a time as this machine has
            cores for. By default all at once on GPUs, and staggered on CPU.
        start_timeout: budget for the start of each, in seconds.
        progress: takes one line for everything that happens. By default TorchRL's
            logger, at level INFO.

    Returns:
        The servers, ready, in the order of ``specs``.

    Raises:
        ConfigurationError: if an argument of any of them is wrong; none was started.
        ServerStartError: if one of them could not be started, with its number and the
            end of its log; the others have been stopped.

    Examples:
        >>> spec = {"model": tiny_model_path, "device": "cpu"}
        >>> servers = start_servers([spec, spec], progress=lambda line: None)
        >>> [server.state for server in servers]
        ['ready', 'ready']
        >>> for server in servers:
        ...     server.stop()
    """
    check_seconds("start_timeout", start_timeout)
    if not (parallel is None or isinstance(parallel, bool) or parallel == "staggered"):
        raise ConfigurationError(
            f"parallel={parallel!r} is none of True, False and 'staggered'."
        )
    tell = torchrl_logger.info if progress is None else progress
    plans = _plan_all(specs)
    at_once = starts_at_once(
        parallel,
        count=len(plans),
        cores=len(os.sched_getaffinity(0)),
        on_cpu=any(plan.device == "cpu" for plan in plans),
    )
    servers: list[ServerProcess] = []
    try:
        _start_all(plans, servers, at_once, start_timeout, tell)
    except BaseException:
        stop_all(servers)
        raise
    finally:
        for plan in plans[len(servers) :]:
            plan.release()
    return servers


def starts_at_once(
    parallel: bool | Literal["staggered"] | None,
    *,
    count: int,
    cores: int,
    on_cpu: bool,
) -> int:
    """Returns how many servers may be starting at the same time. Pure.

    Examples:
        >>> starts_at_once(None, count=4, cores=2, on_cpu=True)
        1
        >>> starts_at_once(None, count=4, cores=2, on_cpu=False)
        4
    """
    if parallel is None:
        parallel = "staggered" if on_cpu else True
    if parallel == "staggered":
        return max(1, min(count, cores // CORES_PER_START))
    return max(1, count) if parallel else 1


def _plan_all(specs: Sequence[Mapping[str, Any]]) -> list[ServerPlan]:
    plans: list[ServerPlan] = []
    try:
        for number, spec in enumerate(specs, 1):
            try:
                plans.append(plan_server(**spec))
            except ConfigurationError as error:
                note = f"It is server {number} of {len(specs)}."
                raise error.replace(note=note) from error.__cause__
    except BaseException:
        for plan in plans:
            plan.release()
        raise
    return plans


def begin_start(
    plan: ServerPlan, start_timeout: float, name: str = "SGLang server"
) -> ServerProcess:
    """Begins to start a server; does not wait until it is ready."""
    return ServerProcess(
        plan.command,
        url=plan.url,
        environment=plan.environment,
        name=name,
        # SGLang writes its arguments, keys included, to its log.
        hidden=tuple(plan.secrets.values()),
        config=plan.secrets,
        leases=plan.leases,
        start_timeout=start_timeout,
    )


def _start_all(
    plans: Sequence[ServerPlan],
    servers: list[ServerProcess],
    at_once: int,
    start_timeout: float,
    tell: Callable[[str], None],
) -> None:
    """Carries out the plans, and adds each server to ``servers`` as it is started."""
    waiting = collections.deque(enumerate(plans, 1))
    starting: list[ServerProcess] = []
    last_told = time.monotonic()
    while waiting or starting:
        while waiting and len(starting) < at_once:
            number, plan = waiting.popleft()
            name = f"SGLang server {number} of {len(plans)}"
            server = begin_start(plan, start_timeout, name)
            servers.append(server)
            starting.append(server)
            gpus = f" on GPU {','.join(plan.cuda_devices)}" if plan.cuda_devices else ""
            tell(f"{server.name} is starting at {server.url}{gpus}.")
        for server in list(starting):
            if server.check_ready():
                starting.remove(server)
                tell(f"{server.name} is ready after {server.age:.0f} s.")
        if starting and time.monotonic() - last_told > STILL_STARTING_SECONDS:
            last_told = time.monotonic()
            for server in starting:
                tell(
                    f"{server.name} is still starting after {server.age:.0f} s: "
                    f"{server.log_tail(1)}"
                )
        if starting:
            time.sleep(READY_POLL_SECONDS)
