"""Where weights and servers are, found out for ``choose.py``."""

from __future__ import annotations

import torch

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.support.gpus import visible_devices
from torchrl_sglang.weight_update.transports.choose import Facts
from torchrl_sglang.weight_update.transports.handles import gpu_uuid

__all__ = ["find_facts"]


def find_facts(
    engine: RLSGLangEngine, device: torch.device, directory: str | None = None
) -> Facts:
    """Asks the engine and CUDA.

    Args:
        engine: the servers.
        device: where the weights are.
        directory: where checkpoints can be written.
    """
    return Facts(
        device=str(device),
        gpu_names=_names_of(device),
        servers=engine.placements,
        pp_size=engine.capabilities.pp_size,
        directory=directory,
    )


def _names_of(device: torch.device) -> frozenset[str]:
    if device.type != "cuda":
        return frozenset()
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = gpu_uuid(torch.device("cuda", index)).removeprefix("GPU-")
    visible = visible_devices()
    return frozenset({*visible[index : index + 1], f"GPU-{uuid}"})
