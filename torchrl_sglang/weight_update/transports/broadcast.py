"""Broadcast over a process group that trainer and servers share: NCCL, or gloo on CPU.

A collective cannot be cancelled by itself, and it waits for ever for a server that
refused to join. So the request to the server runs beside it and is the one that is
watched: when it fails, the group is given up, and both sides are free.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import datetime
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.support.event_loop import submit
from torchrl_sglang.errors import (
    RequestRefusedError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.weight_update.buckets import Bucket, TensorSpec
from torchrl_sglang.weight_update.sources.weights import NamedTensors, Weights
from torchrl_sglang.weight_update.transports import nccl
from torchrl_sglang.weight_update.transports.base import (
    BUCKET_BYTES,
    SEND_TIMEOUT_SECONDS,
)
from torchrl_sglang.weight_update.transports.flat import flatten
from torchrl_sglang.weight_update.transports.rendezvous import (
    gloo_listens_on,
    open_store,
)

__all__ = ["BroadcastTransport"]

CONNECT_TIMEOUT_SECONDS = 60.0
"""Budget for servers to join: a first NCCL communicator takes some seconds."""

POLL_SECONDS = 0.05
"""How often a failed collective is looked for while the servers' answer is awaited."""

SETTLE_SECONDS = 0.0002
"""How often the end of a broadcast is looked for."""

SMALL_BELOW_BYTES = {"nccl": 8 << 20, "gloo": 0}
"""Defaults for ``small_below``. A broadcast of its own costs a tensor 40 µs with NCCL,
which is the time of 15 MB on a link of 370 GB/s; a copy within a GPU costs little. A
copy in memory of the host costs about as much as gloo."""

REFUSAL_SECONDS = 1.0
"""How long other servers have to refuse, too, when one has."""

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

NCCL_SECONDS = 7 * 24 * 3600.0
"""NCCL's own limit for an operation, after which torch ends the whole process. The
budgets here are shorter, and end the group alone."""

_NOTHING_RECEIVED = ("must run between", "Failed to receive weights")
"""What a refusal says where a server has not touched its weights. Others can come when
some of a bucket is loaded."""

GIVE_UP_SECONDS = 5.0
"""Budget for servers to leave a group that failed."""

Pending: TypeAlias = "deque[tuple[list[Any], list[torch.Tensor]]]"
"""Buckets that are under way: their broadcasts, and what these read from."""


@dataclass
class _Answers:
    """What servers said to a bucket."""

    nothing_received: bool = False
    """All of them refused before they received anything."""


