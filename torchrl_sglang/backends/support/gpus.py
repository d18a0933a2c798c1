"""The GPUs that this process sees, found without initialising CUDA."""

from __future__ import annotations

import os

__all__ = [
    "VISIBLE_DEVICES",
    "default_device",
    "parse_visible_devices",
    "visible_devices",
]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that confines a process to some GPUs."""


def default_device() -> str:
    """Returns ``"cuda"`` where there is a GPU, and ``"cpu"`` elsewhere."""
    return "cuda" if _count_devices() else "cpu"


def visible_devices() -> tuple[str, ...]:
    """Returns this process's GPUs, under the names of ``CUDA_VISIBLE_DEVICES``."""
    return parse_visible_devices(os.environ.get(VISIBLE_DEVICES), _count_devices())


def _count_devices() -> int:
    import torch

    # Unlike is_available, this does not initialise CUDA, so the trainer can fork.
    return torch.cuda.device_count()


def parse_visible_devices(value: str | None, count: int) -> tuple[str, ...]:
    """Returns the visible GPUs in the order of ``cuda:0``, ``cuda:1``, ...

    ``value`` is that of ``CUDA_VISIBLE_DEVICES``, and CUDA finds ``count`` GPUs.
    """
    if value is None:
        return tuple(str(index) for index in range(count))
    names = [name.strip() for name in value.split(",")]
    # CUDA ignores everything after the first name that it does not know.
    return tuple(name for name in names if name)[:count]
