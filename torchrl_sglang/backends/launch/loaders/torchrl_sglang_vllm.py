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
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

loader: Any = importlib.import_module("torchrl_sglang_loader")
"""The module beside this one."""

ID_KEY = "broadcast_from/0/0"
"""Key of NCCL's id in the store."""


class TrainerGroup(Protocol):
    """A process group with a trainer."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receives a tensor from rank 0."""

    def abort(self) -> None:
        """Ends a broadcast that waits for the trainer."""


class GlooGroup:
    """A group of gloo."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        timeout = datetime.timedelta(seconds=seconds)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receives a tensor from rank 0."""
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """Does nothing: gloo has a timeout."""


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
        self._device = device
        self._nccl = PyNcclCommunicator(group, device=device)
        if not self._nccl.available:
            raise RuntimeError("NCCL is not available in this server")
        self._nccl.disabled = False

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Receives a tensor from rank 0."""
        self._nccl.broadcast(tensor, src=0)
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """Ends a broadcast that waits for the trainer."""
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

    GROUPS.pop(model, None)
    rank = order["rank_offset"] + get_tp_group().rank_in_group
    size, seconds, device = order["world_size"], order["timeout"], content.device

    def join() -> TrainerGroup:
        store = dist.TCPStore(
            order["master_address"],
            order["master_port"],
            size,
            is_master=False,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            return NcclGroup(store, rank, size, device)
        return GlooGroup(store, rank, size, seconds)

    GROUPS[model] = within(seconds, join)


def within(seconds: float, call: Callable[[], TrainerGroup]) -> TrainerGroup:
    """Returns the result of a call that may never return; raises after a timeout."""
    results: list[TrainerGroup] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - The waiting thread raises it.
            errors.append(error)

    thread = threading.Thread(target=run, name="torchrl_sglang-join", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the trainer did not join the group within {seconds:g} s")
    return results[0]


def _take(model: Any, state: Any, order: Any, content: torch.Tensor) -> None:
    """Receives broadcasts of tensors, and loads them."""
    group = GROUPS.get(model)
    if group is None:
        raise LookupError("this server has not joined the trainer's process group")
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        group.abort()

    timer = threading.Timer(order["timeout"], expire)
    timer.daemon = True
    timer.start()
    try:
        for bucket in order["broadcasts"]:
            _take_one(model, state, bucket, group, content.device)
            if expired.is_set():
                raise TimeoutError(f"it took longer than {order['timeout']:g} s")
    except Exception:
        # Ranks of the trainer and this server may be at different broadcasts.
        GROUPS.pop(model, None)
        raise
    finally:
        timer.cancel()


def _take_one(
    model: Any, state: Any, bucket: Any, group: TrainerGroup, device: torch.device
) -> None:
    specs = loader.read_specs(bucket)
    flat = torch.empty(bucket["num_bytes"], dtype=torch.uint8, device=device)
    # A tensor alone is sent in its own type.
    dtype = torch.uint8 if bucket["packed"] else getattr(torch, specs[0][1])
    group.broadcast(flat.view(dtype))
    loader.load_flat(model, state, specs, flat)


loader.ACTIONS |= {"join": _join, "take": _take}