class BroadcastTransport:
    """Sends buckets from rank 0 (this process) to the ranks of all servers.

    Args:
        engine: the servers.
        device: where buckets are put together; decides on NCCL or gloo.
        master_address: where servers meet this process. By default loopback for
            servers that are reached by it, otherwise the address that faces the first
            one elsewhere. Nothing listens on another address, unless this one is none
            of this machine's own.
        master_port: port for that; by default one that is free.
        bucket_bytes: size of a transfer, in bytes; a server needs that much room
            beside its weights.
        connect_timeout: budget for servers to join, in seconds.
        send_timeout: budget for one bucket, in seconds.
        small_below: tensors smaller than that, in bytes, are put together and travel
            as one piece of memory; the others are sent from where they are. Defaults
            to what is fastest, see :data:`SMALL_BELOW_BYTES`.
    """

    name: ClassVar[str] = "broadcast"
    in_session: ClassVar[bool] = True

    def __init__(
        self,
        engine: RLSGLangEngine,
        *,
        device: torch.device,
        master_address: str | None = None,
        master_port: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
        small_below: int | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._bucket_bytes = bucket_bytes
        if small_below is None:
            small_below = SMALL_BELOW_BYTES[self._backend]
        self._small_below = small_below
        self._pending: Pending = deque()
        self._master_address = master_address
        self._address = ""
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
            and self._membership == self._engine.control.membership_epoch
        )

    def connect(self) -> None:
        """Forms a process group with all servers; see :class:`.WeightTransport`."""
        if self.connected:
            return
        if self._group is not None:
            self._give_up()
        self._check_servers()
        self._membership = self._engine.control.membership_epoch
        self._group_name = f"torchrl_sglang_{uuid.uuid4().hex[:8]}"
        budget = datetime.timedelta(seconds=self._connect_timeout)
        world_size = 1 + self._engine.get_world_size()
        self._address = self._master_address or self._engine.get_master_address()
        store = self._open_store(world_size, budget)
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
            self._address,
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
                        f"The servers {self._servers} did not join a process group "
                        f"at {self._address}:{store.port} within "
                        f"{self._connect_timeout:g} s. Can they reach that address?"
                    )
                concurrent.futures.wait(
                    [request, joining], POLL_SECONDS, concurrent.futures.FIRST_COMPLETED
                )
            request.result()
            self._group = joining.result()
        except BaseException as error:  # noqa: BLE001 - _fail raises it again.
            joining.add_done_callback(_drop_result)
            self._fail(
                error,
                "The servers could not be met",
                untouched=True,
                advice=" Nothing was sent; the update can be tried again.",
            )

    def _check_servers(self) -> None:
        """Checks that these servers can be met, and that NCCL will work.

        Raises:
            UnsupportedByServerError: if they cannot.
            ConfigurationError: see :func:`.nccl.share_settings`.
        """
        stages = self._engine.capabilities.pp_size
        if self._engine.capabilities.dp_size > 1:
            raise UnsupportedByServerError(
                f"SGLang receives weights with dp_size=1 only, and the server has "
                f"dp_size={self._engine.capabilities.dp_size}; start several servers "
                f"(num_replicas) instead, or use transport='disk'."
            )
        if stages > 1:
            raise UnsupportedByServerError(
                f"SGLang gives the first rank of each of the server's {stages} "
                f"pipeline stages the same place in a process group, so weights cannot "
                f"be broadcast to it; use transport='disk'."
            )
        if self._backend == "nccl":
            nccl.share_settings(self._engine.capabilities.server_args, refuse=True)

    def _open_store(self, world_size: int, budget: datetime.timedelta) -> dist.TCPStore:
        try:
            return open_store(self._address, self._port, world_size, budget)
        except (OSError, RuntimeError) as error:
            raise WeightTransferError(
                f"No meeting point for the servers can be opened at "
                f"{self._address}:{self._port}: {error}. Give another master_address "
                f"or master_port.",
                untouched=True,
            ) from error

    def send(self, weights: Weights, *, version: str) -> int:
        """Broadcasts bucket after bucket; see :class:`.WeightTransport`.

        A server that received a bucket over NCCL has only put the work of it into its
        device's queue when it answers. So the next request is made and answered while
        the link is busy, and the link does not wait for requests.
        """
        self._pending.clear()
        count, sent = 0, 0
        try:
            for bucket, tensors in weights.buckets(
                self._bucket_bytes, self._small_below
            ):
                sent += len(bucket.specs)
                last = sent == len(weights.specs)
                self._send_bucket(bucket, tensors, version if last else None, count > 0)
                count += 1
                # What is under way is alive. Parameters are anyway, copies are not.
                if not (weights.stable and self._shares(tensors)):
                    self._settle(keep=1 if weights.stable else 0)
                del tensors
            self._settle(keep=0)
        except BaseException as error:
            if self._group is None:
                # It was given up where that was noticed.
                raise
            self._fail(
                error,
                f"The weights did not arrive at {self._servers}",
                untouched=count == 0,
            )
        return count

    def _send_bucket(
        self,
        bucket: Bucket,
        tensors: NamedTensors,
        version: str | None,
        begun: bool,
    ) -> None:
        if bucket.small:
            parts = [flatten(bucket, tensors, self._device)]
        else:
            parts = [_ready(tensors[s.name], s, self._device) for s in bucket.specs]
        ready = _now_on(self._device)
        works: list[Any] = []
        self._pending.append((works, parts))
        answers = _Answers()
        request: concurrent.futures.Future[None] | None = None
        try:
            request = submit(self._ask(bucket, version, answers))
            # Even starting can block: NCCL's first call waits for every rank.
            starting = _in_thread(_start_broadcasts, parts, self._group, ready, works)
            while not request.done():
                concurrent.futures.wait([request], POLL_SECONDS)
                if starting.done():
                    starting.result()
                    for work in works:
                        if work.is_completed():
                            work.wait()  # Raises where the broadcast has failed.
            request.result()
            starting.result(self._send_timeout)
        except BaseException as error:  # noqa: BLE001 - _fail raises it again.
            # An answer that is lost is no refusal, one server can refuse what another
            # has loaded, and what is loaded may be garbage where nothing was sent.
            untouched = request is None or answers.nothing_received
            if request is not None:
                request.cancel()
            self._fail(
                error,
                f"A bucket did not arrive at {self._servers}",
                untouched=untouched and not begun,
            )

    async def _ask(
        self, bucket: Bucket, version: str | None, answers: _Answers
    ) -> None:
        """Has every server receive a bucket; raises as soon as it is known to fail."""
        control = self._engine.control
        urls = list(control.urls)
        tasks = [
            asyncio.ensure_future(
                control.update_weights_from_distributed(
                    names=[spec.name for spec in bucket.specs],
                    dtypes=[
                        str(spec.dtype).removeprefix("torch.") for spec in bucket.specs
                    ],
                    shapes=[spec.shape for spec in bucket.specs],
                    group_name=self._group_name,
                    load_format="flattened_bucket" if bucket.small else None,
                    weight_version=version,
                    timeout=self._send_timeout,
                    urls=[url],
                )
            )
            for url in urls
        ]
        try:
            _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if left:
                # Refusals come at once; others wait in the broadcast for ever.
                await asyncio.wait(left, timeout=REFUSAL_SECONDS)
            errors = [task.exception() for task in tasks if task.done()]
            answers.nothing_received = len(errors) == len(tasks) and all(
                isinstance(error, RequestRefusedError)
                and any(words in str(error) for words in _NOTHING_RECEIVED)
                for error in errors
            )
            for error in errors:
                if error is not None:
                    raise error
        finally:
            for task in tasks:
                task.cancel()

    def _settle(self, *, keep: int) -> None:
        """Waits until no more than ``keep`` buckets are under way."""
        while len(self._pending) > keep:
            deadline = time.monotonic() + self._send_timeout
            works, _ = self._pending[0]
            for work in works:
                left = max(deadline - time.monotonic(), 1e-3)
                if self._backend == "gloo":
                    work.wait(datetime.timedelta(seconds=left))
                    continue
                # NCCL's wait() only has the current stream wait.
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"A broadcast did not end within {self._send_timeout:g} s."
                        )
                    time.sleep(SETTLE_SECONDS)
                work.wait()
            self._pending.popleft()

    def _shares(self, tensors: NamedTensors) -> bool:
        """Whether the broadcasts under way read from the tensors themselves."""
        _, parts = self._pending[-1]
        return {part.data_ptr() for part in parts} <= {
            tensor.data_ptr() for tensor in tensors.values()
        }

    @property
    def _servers(self) -> str:
        return ", ".join(self._engine.control.urls)

    def _fail(
        self, error: BaseException, what: str, *, untouched: bool, advice: str = ""
    ) -> NoReturn:
        self._give_up()
        if not isinstance(error, Exception):
            raise error
        hint = f" {nccl.advice()}" if "invalid argument" in str(error) else ""
        raise WeightTransferError(
            f"{what}: {error}{hint}{advice}", untouched=untouched
        ) from error

    def _give_up(self) -> None:
        """Frees both sides of a group that failed, without waiting for them."""
        group, self._group = self._group, None
        pending, self._pending = self._pending, deque()
        leaving = submit(
            self._engine.control.destroy_weights_update_group(
                self._group_name, timeout=GIVE_UP_SECONDS
            )
        )
        leaving.add_done_callback(_ignore_result)
        if group is not None:
            _abandon(group, pending, self._backend)

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


