"""Broadcasts of several tensors at once, as their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int = 1 << 30,
    num_buffers: int = 2,
) -> None:
    parts: list[torch.Tensor] = []
    for item in iterator:
        value = post_iter_func(item).detach().contiguous()
        parts.append(value.view(torch.uint8).view(-1))
        if sum(map(len, parts)) > buffer_size_bytes:
            group.broadcast(torch.cat(parts), src)
            parts = []
    if parts:
        group.broadcast(torch.cat(parts), src)
