"""The existing GPUs, the visible GPUs, and the GPUs of each server.

They are counted without initializing CUDA: the trainer can still fork.

A server is confined to its GPUs with ``CUDA_VISIBLE_DEVICES``, not with SGLang's
``base_gpu_id`` and ``gpu_id_step``: those select evenly spaced GPUs only, let every
process of the server open a context on the trainer's GPU, and support no UUIDs. NCCL
(since CUDA 10.1) reaches GPUs hidden from its own process: between two H200s a
broadcast runs at 367 GB/s whether or not each side sees the other's.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count

_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")

_SIZES = ("tp_size", "pp_size", "dp_size", "nnodes")

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def devices_per_server(arguments: Mapping[str, Any]) -> int:
    """Returns a server's number of GPUs on this machine."""
    tensor, pipeline, data, nodes = check_sizes(arguments)
    # Data-parallel attention shares the tensor-parallel GPUs; plain copies do not.
    copies = 1 if arguments.get("enable_dp_attention") else data
    total = tensor * pipeline * copies
    if total % nodes:
        raise ConfigurationError(
            f"{total} GPUs (tp_size times pp_size) do not divide among nnodes={nodes}."
        )
    return total // nodes


def check_sizes(arguments: Mapping[str, Any]) -> list[int]:
    """Returns ``tp_size``, ``pp_size``, ``dp_size`` and ``nnodes``, by default 1."""
    return [_size(name, arguments.get(name)) for name in _SIZES]


def _size(name: str, value: Any) -> int:
    if value is None:
        return 1
    # A command line and a configuration file may give it as a string.
    digits = isinstance(value, str) and value.isdigit()
    return check_count(name, int(value) if digits else value)


def assign_devices(
    num_replicas: int,
    size: int = 1,
    cuda_devices: Sequence[Any] | None = None,
    *,
    available: Sequence[str],
) -> list[tuple[str, ...]]:
    """Returns the GPUs of each server, under the names of ``CUDA_VISIBLE_DEVICES``.

    By default servers take the last of the ``available`` GPUs, each a group of
    neighbours: a trainer counts from ``cuda:0``. ``cuda_devices`` are the GPUs for all
    servers, like ``[4, 5, 6, 7]``, or a group for each, like ``[[4, 5], [6, 7]]``;
    groups may share GPUs. An integer, ``"cuda:4"`` and a :class:`torch.device` are the
    trainer's ``cuda:4``; any other string is a name for ``CUDA_VISIBLE_DEVICES``, such
    as a UUID, also of a GPU invisible to the trainer.
    """
    needed = num_replicas * size
    reason = (
        f"{num_replicas} server{'s' * (num_replicas > 1)} with {size} GPU"
        f"{'s' * (size > 1)} each need {needed} GPU{'s' * (needed > 1)}"
    )
    if cuda_devices is None:
        if needed > len(available):
            raise ConfigurationError(
                f"{reason}, and {_shown(available)}. Ask for fewer replicas or a "
                f"smaller tp_size, make more GPUs visible, or let servers share them "
                f"with cuda_devices=[[0], [0]]."
            )
        return _split(available[len(available) - needed :], size)
    devices = list(cuda_devices)
    if all(isinstance(item, (list, tuple)) for item in devices):
        groups = [_names(group, available) for group in devices]
    else:
        groups = _split(_names(devices, available), size)
    if [len(group) for group in groups] != [size] * num_replicas:
        raise ConfigurationError(
            f"cuda_devices={devices!r} is neither {needed} GPU{'s' * (needed > 1)} nor "
            f"{num_replicas} group{'s' * (num_replicas > 1)} of {size}; {reason}."
        )
    return groups


def device_environment(
    devices: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns variables to confine a server to GPUs; none: all visible GPUs."""
    # Both ends of a communicator must agree, and SGLang's own default is 0.
    variables = {"NCCL_CUMEM_ENABLE": environment.get("NCCL_CUMEM_ENABLE", "0")}
    if devices:
        variables[VISIBLE_DEVICES] = ",".join(devices)
    return variables


def _split(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(names[start : start + size]) for start in range(0, len(names), size)]


def _names(given: Iterable[Any], available: Sequence[str]) -> tuple[str, ...]:
    names = tuple(_name(item, available) for item in given)
    if len(set(names)) != len(names):
        raise ConfigurationError(
            f"The GPUs {', '.join(names)} hold one twice; a server takes each of its "
            f"GPUs once. To let two servers share one, give cuda_devices as groups."
        )
    return names


def _name(item: Any, available: Sequence[str]) -> str:
    text = str(item)
    index = text.removeprefix("cuda:")
    if isinstance(item, str) and _GPU_NAME.fullmatch(text):
        return text
    if not index.isdigit() or isinstance(item, bool):
        raise ConfigurationError(
            f"{item!r} is not a GPU; give an index like 4, 'cuda:4', or a UUID."
        )
    if int(index) >= len(available):
        raise ConfigurationError(f"There is no cuda:{index}: {_shown(available)}.")
    return available[int(index)]


def _shown(available: Sequence[str]) -> str:
    names = ",".join(available) or "none"
    return f"{len(available)} are visible here ({VISIBLE_DEVICES}: {names})"


def query_gpus(*fields: str) -> list[tuple[str, ...]]:
    """Returns fields of each GPU of this machine; none if nvidia-smi is unavailable.

    ``nvidia-smi --help-query-gpu`` has their names; memory is in MiB.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60.0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [tuple(line.split(", ")) for line in done.stdout.splitlines()]
    # It may warn of a GPU in a line between them.
    return [row for row in rows if len(row) == len(fields)]


def default_device() -> str:
    """Returns ``"cuda"`` where there is a GPU, and ``"cpu"`` elsewhere."""
    return "cuda" if _count_devices() else "cpu"


def visible_devices() -> tuple[str, ...]:
    """Returns this process's GPUs, under the names of ``CUDA_VISIBLE_DEVICES``."""
    return parse_visible_devices(os.environ.get(VISIBLE_DEVICES), _count_devices())


def free_devices(visible: Sequence[str], taken: Collection[str]) -> list[str]:
    """Returns the visible GPUs without a server and without memory of this process."""
    import torch

    # Neither call initializes CUDA.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [
        name
        for index, name in enumerate(visible)
        if name not in taken and not (used and torch.cuda.memory_reserved(index))
    ]


def _count_devices() -> int:
    import torch

    # Unlike is_available, this does not initialise CUDA, so the trainer can fork.
    return torch.cuda.device_count()


def parse_visible_devices(value: str | None, count: int) -> tuple[str, ...]:
    """Returns the visible GPUs in the order of ``cuda:0``, ``cuda:1``, ...

    ``value`` is the value of ``CUDA_VISIBLE_DEVICES``, and CUDA finds ``count`` GPUs.
    """
    if value is None:
        return tuple(str(index) for index in range(count))
    names = [name.strip() for name in value.split(",")]
    # CUDA ignores everything after the first unknown name.
    return tuple(name for name in names if name)[:count]
