"""Forms a process group with servers, and gives it up without waiting for them.

A collective cannot be cancelled, and joining waits for every rank, so both run in
threads that nothing waits for. PyTorch's store takes values from anybody who connects,
so it and gloo listen on the address where ranks meet, not on all of them.

SGLang sets ``NCCL_CUMEM_ENABLE`` in its processes, to 0 unless it was started with
symmetric memory or inherits a value. NCCL maps memory between processes accordingly,
and reads it with the first communicator of a process. Where both sides differ, the
first broadcast fails with "invalid argument"; disabling peer access or shared memory
works around that, at a fiftieth of the link's speed.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import datetime
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.urls import interface_of, is_loopback
from torchrl_sglang.types import ServerArgs

LISTEN_BACKLOG = 512
POLL_SECONDS = 0.05

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

NCCL_CUMEM = "NCCL_CUMEM_ENABLE"

NCCL_SLOW = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
"""Settings that disable the fast path between GPUs."""


def in_thread(
    function: Callable[..., Any], *arguments: Any
) -> concurrent.futures.Future[Any]:
    """Runs a call that may never return in a daemon thread."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - The waiting thread raises it.
            future.set_exception(error)

    threading.Thread(target=run, name="torchrl_sglang-group", daemon=True).start()
    return future


def is_alive(group: Any) -> bool:
    """Returns whether torch.distributed still has a group."""
    return group in distributed_c10d._world.pg_map


def open_store(
    address: str, port: int, world_size: int, timeout: datetime.timedelta
) -> dist.TCPStore:
    """Opens a store that ranks reach at an address; port 0 is any free one."""
    listener = listen_at(address, port)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # The store closes it.
        master_listen_fd=listener.detach(),
    )


