"""Forms a process group with servers, and gives it up without waiting for them.

A collective cannot be cancelled, and joining waits for every rank, so both run in
threads that nothing waits for.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.weight_update.transports.rendezvous import (
    gloo_listens_on,
    variable,
)

__all__ = ["POLL_SECONDS", "abandon", "destroy", "in_thread", "is_alive", "join"]

POLL_SECONDS = 0.05

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

NCCL_SECONDS = 7 * 24 * 3600.0
"""NCCL's own timeout, after which torch ends the whole process. The transport's
timeouts are shorter, and end the group alone."""


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
    with variable(ASYNC_ERRORS, "0"), gloo_listens_on(address):
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
    seconds = NCCL_SECONDS if backend == "nccl" else send_timeout
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)
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
    """Leaves a group without waiting for an operation that may hang.

    ``works`` are its operations, and ``parts`` the tensors that these read.

    NCCL can abort. A gloo group's destructor waits for its operations, holding the GIL:
    not for long once the servers have left, until the group's timeout otherwise. Until
    then a reference keeps the group from every destructor, also at interpreter exit.
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
