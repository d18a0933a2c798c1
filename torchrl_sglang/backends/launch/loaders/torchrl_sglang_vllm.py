"""Receives weights from a trainer that sends them as vLLM's trainers do.

A module for ``--custom-weight-loader torchrl_sglang_vllm.load``, beside
``torchrl_sglang_loader.load``, whose requests it extends: ``join`` joins the trainer's
process group, and ``take`` receives broadcasts of its rank 0.

On GPUs the group is a communicator of NCCL alone, whose id the trainer puts into a
store of PyTorch (``StatelessProcessGroup`` of vLLM). On CPU it is gloo's, formed over
the same store.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import io
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

import torch
import torch.distributed as dist

loader: Any = importlib.import_module("torchrl_sglang_loader")
"""The module beside this one."""

Spec = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""

ID_KEY = "broadcast_from/0/0"
"""Key of NCCL's id in the store."""


class TrainerGroup(Protocol):
    """A process group with a trainer."""

    def broadcast(self, tensor: torch.Tensor, seconds: float) -> None:
        """Receives a tensor from rank 0 within a timeout."""

    def close(self) -> None:
        """Leaves the group; called once."""


class GlooGroup:
    """A group of gloo."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        timeout = datetime.timedelta(seconds=seconds)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensor: torch.Tensor, seconds: float) -> None:
        """Receives a tensor from rank 0 within a timeout."""
        options = dist.BroadcastOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Closes the connections, which end with the object."""
        self._group = None


class NcclGroup:
    """A communicator of NCCL."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        from sglang.srt.distributed.device_communicators.pynccl import (
            PyNcclCommunicator,
        )
        from sglang.srt.distributed.utils import StatelessProcessGroup

        class _IdGroup(StatelessProcessGroup):  # type: ignore[misc]
            def broadcast_obj(self, obj: Any, src: int) -> Any:
                return read_id(self.store.get(ID_KEY))

        group = _IdGroup(rank=rank, world_size=size, store=store)
        self._device, self._is_aborted = device, False
        self._nccl = PyNcclCommunicator(group, device=device)
        if not self._nccl.available:
            raise RuntimeError("NCCL is not available in this server")
        self._nccl.disabled = False

    def broadcast(self, tensor: torch.Tensor, seconds: float) -> None:
        """Receives a tensor from rank 0 within a timeout."""
        # The device waits for the trainer, and only an abort ends that.
        timer = threading.Timer(seconds, self._abort)
        timer.daemon = True
        timer.start()
        try:
            self._nccl.broadcast(tensor, src=0)
            torch.cuda.current_stream(self._device).synchronize()
        finally:
            timer.cancel()
            timer.join()
        if self._is_aborted:
            raise TimeoutError("the trainer did not broadcast in time")

    def close(self) -> None:
        """Frees the communicator."""
        if not self._is_aborted:
            self._abort()

    def _abort(self) -> None:
        self._is_aborted = True
        library: Any = self._nccl.nccl.lib
        library.ncclCommAbort(self._nccl.comm)


class _IdReader(pickle.Unpickler):
    """Reads NCCL's id alone, of vLLM's class or SGLang's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return super().find_class(module, name)
        if name == "ncclUniqueId":
            from sglang.srt.distributed.device_communicators.pynccl_wrapper import (
                ncclUniqueId,
            )

            return ncclUniqueId
        raise pickle.UnpicklingError(f"{module}.{name} is not NCCL's id")


def read_id(content: bytes) -> ctypes.Structure:
    """Returns NCCL's id from the trainer's store."""
    value = _IdReader(io.BytesIO(content)).load()
    if not isinstance(value, ctypes.Structure):
        raise TypeError(f"the trainer's store has a {type(value).__name__}, no NCCL id")
    return value


GROUPS: weakref.WeakKeyDictionary[Any, TrainerGroup] = weakref.WeakKeyDictionary()
"""The group of each model."""


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Executes a request; SGLang calls it in each rank."""
    loader.load(model, named_tensors)


def _join(model: Any, state: Any, order: Any, content: torch.Tensor) -> None:
    """Joins a trainer's process group."""
    from sglang.srt.distributed import get_tp_group

    _leave(model)
    rank = order["rank_offset"] + get_tp_group().rank_in_group
    size, seconds, device = order["world_size"], order["timeout"], content.device

    def join() -> TrainerGroup:
        store = dist.TCPStore(
            order["master_address"],
            order["master_port"],
            size,
            is_master=False,
            timeout=datetime.timedelta(seconds=seconds),
            # The trainer waits until all ranks are counted; a rank itself does not.
            wait_for_workers=True,
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            return NcclGroup(store, rank, size, device)
        return GlooGroup(store, rank, size, seconds)

    GROUPS[model] = within(seconds, join)


def _leave(model: Any) -> None:
    """Leaves a model's group, if any."""
    group = GROUPS.pop(model, None)
    if group is not None:
        group.close()


def within(seconds: float, call: Callable[[], TrainerGroup]) -> TrainerGroup:
    """Returns the result of a call that may never return; raises after a timeout."""
    result: Future[TrainerGroup] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001 - The waiting thread raises it.
            result.set_exception(error)

    threading.Thread(target=run, name="torchrl_sglang-join", daemon=True).start()
    try:
        return result.result(seconds)
    except FutureTimeoutError:
        result.add_done_callback(_close_late)
        raise TimeoutError(
            f"the trainer did not join the group within {seconds:g} s"
        ) from None


def _close_late(result: Future[TrainerGroup]) -> None:
    if result.exception() is None:
        result.result().close()


def _take(model: Any, state: Any, order: Any, content: torch.Tensor) -> None:
    """Receives broadcasts of tensors, and loads them."""
    group = GROUPS.get(model)
    if group is None:
        raise LookupError("this server has not joined the trainer's process group")
    deadline = time.monotonic() + order["timeout"]
    try:
        for specs in split(order):
            size = sum(map(num_bytes, specs))
            flat = torch.empty(size, dtype=torch.uint8, device=content.device)
            # A tensor alone is sent in its own type.
            name = "uint8" if order["packed"] else specs[0][1]
            group.broadcast(
                flat.view(getattr(torch, name)), max(deadline - time.monotonic(), 0.001)
            )
            loader.load_flat(model, state, specs, flat)
    except Exception:
        # Ranks of the trainer and this server may be at different broadcasts.
        _leave(model)
        raise


def split(order: Any) -> Iterator[list[Spec]]:
    """Yields the tensors of each broadcast.

    A packed one ends with the tensor that exceeds the trainer's buffer; otherwise each
    tensor is sent alone.
    """
    specs: list[Spec] = []
    size = 0
    for spec in loader.read_specs(order):
        specs.append(spec)
        size += num_bytes(spec)
        if size > order["buffer_bytes"] or not order["packed"]:
            yield specs
            specs, size = [], 0
    if specs:
        yield specs


def num_bytes(spec: Spec) -> int:
    """Returns the size of a tensor."""
    dtype: torch.dtype = getattr(torch, spec[1])
    return math.prod(spec[2]) * dtype.itemsize


loader.ACTIONS |= {"join": _join, "take": _take}
