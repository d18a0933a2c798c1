"""Which GPUs each server gets: pure, but for one question to the driver.

A server is confined to its GPUs with ``CUDA_VISIBLE_DEVICES``, not with SGLang's
``base_gpu_id`` and ``gpu_id_step``. Those express evenly spaced groups only, leave
every process of the server free to open a context on the trainer's GPU, and know no
UUIDs. Since CUDA 10.1 NCCL reaches GPUs that its own process does not see: between two
H200s a broadcast runs at 367 GB/s whether or not each side sees the other's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.backends.support.checks import check_count
from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "VISIBLE_DEVICES",
    "Gpus",
    "assign_devices",
    "device_environment",
    "devices_per_server",
    "gpus_of_server",
    "parse_visible_devices",
    "visible_devices",
]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that confines a process to some GPUs."""

_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
"""What stands for one GPU in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The GPUs of one server, by the names that ``CUDA_VISIBLE_DEVICES`` takes."""

    gpus: tuple[str, ...] | None
    """Those of its ranks, in order; ``None`` where that is not known."""
    visible: tuple[str, ...] | None
    """Those that its processes see."""


def visible_devices() -> tuple[str, ...]:
    """Returns the trainer's GPUs, by the names that ``CUDA_VISIBLE_DEVICES`` takes.

    Their number comes from the management library where there is one: a context on a
    GPU, or an initialised CUDA that forbids to fork, is never made for it.
    """
    import torch

    return parse_visible_devices(
        os.environ.get(VISIBLE_DEVICES), torch.cuda.device_count()
    )


def parse_visible_devices(value: str | None, count: int) -> tuple[str, ...]:
    """Returns the visible GPUs in the order in which ``cuda:0, 1, ...`` number them.

    Args:
        value: of ``CUDA_VISIBLE_DEVICES``, ``None`` where it is not set.
        count: how many GPUs CUDA finds visible.

    Examples:
        >>> parse_visible_devices(None, 2)
        ('0', '1')
        >>> parse_visible_devices("3,GPU-5f2a", 2)
        ('3', 'GPU-5f2a')
    """
    if value is None:
        return tuple(str(index) for index in range(count))
    names = [name.strip() for name in value.split(",")]
    # CUDA stops at the first name that it does not know, so the first ones count.
    return tuple(name for name in names if name)[:count]


def devices_per_server(arguments: Mapping[str, Any]) -> int:
    """Returns how many GPUs of this machine a server with these arguments takes.

    Args:
        arguments: under SGLang's names.

    Raises:
        ConfigurationError: if its GPUs do not divide among its nodes.
    """
    sizes = {
        name: _positive(name, arguments.get(name) or 1)
        for name in ("tp_size", "pp_size", "dp_size", "nnodes")
    }
    # Data-parallel attention shares the tensor-parallel GPUs; plain copies do not.
    copies = 1 if arguments.get("enable_dp_attention") else sizes["dp_size"]
    total = sizes["tp_size"] * sizes["pp_size"] * copies
    if total % sizes["nnodes"]:
        raise ConfigurationError(
            f"{total} GPUs (tp_size times pp_size) do not divide among nnodes="
            f"{sizes['nnodes']}."
        )
    return total // sizes["nnodes"]


