"""Tensors as a server's process opens them: the pickle that ``cuda_ipc.py`` sends.

SGLang reads pickles of lists of (name, tensor), and of what they may refer to it allows
little. A tensor on a GPU is written as a handle of its memory. A tensor on the CPU is
written with its values: handles of shared memory on the host need a helper process and
leave files behind, and a server that cannot open one ends.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
from typing import Any

import torch
from torch.multiprocessing import reductions

__all__ = ["gpu_uuid", "pack"]

_DEVICE, _WAIT = 6, -1
"""Where ``rebuild_cuda_tensor`` takes the GPU's index, and whether the receiver has to
wait for an event of the sender."""


def pack(content: Any) -> tuple[str, list[torch.Tensor]]:
    """Returns the text that one rank of a server opens, once.

    What was asked of the tensors' devices must be done before it is sent.

    Args:
        content: a list of names and tensors, or a flattened bucket; all tensors
            plain ones without gradient.

    Returns:
        The text, and what must be kept until the rank has let go of the tensors.

    Examples:
        >>> text, kept = pack([("a", torch.ones(2))])
        >>> pickle.loads(base64.b64decode(text))
        [('a', tensor([1., 1.]))]
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    return base64.b64encode(buffer.getbuffer()).decode("ascii"), pickler.kept


@functools.cache
def gpu_uuid(device: torch.device) -> str:
    """Returns the name of a GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cuda":
            return NotImplemented
        alias = _alias(obj)
        self.kept.append(alias)
        rebuild, arguments = reductions.reduce_tensor(alias)  # type: ignore[no-untyped-call]
        changed = list(arguments)
        # Processes number their GPUs differently. SGLang reads names, too.
        changed[_DEVICE] = gpu_uuid(obj.device)
        # Opening an event takes longer than a small tensor, and this process waits.
        changed[_WAIT] = False
        return rebuild, tuple(changed)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the same memory, which does not own it.

    Sharing wraps the storage that is shared in a count of its receivers, which stays as
    long as the storage does: for a parameter, one more with every update. An alias goes
    when the update ends.
    """
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), storage.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
