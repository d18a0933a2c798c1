"""Pickled handles of a GPU's memory: the content of the requests of ``cuda_ipc``.

Only handles travel, in a pickle with a short list of allowed types.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
from torch.multiprocessing import reductions

from torchrl_sglang.weight_update.transports.placement import gpu_uuid
from torchrl_sglang.weight_update.weights import (
    Bucket,
    NamedTensors,
    TensorSpec,
    flatten,
)

LoadFormat: TypeAlias = Literal["flattened_bucket", "torchrl_sglang_loader.load"] | None

_DEVICE, _WAIT = 6, -1
"""Positions in the arguments of ``rebuild_cuda_tensor`` of the GPU's index, and of
whether the receiver has to wait for an event of the sender."""


@dataclass(kw_only=True, slots=True)
class Content:
    """The content of one request, and the memory that servers read."""

    value: Any
    num_tensors: int
    load_format: LoadFormat = None
    aliases: list[torch.Tensor] = field(default_factory=list)
    """Tensors that keep the memory until servers have read it."""
    entries: list[str] | None = None
    """Text for each rank of each server, where several ranks of a trainer made it."""


def named(specs: Sequence[TensorSpec], tensors: NamedTensors) -> Content:
    """Makes the content of tensors in their own memory."""
    value = [(spec.name, tensors[spec.name].detach()) for spec in specs]
    return Content(value=value, num_tensors=len(value))


def flat_content(bucket: Bucket, flat: torch.Tensor) -> Content:
    """Makes the content of tensors in one flat run of bytes.

    SGLang reads these attributes of each (``FlattenedTensorMetadata`` in
    ``sglang/srt/weight_sync/tensor_bucket.py``), of an object of any kind.
    """
    metadata = [
        SimpleNamespace(
            name=spec.name,
            shape=tuple(spec.shape),
            dtype=spec.dtype,
            start_idx=offset,
            end_idx=offset + spec.num_bytes,
            numel=spec.num_bytes,
        )
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
    ]
    return Content(
        value={"flattened_tensor": flat, "metadata": metadata},
        num_tensors=len(metadata),
        load_format="flattened_bucket",
    )


def content_of(
    bucket: Bucket, tensors: NamedTensors, device: torch.device, *, apart: bool
) -> Content:
    """Makes the content of a bucket, in new memory where a server cannot read it."""
    if all(is_ready(spec, tensors[spec.name], device) for spec in bucket.specs):
        return named(bucket.specs, tensors)
    flat = flatten(bucket, tensors, device)
    if apart:
        return named(bucket.specs, bucket.view(flat))
    return flat_content(bucket, flat)


def is_ready(spec: TensorSpec, tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns whether a server can copy from a tensor itself."""
    return (
        device.type == "cuda"
        and tensor.dtype == spec.dtype
        and tensor.device == device
        and tensor.is_contiguous()
    )


def pack(content: Any) -> tuple[str, list[torch.Tensor]]:
    """Pickles content for one rank; returns it, and aliases to keep until it is read.

    Values must be complete on their devices before the text is sent.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    return base64.b64encode(buffer.getbuffer()).decode("ascii"), pickler.aliases


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.aliases: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cuda":
            return NotImplemented
        alias = _alias(obj)
        self.aliases.append(alias)
        rebuild, arguments = reductions.reduce_tensor(alias)  # type: ignore[no-untyped-call]
        changed = list(arguments)
        # Processes number their GPUs differently. SGLang takes UUIDs, too.
        changed[_DEVICE] = gpu_uuid(obj.device)
        # Opening an event takes longer than a small tensor, and this process waits.
        changed[_WAIT] = False
        return rebuild, tuple(changed)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias that does not own the memory.

    Sharing adds a count of receivers to a storage for as long as it lives, for a
    parameter one with every update.
    """
    storage = tensor.untyped_storage()
    alias_storage = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(alias_storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return alias


def memory_of(tensor: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """Returns the IPC handle of a tensor's memory, for JSON, and an alias to keep.

    The alias must live until a server has opened the memory.
    """
    alias = _alias(tensor)
    _, arguments = reductions.reduce_tensor(alias)  # type: ignore[no-untyped-call]
    _, shape, stride, offset, _, dtype, _, handle, size, start, *sync = arguments
    _, counter, counter_offset, event, _ = sync
    facts = [
        gpu_uuid(tensor.device),
        str(dtype).removeprefix("torch."),
        *(list(shape), list(stride), offset, bytes(handle).hex(), size, start),
        *(bytes(counter).hex(), counter_offset, bytes(event).hex()),
    ]
    return facts, alias
