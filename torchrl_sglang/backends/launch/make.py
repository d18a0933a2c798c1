"""The choice of a launcher: this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.backends.launch.launcher import Launcher
from torchrl_sglang.backends.launch.local import (
    LocalLauncher,
    ParallelStart,
    replica_specs,
)
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
from torchrl_sglang.errors import ConfigurationError


def make_launcher(
    launcher: object,
    num_replicas: int,
    spec: Mapping[str, Any],
    *,
    cuda_devices: Sequence[Any] | None,
    start_timeout: float,
    parallel: ParallelStart,
) -> Launcher:
    """Returns what starts the servers of an engine; see from_pretrained()."""
    if launcher == "local":
        return LocalLauncher(
            replica_specs(num_replicas, spec, cuda_devices=cuda_devices),
            start_timeout=start_timeout,
            parallel=parallel,
        )
    if launcher == "ray":
        launcher = RayLauncher()
    if not isinstance(launcher, RayLauncher):
        raise ConfigurationError(
            f"launcher={launcher!r} is neither 'local', 'ray' nor a RayLauncher."
        )
    if cuda_devices is not None:
        raise ConfigurationError(
            f"cuda_devices={cuda_devices!r} is for launcher='local': Ray assigns the "
            f"GPUs; leave it out, or give RayLauncher(placement_group=...)."
        )
    return launcher.bind(
        num_replicas, spec, start_timeout=start_timeout, parallel=parallel
    )
