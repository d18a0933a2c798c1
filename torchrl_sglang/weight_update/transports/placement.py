"""Servers that can open the memory of the weights, and those that share their GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.gpus import visible_devices
from torchrl_sglang.types import ServerPlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Facts that decide which transport ``"auto"`` takes."""

    device: str
    """Device of the weights, like ``"cuda:0"``."""
    gpu_names: frozenset[str] = frozenset()
    """Names of that GPU: its entry in ``CUDA_VISIBLE_DEVICES``, and its UUID; and those
    of the GPUs of other ranks that hold the weights, too."""
    servers: tuple[ServerPlacement, ...]
    """Placements of the servers."""
    pp_size: int
    """Pipeline stages of each server."""
    directory: str | None
    """Folder to which checkpoints can be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcAccess:
    """Whether a server can open the memory of the weights."""

    url: str
    """Address of the server."""
    opens: bool | None
    """Whether the server can; ``None`` where its visible GPUs are unknown."""
    shares: bool = False
    """Whether a rank of the server computes on the GPU of the weights."""
    reason: str = ""
    """Reason why the server cannot."""


def find_facts(
    engine: RLSGLangEngine,
    device: torch.device,
    *,
    directory: str | None = None,
    ranks: Sequence[frozenset[str]] = (),
) -> Topology:
    """Reads the engine and CUDA; ``ranks``: names of the GPUs of a trainer's ranks."""
    return Topology(
        device=str(device),
        gpu_names=names_of(device).union(*ranks),
        servers=engine.placements,
        pp_size=engine.capabilities.pp_size,
        directory=directory,
    )


def names_of(device: torch.device) -> frozenset[str]:
    """Returns the names of a GPU; none for a CPU."""
    if device.type != "cuda":
        return frozenset()
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = gpu_uuid(torch.device("cuda", index)).removeprefix("GPU-")
    return frozenset({*visible_devices()[index : index + 1], f"GPU-{uuid}"})


@functools.cache
def gpu_uuid(device: torch.device) -> str:
    """Returns the UUID of a GPU, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def reach_of(server: ServerPlacement, facts: Topology) -> IpcAccess:
    """Returns whether a server can open the memory of the weights. Pure."""
    if server.device not in ("cuda", None):
        reason = f"It computes on {server.device!r}."
    elif not server.local:
        reason = "It runs on another machine."
    elif server.visible_gpus is None:
        return IpcAccess(url=server.url, opens=None)
    elif any(is_one_of(name, facts.gpu_names) for name in server.visible_gpus):
        shares = any(is_one_of(name, facts.gpu_names) for name in server.gpus or ())
        return IpcAccess(url=server.url, opens=True, shares=shares)
    else:
        reason = f"It sees the GPUs {', '.join(server.visible_gpus) or 'none'} only."
    return IpcAccess(url=server.url, opens=False, reason=reason)


def is_one_of(name: str, names: frozenset[str]) -> bool:
    """Returns whether a name of a GPU is one of its names."""
    # A UUID can be abbreviated.
    is_uuid = name.startswith("GPU-")
    return name in names or (is_uuid and any(other.startswith(name) for other in names))
