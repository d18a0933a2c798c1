"""Which servers can open the memory of the weights, and which share their GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from torchrl_sglang.backends.base import RLSGLangEngine, visible_devices
from torchrl_sglang.types import ServerPlacement

__all__ = ["Facts", "Reach", "find_facts", "gpu_uuid", "reach_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that decide which transport ``"auto"`` takes."""

    device: str
    """Where the weights are, like ``"cuda:0"``."""
    gpu_names: frozenset[str] = frozenset()
    """Names of that GPU: its entry in ``CUDA_VISIBLE_DEVICES``, and its UUID."""
    servers: tuple[ServerPlacement, ...]
    """Where the servers are."""
    pp_size: int
    """Pipeline stages of each server."""
    directory: str | None
    """Where checkpoints can be written."""
    adapter: bool = False
    """The weights are a LoRA adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Whether a server can open the memory of the weights."""

    url: str
    """Address of the server."""
    opens: bool | None
    """Whether it can; ``None`` where its visible GPUs are unknown."""
    shares: bool = False
    """One of its ranks computes on the GPU of the weights."""
    why: str = ""
    """Why it cannot."""


def find_facts(
    engine: RLSGLangEngine,
    device: torch.device,
    *,
    directory: str | None = None,
    adapter: bool = False,
) -> Facts:
    """Asks the engine and CUDA."""
    return Facts(
        device=str(device),
        gpu_names=_names_of(device),
        servers=engine.placements,
        pp_size=engine.capabilities.pp_size,
        directory=directory,
        adapter=adapter,
    )


def _names_of(device: torch.device) -> frozenset[str]:
    if device.type != "cuda":
        return frozenset()
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = gpu_uuid(torch.device("cuda", index)).removeprefix("GPU-")
    return frozenset({*visible_devices()[index : index + 1], f"GPU-{uuid}"})


@functools.cache
def gpu_uuid(device: torch.device) -> str:
    """Returns the UUID of a GPU, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def reach_of(server: ServerPlacement, facts: Facts) -> Reach:
    """Returns whether a server can open the memory of the weights. Pure."""
    if server.device not in ("cuda", None):
        why = f"It computes on {server.device!r}."
        return Reach(url=server.url, opens=False, why=why)
    if not server.local:
        why = "It runs on another machine."
        return Reach(url=server.url, opens=False, why=why)
    if server.visible_gpus is None:
        return Reach(url=server.url, opens=None)
    sees = f"It sees the GPUs {', '.join(server.visible_gpus) or 'none'} only."
    opens = any(_is_same(name, facts.gpu_names) for name in server.visible_gpus)
    shares = any(_is_same(name, facts.gpu_names) for name in server.gpus or ())
    return Reach(url=server.url, opens=opens, shares=shares, why="" if opens else sees)


def _is_same(name: str, names: frozenset[str]) -> bool:
    # A UUID can be abbreviated.
    is_uuid = name.startswith("GPU-")
    return name in names or (is_uuid and any(known.startswith(name) for known in names))