def assign_devices(
    num_replicas: int,
    tp_size: int = 1,
    pp_size: int = 1,
    cuda_devices: Sequence[Any] | None = None,
    *,
    available: Sequence[str],
) -> list[tuple[str, ...]]:
    """Returns the GPUs of each server. Pure.

    Without ``cuda_devices``, servers take the last of the visible GPUs, each a group of
    neighbours, so that the first ones are left for the trainer, which counts from
    ``cuda:0``.

    Args:
        num_replicas: how many servers there are.
        tp_size: GPUs that each layer is split over.
        pp_size: stages that the layers are split into.
        cuda_devices: the GPUs for all servers, in order, like ``[4, 5, 6, 7]``, or a
            group for each, like ``[[4, 5], [6, 7]]``. An integer, ``"cuda:4"`` and a
            :class:`torch.device` are the trainer's ``cuda:4``; any other string is what
            ``CUDA_VISIBLE_DEVICES`` takes, such as a UUID, and may name a GPU that the
            trainer does not see. Groups of different servers may share GPUs if they
            are given as groups.
        available: the visible GPUs; see :func:`visible_devices`.

    Returns:
        For each server, its GPUs as ``CUDA_VISIBLE_DEVICES`` takes them.

    Raises:
        ConfigurationError: if there are too few GPUs, or one is named that is not there
            or twice.

    Examples:
        >>> assign_devices(2, tp_size=2, available="01234567")
        [('4', '5'), ('6', '7')]
        >>> assign_devices(2, cuda_devices=[1, 0], available=["GPU-a", "GPU-b"])
        [('GPU-b',), ('GPU-a',)]
    """
    _positive("num_replicas", num_replicas)
    size = _positive("tp_size", tp_size) * _positive("pp_size", pp_size)
    needed = num_replicas * size
    why = (
        f"{num_replicas} server{'s' * (num_replicas > 1)} with tp_size={tp_size} and "
        f"pp_size={pp_size} need {needed} GPU{'s' * (needed > 1)}"
    )
    if cuda_devices is None:
        if needed > len(available):
            raise ConfigurationError(
                f"{why}, and {len(available)} are visible here "
                f"({VISIBLE_DEVICES}: {','.join(available) or 'none'}). Ask for fewer "
                f"replicas or a smaller tp_size, make more GPUs visible, or let "
                f"servers share them with cuda_devices=[[0], [0]]."
            )
        return _split(list(available)[len(available) - needed :], size)
    given = list(cuda_devices)
    grouped = [isinstance(item, (list, tuple)) for item in given]
    if any(grouped):
        if not all(grouped):
            raise ConfigurationError(
                f"cuda_devices={given!r} mixes GPUs and groups of them; give one group "
                f"for each server, or GPUs alone."
            )
        groups = [_names(group, available) for group in given]
        if [len(group) for group in groups] != [size] * num_replicas:
            raise ConfigurationError(
                f"cuda_devices={given!r} is not {num_replicas} group"
                f"{'s' * (num_replicas > 1)} of {size}; {why}."
            )
    else:
        names = _names(given, available)
        if len(names) != needed:
            raise ConfigurationError(
                f"cuda_devices={given!r} names {len(names)} GPUs; {why}."
            )
        groups = _split(names, size)
    return groups


def gpus_of_server(arguments: Mapping[str, Any], *, available: Sequence[str]) -> Gpus:
    """Returns the GPUs of a server with these arguments. Pure.

    Args:
        arguments: under SGLang's names, and ``cuda_devices``.
        available: the visible GPUs; see :func:`visible_devices`.

    Examples:
        >>> gpus_of_server({"base_gpu_id": 1, "tp_size": 2}, available="0123").gpus
        ('1', '2')
    """
    seen = tuple(arguments.get("cuda_devices") or available)
    first = int(arguments.get("base_gpu_id") or 0)
    step = int(arguments.get("gpu_id_step") or 1)
    places = [first + step * i for i in range(devices_per_server(arguments))]
    if int(arguments.get("nnodes") or 1) > 1 or max(places) >= len(seen):
        return Gpus(gpus=None, visible=seen)
    return Gpus(gpus=tuple(seen[place] for place in places), visible=seen)


def device_environment(
    devices: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that confine a server to its GPUs.

    Args:
        devices: its GPUs; none for all that the trainer sees.
        environment: the trainer's.
    """
    # Both ends of a communicator must agree, and SGLang's own default is 0; what the
    # trainer's user set holds for both.
    found = {"NCCL_CUMEM_ENABLE": environment.get("NCCL_CUMEM_ENABLE", "0")}
    if devices:
        found[VISIBLE_DEVICES] = ",".join(devices)
    return found


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
    if isinstance(item, str) and _NAME.fullmatch(text):
        return text
    if not index.isdigit() or isinstance(item, bool):
        raise ConfigurationError(
            f"{item!r} is not a GPU; give an index like 4, 'cuda:4', or a UUID."
        )
    if int(index) >= len(available):
        raise ConfigurationError(
            f"There is no cuda:{index}: {len(available)} GPUs are visible here "
            f"({VISIBLE_DEVICES}: {','.join(available) or 'none'})."
        )
    return available[int(index)]


def _positive(name: str, value: Any) -> int:
    # A command line and a configuration file may give it as a text.
    digits = isinstance(value, str) and value.isdigit()
    return check_count(name, int(value) if digits else value)
