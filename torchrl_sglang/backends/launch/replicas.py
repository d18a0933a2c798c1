"""From one server's arguments to those of N alike: what must differ, differs.

The result goes to :func:`~torchrl_sglang.backends.launch.server.start_servers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.backends.launch.gpus import (
    VISIBLE_DEVICES,
    Gpus,
    assign_devices,
    devices_per_server,
    gpus_of_server,
    visible_devices,
)
from torchrl_sglang.backends.launch.plan import default_device
from torchrl_sglang.backends.launch.server_command import translate_vllm_names
from torchrl_sglang.backends.support.checks import check_count
from torchrl_sglang.errors import ConfigurationError

__all__ = ["find_gpus", "replica_specs"]

COUNTED = ("random_seed", "seed", "port", "nccl_port", "grpc_port")
"""Arguments that are given for the first server, and count up from there.

With one seed, all servers would give the same answers to the same prompts.
"""


def replica_specs(
    num_replicas: int,
    spec: Mapping[str, Any],
    *,
    cuda_devices: Sequence[Any] | None = None,
    available: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Returns the arguments of each of several servers of one model.

    On CUDA, each gets GPUs of its own; see
    :func:`.gpus.assign_devices`. A seed or a port that is
    given is that of the first server, and counts up.

    Args:
        num_replicas: how many servers there are.
        spec: what they have in common, as :func:`make_sglang_server` takes it.
        cuda_devices: the GPUs for all, or a group of them for each.
        available: the visible GPUs. By default, those of this process.

    Raises:
        ConfigurationError: if there are too few GPUs, or an argument fits one server
            only.

    Examples:
        >>> spec = {"model": "m", "device": "cuda", "num_devices": 2, "seed": 7}
        >>> for own in replica_specs(2, spec, available="0123"):
        ...     print(own["cuda_devices"], own["seed"])
        ('0', '1') 7
        ('2', '3') 8
    """
    num_replicas = check_count("num_replicas", num_replicas)
    known = translate_vllm_names(
        {name: value for name, value in spec.items() if name != "model"}
    )
    device = known.get("device") or default_device()
    if num_replicas > 1:
        _check_shared(known)
    groups: Sequence[tuple[str, ...]] | None = None
    if device == "cuda" and known.get("base_gpu_id") is None:
        groups = assign_devices(
            num_replicas,
            devices_per_server(known),
            cuda_devices=cuda_devices,
            available=visible_devices() if available is None else available,
        )
    elif cuda_devices is not None:
        raise ConfigurationError(
            f"cuda_devices={cuda_devices!r} is for device='cuda' without base_gpu_id; "
            f"leave it out."
        )
    specs = [_counted(spec, index) for index in range(num_replicas)]
    for own, group in zip(specs, groups or (), strict=groups is not None):
        own["cuda_devices"] = group
    return specs


def find_gpus(
    spec: Mapping[str, Any], *, available: Sequence[str] | None = None
) -> Gpus:
    """Returns the GPUs of a server that is started with these arguments.

    Args:
        spec: one of :func:`replica_specs`.
        available: the visible GPUs. By default, those of this process.
    """
    known = translate_vllm_names({n: v for n, v in spec.items() if n != "model"})
    if (known.get("device") or default_device()) != "cuda":
        return Gpus(gpus=(), visible=())
    if VISIBLE_DEVICES in (known.get("environment") or {}):
        return Gpus(gpus=None, visible=None)
    return gpus_of_server(
        known, available=visible_devices() if available is None else available
    )


def _check_shared(known: Mapping[str, Any]) -> None:
    for name in ("base_gpu_id", "gpu_id_step", "nnodes", "node_rank"):
        if known.get(name) is not None:
            raise ConfigurationError(
                f"{name}={known[name]!r} is for one server, and there are several; "
                f"leave it out, or start each with make_sglang_server."
            )


def _counted(spec: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {
        name: int(value) + index if name in COUNTED and value is not None else value
        for name, value in spec.items()
    }
