"""The ranks of a trainer: one process, or those that torchrun has started."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.support.urls import address_facing, interface_of, url_of
from torchrl_sglang.weight_update.transports.process_group import GLOO_INTERFACE

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRanks:
    """Place of a process among those that train the same model."""

    rank: int = 0
    """Number of this process; rank 0 talks to the servers and writes files."""
    size: int = 1
    local_rank: int = 0
    """Number of this process on its machine, and of its GPU."""
    local_size: int = 1
    control: dist.ProcessGroup | None = None
    """Group of the ranks for what they tell each other: Gloo's, with a long timeout,
    as a server may start for minutes."""

    @property
    def is_first(self) -> bool:
        """Whether this process talks to the servers and writes files."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks; ``None`` for a single one."""
        return dist.group.WORLD if self.size > 1 else None

    def device(self) -> torch.device:
        """Returns the device of this rank."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank)

    def all_true(self, value: bool) -> bool:
        """Returns whether a condition holds on every rank; all of them call this."""
        if self.size == 1:
            return value
        flag = torch.tensor(int(value))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.control)
        return bool(flag.item())

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.all_true(True)

    def share(self, value: T) -> T:
        """Returns the value of the first rank on all of them."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.control)
        shared: T = values[0]
        return shared

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, on all of them."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_first(self, value: T) -> list[T]:
        """Returns the values of all ranks on the first one, and none on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_first else []
        into = values if self.is_first else None
        dist.gather_object(value, into, group_dst=0, group=self.control)
        return values

    def first(self, call: Callable[[], T]) -> T:
        """Returns the result of a call on the first rank, or raises its error, on all.

        Others get ``None`` for what cannot be sent to another process.
        """
        if self.size == 1:
            return call()
        value: Any = None
        problem: BaseException | None = None
        if self.is_first:
            try:
                value = call()
            except Exception as error:  # noqa: BLE001 - The other ranks raise it, too.
                problem = error
        shared = self.share((_plain(value), None if problem is None else str(problem)))
        if problem is not None:
            raise problem
        if shared[1] is not None:
            raise SGLangError(f"The first rank of the trainer failed: {shared[1]}")
        result: T = value if self.is_first else shared[0]
        return result

    def end(self) -> None:
        """Ends the communication of the ranks; a waiting rank fails.

        PyTorch's process group stays for the process's next run: one that is
        initialised a second time in the same processes hangs.
        """
        if self.control is not None and dist.is_initialized():
            dist.destroy_process_group(self.control)


def _plain(value: Any) -> Any:
    """Returns a value as the other ranks receive it."""
    return value if isinstance(value, (dict, str, int, float, bool)) else None


def find_trainer_ranks() -> TrainerRanks:
    """Joins the ranks that torchrun has started; alone without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(local)
        _choose_interface()
        both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(both)
        atexit.register(_end_process_group)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return TrainerRanks()
    return TrainerRanks(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", dist.get_rank())),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        control=dist.new_group(
            # The first rank starts servers, evaluates and saves meanwhile.
            timeout=timedelta(seconds=7200.0),
            backend="gloo",
        ),
    )


def _choose_interface() -> None:
    """Has gloo listen where the ranks of other machines reach this one.

    Otherwise it takes the address of the machine's name, which may be a loopback one.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "80")
    if address is None:
        return
    # PyTorch reports an address that cannot be resolved.
    with suppress(ConfigurationError):
        interface = interface_of(address_facing([url_of(address, port)]))
        if interface not in (None, "lo"):
            os.environ.setdefault(GLOO_INTERFACE, interface)


def _end_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
