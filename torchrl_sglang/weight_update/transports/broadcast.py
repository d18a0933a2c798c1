"""Broadcast over a process group that trainer and servers share: NCCL, or gloo on CPU.

A collective cannot be cancelled by itself, and it waits for ever for a server that
refused to join. So the request to the server runs beside it and is the one that is
watched: when it fails, the group is given up, and both sides are free.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import datetime
import os
import socket
import threading
import time
import uuid
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.event_loop import submit
from torchrl_sglang.errors import WeightTransferError
from torchrl_sglang.weight_update.buckets import Bucket
from torchrl_sglang.weight_update.source import NamedTensors

__all__ = ["BroadcastTransport"]

CONNECT_TIMEOUT_SECONDS = 60.0
"""Budget for servers to join: a first NCCL communicator takes some seconds."""

SEND_TIMEOUT_SECONDS = 300.0
"""Budget for one bucket."""

POLL_SECONDS = 0.05
"""How often a failed collective is looked for while the servers' answer is awaited."""

GIVE_UP_SECONDS = 5.0
"""Budget for servers to leave a group that failed."""


class BroadcastTransport:
    """Sends buckets from rank 0 (this process) to the ranks of all servers.

    Args:
        engine: the servers.
        device: where buckets are put together; decides on NCCL or gloo.
        master_address: where servers meet this process. By default loopback for a
            server on this machine, otherwise the address that faces the first server.
        master_port: port for that; by default one that is free.
        connect_timeout: budget for servers to join, in seconds.
        send_timeout: budget for one bucket, in seconds.
    """

    def __init__(
        self,
        engine: RLSGLangEngine,
        *,
        device: torch.device,
        master_address: str | None = None,
        master_port: int | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        self._engine = engine
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._address = master_address or _address_facing(engine.control.urls[0])
        self._port = master_port or 0
        self._connect_timeout = connect_timeout
        self._send_timeout = send_timeout
        self._group: Any = None
        self._membership = -1
        self._group_name = ""

    @property
    def connected(self) -> bool:
        """Whether the servers have joined a group that works.

        A trainer that tears torch.distributed down takes this group with it.
        """
        return (
            self._group in distributed_c10d._world.pg_map
            and self._membership == self._engine.control.membership
        )

    def connect(self) -> None:
        """Forms a process group with all servers; see :class:`.WeightTransport`."""
        if self.connected:
            return
        if self._group is not None:
            self._give_up()
        if self._backend == "nccl":
            _share_nccl_settings()
        self._membership = self._engine.control.membership
        self._group_name = f"torchrl_sglang_{uuid.uuid4().hex[:8]}"
        budget = datetime.timedelta(seconds=self._connect_timeout)
        world_size = 1 + self._engine.get_world_size()
        try:
            store = dist.TCPStore(
                self._address,
                self._port,
                world_size,
                is_master=True,
                timeout=budget,
                wait_for_workers=False,
            )
        except RuntimeError as error:
            failure = WeightTransferError(
                f"No meeting point for the servers can be opened at "
                f"{self._address}:{self._port}: {error}. Give another master_address "
                f"or master_port."
            )
            failure.untouched = True
            raise failure from error
        request = submit(
            self._engine.control.init_weights_update_group(
                master_address=self._address,
                master_port=store.port,
                world_size=world_size,
                group_name=self._group_name,
                backend=self._backend,
                timeout=self._connect_timeout,
            )
        )
        # Joining blocks until all ranks are there, so it runs where it can be left.
        joining = _in_thread(
            _join_group,
            store,
            self._backend,
            world_size,
            self._group_name,
            budget,
            datetime.timedelta(seconds=self._send_timeout),
        )
        deadline = time.monotonic() + self._connect_timeout
        try:
            while not (joining.done() and request.done()):
                for part in (request, joining):
                    if part.done():
                        part.result()
                if time.monotonic() > deadline:
                    raise WeightTransferError(
                        f"The servers did not join a process group at "
                        f"{self._address}:{store.port} within "
                        f"{self._connect_timeout:g} s. Can they reach that address?"
                    )
                concurrent.futures.wait(
                    [request, joining], POLL_SECONDS, concurrent.futures.FIRST_COMPLETED
                )
            request.result()
            self._group = joining.result()
        except BaseException as error:  # noqa: BLE001 - _fail raises it again.
            joining.add_done_callback(_drop_result)
            self._fail(error, "The servers could not be met", untouched=True)

    def send(
        self, bucket: Bucket, tensors: NamedTensors, *, weight_version: str | None
    ) -> None:
        """Broadcasts one bucket; see :class:`.WeightTransport`."""
        flat = _flatten(bucket, tensors, self._device)
        request = submit(
            self._engine.control.update_weights_from_distributed(
                names=[spec.name for spec in bucket.specs],
                dtypes=[
                    str(spec.dtype).removeprefix("torch.") for spec in bucket.specs
                ],
                shapes=[spec.shape for spec in bucket.specs],
                group_name=self._group_name,
                weight_version=weight_version,
                timeout=self._send_timeout,
            )
        )
        # Even starting can block: NCCL's first call waits for every rank.
        starting = _in_thread(_start_broadcast, flat, self._group)
        work = None
        try:
            while not request.done():
                concurrent.futures.wait([request], POLL_SECONDS)
                if starting.done():
                    work = starting.result()
                    if work.is_completed():
                        work.wait()  # Raises where the broadcast has failed.
            request.result()
            work = starting.result(self._send_timeout)
            work.wait(datetime.timedelta(seconds=self._send_timeout))
        except BaseException as error:  # noqa: BLE001 - _fail raises it again.
            # Nobody has received anything if the broadcast could not begin, or if the
            # servers answered and it has not ended.
            unsent = starting.done() and starting.exception() is not None
            refused = request.done() and (work is None or not work.is_completed())
            # One server can refuse what another has received and loaded.
            refused = refused and not getattr(error, "partly", False)
            request.cancel()
            self._fail(
                error,
                "A bucket did not arrive",
                untouched=unsent or refused,
                work=work,
            )

    def _fail(
        self, error: BaseException, what: str, *, untouched: bool, work: Any = None
    ) -> NoReturn:
        self._give_up(work)
        if not isinstance(error, Exception):
            raise error
        failure = WeightTransferError(f"{what}: {error}")
        failure.untouched = untouched
        raise failure from error

    def _give_up(self, work: Any = None) -> None:
        """Frees both sides of a group that failed, without waiting for them."""
        group, self._group = self._group, None
        leaving = submit(
            self._engine.control.destroy_weights_update_group(
                self._group_name, timeout=GIVE_UP_SECONDS
            )
        )
        leaving.add_done_callback(_ignore_result)
        if group is not None:
            _abandon(group, work, self._backend)

    def close(self) -> None:
        """Leaves the group."""
        if self._group is None:
            return
        group, self._group = self._group, None
        leaving = submit(
            self._engine.control.destroy_weights_update_group(
                self._group_name, timeout=GIVE_UP_SECONDS
            )
        )
        leaving.add_done_callback(_ignore_result)
        concurrent.futures.wait([leaving], GIVE_UP_SECONDS)
        _destroy_group(group)


def _flatten(
    bucket: Bucket, tensors: NamedTensors, device: torch.device
) -> torch.Tensor:
    """Returns the bucket's bytes; copies cast and move in one step."""
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        place = flat[offset : offset + spec.num_bytes].view(spec.dtype)
        place.view(spec.shape).copy_(
            # Into memory of the host, a copy must be done before it is read.
            tensors[spec.name],
            non_blocking=device.type == "cuda",
        )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return flat


def _start_broadcast(flat: torch.Tensor, group: Any) -> Any:
    return dist.broadcast(flat, src=0, group=group, async_op=True)


def _in_thread(function: Any, *arguments: Any) -> concurrent.futures.Future[Any]:
    """Runs a call that may never return in a thread that nothing waits for."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - It goes to who waits.
            future.set_exception(error)

    threading.Thread(target=run, name="torchrl_sglang-group", daemon=True).start()
    return future


def _join_group(
    store: dist.Store,
    backend: str,
    world_size: int,
    group_name: str,
    join_timeout: datetime.timedelta,
    send_timeout: datetime.timedelta,
) -> Any:
    """Returns a process group beside the trainer's own ones.

    The same construction as SGLang's ``init_custom_process_group``: both sides must
    find the same keys in the store.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,  # type: ignore[arg-type]
        timeout=join_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {
        rank: rank for rank in range(world_size)
    }
    distributed_c10d._set_pg_timeout(send_timeout, group)
    return group


def _destroy_group(group: Any) -> None:
    try:
        dist.destroy_process_group(group)
    except Exception as error:  # noqa: BLE001 - Backends raise what they like.
        torchrl_logger.debug(f"A process group did not end cleanly: {error}")


def _abandon(group: Any, work: Any, backend: str) -> None:
    """Ends a group in which an operation may hang, without waiting for that operation.

    NCCL can abort. A gloo group's destructor waits, with the interpreter's lock held,
    until its operations end: at once where the servers have left the group, after the
    group's timeout otherwise. Until then the group is kept out of any destructor's
    reach, also of those that run when the interpreter exits.
    """
    if backend == "nccl":
        group._get_backend(torch.device("cuda")).abort()
        _destroy_group(group)
        return
    owned = ctypes.py_object(group)
    ctypes.pythonapi.Py_IncRef(owned)

    def end() -> None:
        while work is not None and not work.is_completed():
            time.sleep(POLL_SECONDS)
        _destroy_group(group)
        ctypes.pythonapi.Py_DecRef(owned)

    _in_thread(end)


def _drop_result(joining: concurrent.futures.Future[Any]) -> None:
    # A group that came up after it was given up; nothing was sent in it.
    if joining.exception() is None:
        _destroy_group(joining.result())


def _ignore_result(request: concurrent.futures.Future[Any]) -> None:
    if not request.cancelled() and request.exception() is not None:
        torchrl_logger.debug(f"A server did not leave a group: {request.exception()}")


def _address_facing(url: str) -> str:
    """Returns this machine's address as the server at ``url`` sees it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    if host in ("127.0.0.1", "localhost", "::1"):
        return "127.0.0.1"
    # Connecting a datagram socket chooses a route and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def _share_nccl_settings() -> None:
    """Sets what SGLang sets in its own processes, where the trainer has not.

    Both sides must agree on it, and it is read with the first communicator.
    """
    value = os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if value != "0":
        torchrl_logger.warning(
            f"NCCL_CUMEM_ENABLE={value} here, and SGLang sets 0 in its processes; the "
            f"first broadcast fails if they differ. Set it to 0 in the trainer before "
            f"its first NCCL communicator."
        )