def listen_at(address: str, port: int) -> socket.socket:
    """Listens on an address alone, or on all with a warning where it is not local."""
    ((family, _, _, _, place), *_) = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM
    )
    if is_loopback(address) or not is_loopback(str(place[0])):
        try:
            return socket.create_server(
                place[:2], family=family, backlog=LISTEN_BACKLOG
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    torchrl_logger.warning(
        f"Other machines may not reach this one at master_address={address!r}, "
        f"so the process group's store listens on all addresses of this machine, "
        f"where others can connect, too."
    )
    return socket.create_server(("", port), family=family, backlog=LISTEN_BACKLOG)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for a while."""
    old_value = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old_value is None:
            del os.environ[name]
        else:
            os.environ[name] = old_value


def gloo_listens_on(address: str) -> AbstractContextManager[None]:
    """Makes gloo listen where ranks meet, unless the user chose an interface."""
    interface = None if GLOO_INTERFACE in os.environ else interface_of(address)
    if interface is None:
        return nullcontext()
    return _variable(GLOO_INTERFACE, interface)


def join(
    store: dist.Store,
    address: str,
    backend: str,
    world_size: int,
    group_name: str,
    join_timeout: float,
    send_timeout: float,
) -> Any:
    """Joins a process group as its first rank, beside the trainer's own groups.

    As SGLang's ``init_custom_process_group``: both sides find the same keys in a store.
    """
    # An error of this group ends the group alone, not this process.
    with _variable(ASYNC_ERRORS, "0"), gloo_listens_on(address):
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            dist.PrefixStore(group_name, store),
            group_name=group_name,  # type: ignore[arg-type]
            timeout=datetime.timedelta(seconds=join_timeout),
        )
    ranks = {rank: rank for rank in range(world_size)}
    distributed_c10d._world.pg_group_ranks[group] = ranks
    # After its own timeout NCCL ends the whole process; the transport's timeouts are
    # shorter, and end the group alone.
    seconds = 7 * 24 * 3600.0 if backend == "nccl" else send_timeout
    # PyTorch before 2.15 has it under another name.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(datetime.timedelta(seconds=seconds), group)
    return group


def destroy(group: Any) -> None:
    """Leaves a group whose operations have ended."""
    try:
        dist.destroy_process_group(group)
    except Exception as error:  # noqa: BLE001 - Backends raise anything.
        torchrl_logger.debug(f"A process group did not end cleanly: {error}")


def abandon(
    group: Any, works: list[Any], parts: list[torch.Tensor], backend: str
) -> None:
    """Leaves a group without waiting for operations, which read ``parts``.

    NCCL can abort. A gloo group's destructor waits for its operations, holding the GIL:
    until they end, a reference keeps the group from it, also at interpreter exit.
    """
    if backend == "nccl":
        group._get_backend(torch.device("cuda")).abort()
        destroy(group)
        return
    owned = ctypes.py_object(group)
    ctypes.pythonapi.Py_IncRef(owned)

    def end() -> None:
        while not all(work.is_completed() for work in works):
            time.sleep(POLL_SECONDS)
        parts.clear()
        destroy(group)
        ctypes.pythonapi.Py_DecRef(owned)

    in_thread(end)


def start_broadcasts(
    parts: list[torch.Tensor],
    group: Any,
    ready: Any,
    works: list[Any],
    together: bool,
) -> None:
    """Starts broadcasts, adding each to ``works`` as soon as it has begun.

    ``ready`` is the event that they wait for. ``together`` starts them as one operation
    of NCCL, as the other ranks must do then, too.
    """
    device = parts[0].device
    if ready is not None:
        # A thread has its own current stream.
        torch.cuda.current_stream(device).wait_event(ready)
    if together:
        # One launch for all: 142 broadcasts of a 7B model lose 2 ms between each other.
        group._start_coalescing(device)
        for part in parts:
            dist.broadcast(part, src=0, group=group, async_op=True)
        works.append(group._end_coalescing(device))
        return
    works.extend(
        dist.broadcast(part, src=0, group=group, async_op=True) for part in parts
    )


def decide(
    environment: Mapping[str, str], servers: str, begun: bool
) -> Literal["agree", "set", "late", "differ"]:
    """Compares the trainer's setting with the servers' value. Pure."""
    value = environment.get(NCCL_CUMEM)
    if value is None:
        return "late" if begun else "set"
    return "agree" if value == servers else "differ"


def share_nccl_settings(args: ServerArgs, *, refuse: bool) -> None:
    """Sets the servers' value unless the trainer has one.

    With ``refuse``, raises :class:`ConfigurationError` if NCCL has begun without it.
    """
    servers = str(int(args.enable_symm_mem))
    for name in NCCL_SLOW:
        if os.environ.get(name, "0") not in ("", "0"):
            torchrl_logger.warning(
                f"{name}={os.environ[name]} keeps NCCL from the fast path between "
                f"GPUs; it is not needed, unset it."
            )
    decision = decide(os.environ, servers, _has_begun())
    if decision == "set":
        os.environ[NCCL_CUMEM] = servers
    elif decision == "differ":
        # Servers that inherited the trainer's environment have its value.
        torchrl_logger.warning(
            f"{NCCL_CUMEM} is {os.environ[NCCL_CUMEM]} here, and SGLang's own value is "
            f"{servers}. {nccl_advice(servers)}"
        )
    elif decision == "late" and refuse:
        raise ConfigurationError(
            f"NCCL has made a communicator in this process already, without "
            f"{NCCL_CUMEM}, and the servers have {servers}. {nccl_advice(servers)}"
        )


def prepare_nccl(args: ServerArgs | None) -> None:
    """Sets the variable that NCCL reads at the first communicator of this process.

    Ranks of a trainer talk to each other, too, and need the same value: one without an
    engine, which knows no arguments of servers, takes SGLang's own.
    """
    args = args or ServerArgs()
    if args.device != "cpu" and torch.cuda.is_available():
        share_nccl_settings(args, refuse=False)


def nccl_advice(servers: str = "0") -> str:
    """Returns the sentence that tells how both sides come to agree."""
    return (
        f"Both sides must agree: set {NCCL_CUMEM}={servers} in the trainer's "
        f"environment, or make the SGLangWeightSyncScheme on every rank before the "
        f"trainer's first communicator of NCCL. Do not disable peer access or shared "
        f"memory instead."
    )


def advice_for(problem: str) -> str:
    """Returns the remedy, behind a space, for an error of NCCL or gloo; or nothing."""
    if "invalid argument" in problem:
        return f" {nccl_advice()}"
    if "connectFullMesh" in problem:
        return (
            f". Gloo listens on the address of a machine's name, which others may not "
            f"reach. Set {GLOO_INTERFACE} to the network's interface, here and for "
            f"servers that were started without this package, and start those again: "
            f"they may wait half an hour for this group."
        )
    return ""


def _has_begun() -> bool:
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # The group has no backend for GPUs.
            continue
        # Other backends for GPUs lack this method.
        if getattr(backend, "_is_initialized", lambda: False)():
            return True
    return False
