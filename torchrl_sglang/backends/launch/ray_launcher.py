"""RayLauncher: how an engine's servers are placed on a Ray cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torchrl_sglang.backends.launch.gpus import devices_per_server
from torchrl_sglang.backends.launch.local import (
    ParallelStart,
    counted_specs,
    known_arguments,
)
from torchrl_sglang.backends.launch.process import START_TIMEOUT_SECONDS
from torchrl_sglang.backends.launch.ray_servers import Place, RayServers, Seat
from torchrl_sglang.backends.support.checks import check_mapping, check_seconds
from torchrl_sglang.backends.support.urls import is_loopback
from torchrl_sglang.errors import ConfigurationError

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

PLACEMENT_SECONDS = 120.0
"""Default timeout for Ray to place the servers."""

KEY_BYTES = 32
"""Random bytes of a generated key."""

ASSIGNED = ("base_gpu_id", "cuda_devices", "dist_init_addr", "gpu_id_step", "node_rank")
"""Arguments of a server that follow from its place."""


@dataclass(frozen=True, kw_only=True)
class RayLauncher:
    """Places the servers of an engine on the nodes of a Ray cluster."""

    placement_group: Any = None
    strategy: Strategy = "PACK"
    resources: Mapping[str, float] | None = None
    runtime_env: Mapping[str, Any] | None = None
    placement_timeout: float = PLACEMENT_SECONDS

    def __post_init__(self) -> None:
        strategies = get_args(Strategy)
        if self.strategy not in strategies:
            raise ConfigurationError(
                f"strategy={self.strategy!r} is none of {', '.join(strategies)}."
            )
        check_seconds("placement_timeout", self.placement_timeout)
        for name in ("resources", "runtime_env"):
            if getattr(self, name) is not None:
                check_mapping(name, getattr(self, name))

    def bind(
        self,
        num_replicas: int,
        spec: Mapping[str, Any],
        *,
        start_timeout: float = START_TIMEOUT_SECONDS,
        parallel: ParallelStart = None,
    ) -> RayServers:
        """Has Ray place servers with these arguments; starts none of them."""
        ray = connect()
        known = known_arguments(spec)
        device = spec.get("device")
        if device is None:
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        resources = {"CPU": 1.0, **(self.resources or {})}
        nodes = int(known.get("nnodes") or 1)
        gpus = devices_per_server(known) if device == "cuda" else 0
        specs = counted_specs(num_replicas, {**spec, "device": device})
        api_key = spec.get("api_key")
        addresses = [node["NodeManagerAddress"] for node in ray.nodes()]
        if api_key is None and not all(map(is_loopback, addresses)):
            api_key = secrets.token_hex(KEY_BYTES)
        for own in specs:
            own["api_key"] = api_key
            if device == "cpu":
                threads = {"OMP_NUM_THREADS": str(max(1, int(resources["CPU"])))}
                own["environment"] = {**threads, **(own.get("environment") or {})}
        bundle = {**resources, **({"GPU": gpus} if gpus else {})}
        group = ray.util.placement_group(
            [bundle] * (num_replicas * nodes), strategy=self.strategy
        )
        seats = [
            [
                [Seat(bundle=rank * nodes + node, gpus=gpus, resources=resources)]
                for node in range(nodes)
            ]
            for rank in range(num_replicas)
        ]
        return RayServers(
            specs,
            seats,
            Place(
                group=group,
                runtime_env=self.runtime_env,
                timeout=self.placement_timeout,
            ),
            start_timeout=start_timeout,
            at_once=num_replicas,
            api_key=api_key,
            release=partial(_remove, group),
        )


def connect() -> Any:
    """Returns the module ``ray``, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "launcher='ray' needs Ray, which is not installed; "
            "pip install torchrl-sglang[ray]."
        ) from error
    if not ray.is_initialized():
        ray.init()
    return ray


def _remove(group: Any) -> None:
    import ray

    if ray.is_initialized():
        ray.util.remove_placement_group(group)