def _ready(
    tensor: torch.Tensor, spec: TensorSpec, device: torch.device
) -> torch.Tensor:
    """Returns a tensor as it is served; itself, where that is what it is."""
    tensor = tensor.detach()
    return tensor.to(device=device, dtype=spec.dtype).contiguous()


def _now_on(device: torch.device) -> Any:
    """Returns the moment at which all that was asked of a device is done."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()


def _start_broadcasts(
    parts: list[torch.Tensor], group: Any, ready: Any, works: list[Any]
) -> None:
    """Appends to ``works`` what it has begun, also where it fails later."""
    if ready is not None:
        # A thread has a current stream of its own.
        torch.cuda.current_stream(parts[0].device).wait_event(ready)
    works.extend(
        dist.broadcast(part, src=0, group=group, async_op=True) for part in parts
    )


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
    address: str,
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
    with _errors_end_the_group_alone(), gloo_listens_on(address):
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
    if backend == "nccl":
        send_timeout = datetime.timedelta(seconds=NCCL_SECONDS)
    distributed_c10d._set_pg_timeout(send_timeout, group)
    return group


@contextmanager
def _errors_end_the_group_alone() -> Iterator[None]:
    """Keeps torch from ending this process for an error of a group that is made inside.

    It reads the variable when a group of NCCL is made. The broadcasts are watched here.
    """
    before = os.environ.get(ASYNC_ERRORS)
    os.environ[ASYNC_ERRORS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ASYNC_ERRORS]
        else:
            os.environ[ASYNC_ERRORS] = before


def _destroy_group(group: Any) -> None:
    try:
        dist.destroy_process_group(group)
    except Exception as error:  # noqa: BLE001 - Backends raise what they like.
        torchrl_logger.debug(f"A process group did not end cleanly: {error}")


def _abandon(group: Any, pending: Pending, backend: str) -> None:
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
        for works, _ in pending:
            while not all(work.is_completed() for work in works):
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
