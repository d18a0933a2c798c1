"""Packs tensors as a server's process opens them: the pickle that ``cuda_ipc`` sends.

SGLang unpickles lists of (name, tensor), with a short list of allowed types. A tensor
on a GPU is pickled as a handle of its memory. A tensor on the CPU is pickled with its
values: handles of shared host memory need a helper process and leave files behind, and
kill a server that cannot open one.
"""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch
from torch.multiprocessing import reductions

from torchrl_sglang.weight_update.transports.placement import gpu_uuid

__all__ = ["pack"]

_DEVICE, _WAIT = 6, -1
"""Positions in the arguments of ``rebuild_cuda_tensor`` of the GPU's index, and of
whether the receiver has to wait for an event of the sender."""


def pack(content: Any) -> tuple[str, list[torch.Tensor]]:
    """Returns the text for one rank of a server, and what must live until it was read.

    Values must be complete on their devices before the text is sent.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    return base64.b64encode(buffer.getbuffer()).decode("ascii"), pickler.kept


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cuda":
            return NotImplemented
        # An alias that does not own the memory: sharing adds a count of receivers to
        # the storage for as long as it lives, for a parameter one with every update.
        storage = obj.untyped_storage()
        same = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), storage.device, storage.nbytes()
        )
        alias = torch.empty(0, dtype=obj.dtype, device=obj.device)
        alias.set_(same, obj.storage_offset(), obj.size(), obj.stride())
        self.kept.append(alias)
        rebuild, arguments = reductions.reduce_tensor(alias)  # type: ignore[no-untyped-call]
        changed = list(arguments)
        # Processes number their GPUs differently. SGLang takes UUIDs, too.
        changed[_DEVICE] = gpu_uuid(obj.device)
        # Opening an event takes longer than a small tensor, and this process waits.
        changed[_WAIT] = False
        return rebuild, tuple(changed)
