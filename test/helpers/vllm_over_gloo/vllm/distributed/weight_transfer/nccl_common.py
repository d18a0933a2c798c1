"""The trainer's end of a process group."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120


class Group:
    """Rank 0 of a group of gloo, as vLLM's communicator of NCCL."""

    def __init__(self, info: Any) -> None:
        address, port, size = (
            info[name] for name in ("master_address", "master_port", "world_size")
        )
        timeout = datetime.timedelta(seconds=SECONDS)
        # As in StatelessProcessGroup, which waits here until all ranks are counted.
        self.store = dist.TCPStore(address, port, size, True, timeout, use_libuv=False)
        self.group: Any = self
        self.socket = None
        self._gloo = dist.ProcessGroupGloo(self.store, 0, size, timeout)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        self._gloo.broadcast([tensor], dist.BroadcastOptions()).wait()


def trainer_init(init_info: Any, rank: int = 0) -> Group:
    assert rank == 0
    return Group(init_info)
