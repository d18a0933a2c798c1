"""A trainer that speaks vLLM's protocol, with broadcasts by gloo."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import torch

from helpers.vllm_over_gloo.vllm.distributed.weight_transfer.nccl_common import (
    trainer_init,
)
from helpers.vllm_over_gloo.vllm.distributed.weight_transfer.packed_tensor import (
    packed_nccl_broadcast_producer,
)
from helpers.vllm_over_gloo.vllm.utils.network_utils import get_open_port

SECONDS = 120.0


class Trainer:
    """Sends weights as TRL's ``WeightTransferClient`` does."""

    def __init__(self, url: str, *, buffer_bytes: int = 1 << 14) -> None:
        self._client = httpx.Client(base_url=url, timeout=SECONDS)
        self._buffer_bytes = buffer_bytes
        self._group: Any = None

    def call(self, path: str, body: Any = None, **params: Any) -> httpx.Response:
        return self._client.post(path, json=body, params=params)

    def ok(self, path: str, body: Any = None, **params: Any) -> Any:
        response = self.call(path, body, **params)
        assert response.status_code == 200, response.text
        return response.json()

    def join(self, **more: Any) -> None:
        info = {
            "master_address": "127.0.0.1",
            "master_port": get_open_port(),
            "rank_offset": 1,
            "world_size": 1 + self._client.get("/get_world_size").json()["world_size"],
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            **more,
        }
        groups: list[Any] = []
        thread = threading.Thread(target=lambda: groups.append(trainer_init(info)))
        thread.start()
        self.ok("/init_weight_transfer_engine", {"init_info": info})
        thread.join(SECONDS)
        (self._group,) = groups

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> httpx.Response:
        """Sends a part of an update; returns the answer of ``/update_weights``."""
        tensors = list(tensors)
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype)[6:] for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        thread = threading.Thread(
            target=packed_nccl_broadcast_producer,
            args=(iter(tensors), self._group, 0, lambda item: item[1]),
            kwargs={"buffer_size_bytes": self._buffer_bytes},
            daemon=True,
        )
        thread.start()
        response = self.call("/update_weights", {"update_info": info})
        if response.status_code == 200:
            thread.join(SECONDS)
        return response

    def update(self, model: Any, parts: int = 1, *, pauses: bool = True) -> None:
        """Sends a whole update, in parts."""
        tensors = [(name, value.detach()) for name, value in model.named_parameters()]
        if pauses:
            self.ok("/pause", mode="keep")
        self.ok("/start_weight_update", {"is_checkpoint_format": True})
        for part in range(parts):
            response = self.send(tensors[part::parts])
            assert response.status_code == 200, response.text
        self.ok("/finish_weight_update")
        if pauses:
            self.ok("/resume")

    def leave(self) -> None:
        """Leaves the group, as a trainer that ends."""
        self._group = None
        gc.collect()

    def close(self) -> None:
        self._client.close()
