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
    import torch

    # Unlike is_available, this does not initialise CUDA, so the trainer can fork.
    return "cuda" if torch.cuda.device_count() else "cpu"


def visible_devices() -> tuple[str, ...]:
    """Returns this process's GPUs, under the names of ``CUDA_VISIBLE_DEVICES``."""
    import torch

    return parse_visible_devices(
        os.environ.get(VISIBLE_DEVICES), torch.cuda.device_count()
    )


def parse_visible_devices(value: str | None, count: int) -> tuple[str, ...]:
    """Returns the visible GPUs in the order of ``cuda:0``, ``cuda:1``, ...

    Args:
        value: of ``CUDA_VISIBLE_DEVICES``; ``None`` where it is not set.
        count: number of GPUs that CUDA finds.

    Examples:
        >>> parse_visible_devices(None, 2)
        ('0', '1')
        >>> parse_visible_devices("3,GPU-5f2a", 2)
        ('3', 'GPU-5f2a')
    """
    if value is None:
        return tuple(str(index) for index in range(count))
    names = [name.strip() for name in value.split(",")]
    # CUDA ignores everything after the first name that it does not know.
    return tuple(name for name in names if name)[:count]
