"""RayLauncher: where on a Ray cluster servers run, and what they reserve."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torchrl_sglang.backends.launch.gpus import devices_per_server
from torchrl_sglang.backends.launch.launcher import ParallelStart
from torchrl_sglang.backends.launch.local import counted_specs, known_arguments
from torchrl_sglang.backends.launch.paths import absolute_paths
from torchrl_sglang.backends.launch.process import START_TIMEOUT_SECONDS
from torchrl_sglang.backends.launch.ray_placement import (
    Bundle,
    Demand,
    Seats,
    choose_seats,
    own_seats,
    shortage,
)
from torchrl_sglang.backends.launch.ray_servers import Place, RayServers, Reserved
from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.support.checks import (
    check_count,
    check_mapping,
    check_seconds,
    to_python,
)
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.urls import is_loopback

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

PLACEMENT_SECONDS = 120.0
"""Default timeout for Ray to place the servers."""

KEY_BYTES = 32
"""Random bytes of a generated key."""

REPORT_SECONDS = 5.0
"""Timeout for the nodes to report what is free in a placement group."""

REPORT_INTERVAL_SECONDS = 0.3
"""Nodes report changes within 0.1 s."""

ASSIGNED: Mapping[str, str] = {
    "base_gpu_id": "Ray assigns the GPUs",
    "gpu_id_step": "Ray assigns the GPUs",
    "cuda_devices": "Ray assigns the GPUs",
    "node_rank": "each node of a server gets its own",
    "dist_init_addr": "it is on the first node of each server",
    "host": "each server listens on the address that its node has in the cluster",
}
"""Arguments of a server that follow from where it runs, and why."""


@dataclass(frozen=True, kw_only=True)
class RayLauncher:
    """Places the servers of an engine on the nodes of a Ray cluster.

    Each server is a process tree below an actor on its node; a server with ``nnodes=2``
    has an actor on each of two nodes, and SGLang's ``node_rank`` and ``dist_init_addr``
    are set; it does not start if Ray places both on one. GPUs are reserved in a
    placement group, and a server uses those that Ray assigns. It listens on its node's
    address in the cluster. Beyond loopback, it asks for ``api_key``, which is generated
    if none is given; the engine and its copies know it. The router runs on the driver's
    node.

    Servers end with :meth:`.AsyncSGLang.shutdown`, with the driver, and with their
    node. A server whose node is lost starts again on another one that has room, at a
    new address.

    Every node needs this package and the model, under the same path or as a hub name,
    and SGLang in the interpreter that runs Ray, or in the one that ``python=`` names.

    Args:
        placement_group: a :class:`ray.util.placement_group.PlacementGroup` to use, such
            as one that a trainer is in, too. The GPUs of a server may be in several of
            its bundles, on one node. By default a group is made, with a bundle for each
            node of each server, and removed at the end.
        bundles: indexes of the bundles that servers may use. By default all that have
            room.
        strategy: how Ray spreads the servers: ``"PACK"`` on as few nodes as
            possible, ``"STRICT_PACK"`` on one, ``"SPREAD"`` on as many as possible,
            ``"STRICT_SPREAD"`` each, and each part of one with ``nnodes=2``, on a node
            of its own. Defaults to ``"STRICT_SPREAD"`` with ``nnodes=2`` or more, and
            to ``"PACK"`` otherwise.
        gpu_fraction: share of each of its GPUs that a server reserves, such as 0.2
            beside a trainer that reserves 0.8 in the same bundle, with which it
            exchanges weights over CUDA IPC. Set ``mem_fraction_static`` to fit.
        resources: what a server reserves on each of its nodes beside GPUs, such as
            ``{"CPU": 8}``. Defaults to one CPU, and to nothing in a given
            ``placement_group``. A server on CPU uses as many threads.
        nodes: the nodes that servers may run on: addresses, names or Ray's ids.
        runtime_env: Ray's runtime environment of the actors, such as
            ``{"env_vars": {"HF_HOME": "/shared"}}``; servers inherit it.
        placement_timeout: for Ray to place the servers, in seconds; more where a
            cluster grows on demand.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> launcher = RayLauncher(strategy="SPREAD", resources={"CPU": 8})
        >>> engine = AsyncSGLang.from_pretrained(  # doctest: +SKIP
        ...     "Qwen/Qwen2.5-7B", num_replicas=8, tp_size=2, launcher=launcher
        ... )
    """

    placement_group: Any = None
    bundles: Sequence[int] | None = None
    strategy: Strategy | None = None
    gpu_fraction: float = 1.0
    resources: Mapping[str, float] | None = None
    nodes: Sequence[str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    placement_timeout: float = PLACEMENT_SECONDS

    def __post_init__(self) -> None:
        strategies = get_args(Strategy)
        if self.strategy not in (None, *strategies):
            raise ConfigurationError(
                f"strategy={self.strategy!r} is none of {', '.join(strategies)}."
            )
        given = self.placement_group is not None
        for name in ("strategy", "nodes") if given else ("bundles",):
            if getattr(self, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is for a placement group that "
                    f"{'the launcher makes' if given else 'is given'}; leave it out."
                )
        fraction = to_python(self.gpu_fraction)
        if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ConfigurationError(
                f"gpu_fraction must be above 0 and at most 1, got {fraction!r}."
            )
        check_seconds("placement_timeout", self.placement_timeout)
        _check_resources(self.resources)
        if self.runtime_env is not None:
            check_mapping("runtime_env", self.runtime_env)
        for name in ("nodes", "bundles"):
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is a string; give a list."
                )

    def bind(
        self,
        num_replicas: int,
        spec: Mapping[str, Any],
        *,
        start_timeout: float = START_TIMEOUT_SECONDS,
        parallel: ParallelStart = None,
        cuda_devices: Sequence[Any] | None = None,
    ) -> RayServers:
        """Has Ray place servers with these arguments, and starts none of them.

        Raises:
            ConfigurationError: if an argument is wrong, here or on a node.
            ServerStartError: if Ray does not place the servers in time.
        """
        if cuda_devices is not None:
            raise ConfigurationError(
                f"cuda_devices={cuda_devices!r} is for launcher='local': Ray assigns "
                f"the GPUs; leave it out, or give RayLauncher(placement_group=...)."
            )
        check_count("num_replicas", num_replicas)
        known = known_arguments(spec)
        _check_arguments(known)
        if parallel not in (None, True, False):
            raise ConfigurationError(
                f"parallel_start={parallel!r} is for launcher='local'; with Ray, "
                f"servers start all at once (True) or one after the other (False)."
            )
        start_timeout = check_seconds("start_timeout", start_timeout)
        ray = connect()
        device = spec.get("device")
        if device is None:
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        demand = self._demand(known, device)
        api_key = spec.get("api_key")
        if api_key is None:
            api_key = make_key(node["NodeManagerAddress"] for node in ray.nodes())
        own = {**absolute_paths(spec), "device": device, "api_key": api_key}
        if device == "cpu":
            threads = str(max(1, int(demand.resources.get("CPU", 1))))
            limit = {"OMP_NUM_THREADS": threads}
            own["environment"] = {**limit, **(spec.get("environment") or {})}
        specs = counted_specs(num_replicas, own)
        # Last, because from here on the servers release what is reserved.
        reserved = self._reserve(ray, demand, num_replicas)
        return RayServers(
            specs,
            reserved.seats,
            Place(
                group=reserved.group,
                runtime_env=self.runtime_env,
                timeout=self.placement_timeout,
                demand=demand,
            ),
            start_timeout=start_timeout,
            at_once=1 if parallel is False else num_replicas,
            api_key=api_key,
            release=reserved.release,
            make_spec=lambda rank: counted_specs(1, own, first=rank)[0],
            reserve=partial(self._reserve, ray, demand, 1),
        )

    def _demand(self, known: Mapping[str, Any], device: str) -> Demand:
        default = {} if self.placement_group is not None else {"CPU": 1.0}
        return Demand(
            nodes=int(known.get("nnodes") or 1),
            gpus=devices_per_server(known) if device == "cuda" else 0,
            gpu_fraction=float(self.gpu_fraction),
            resources=default if self.resources is None else self.resources,
        )

    def _reserve(self, ray: Any, demand: Demand, count: int) -> Reserved:
        """Has Ray reserve what servers take."""
        if self.placement_group is not None:
            seats = self._take(ray, demand, count)
            return Reserved(
                group=self.placement_group, seats=seats, release=lambda: None
            )
        seats = own_seats(demand, count)
        bundles = [demand.as_bundle()] * (count * demand.nodes)
        # Tests of what is missing are cheap here; Ray waits for it to appear.
        here = {
            node["NodeManagerAddress"]: node["Resources"]
            for node in self._allowed(ray.nodes())
        }
        if (missing := shortage(bundles, here)) is not None:
            torchrl_logger.warning(
                f"{missing} Waiting up to {self.placement_timeout:g} s for more."
            )
        options: dict[str, Any] = {}
        if self.nodes is not None:
            ids = ",".join(node["NodeID"] for node in self._allowed(ray.nodes()))
            selector = {"ray.io/node-id": f"in({ids})"}
            options["bundle_label_selector"] = [selector] * len(bundles)
        group = ray.util.placement_group(
            bundles,
            strategy=self.strategy or ("STRICT_SPREAD" if demand.nodes > 1 else "PACK"),
            **options,
        )
        return Reserved(group=group, seats=seats, release=partial(_remove, group))

    def _allowed(self, nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the living nodes that servers may run on."""
        alive = [node for node in nodes if node["Alive"]]
        if self.nodes is None:
            return alive
        names = ("NodeManagerAddress", "NodeName", "NodeID")
        for wanted in self.nodes:
            if not any(wanted in map(node.get, names) for node in alive):
                known = ", ".join(node["NodeManagerAddress"] for node in alive)
                raise ConfigurationError(
                    f"nodes: no alive node of the cluster is named {wanted!r}; alive: "
                    f"{known}."
                )
        return [n for n in alive if any(n.get(name) in self.nodes for name in names)]

    def _take(self, ray: Any, demand: Demand, count: int) -> list[Seats]:
        """Returns seats in the user's placement group."""
        from ray.util.placement_group import PlacementGroup

        group = self.placement_group
        if not isinstance(group, PlacementGroup):
            raise ConfigurationError(
                f"placement_group={group!r} is not one of Ray's; make it with "
                f"ray.util.placement_group(bundles)."
            )
        if ray.util.placement_group_table(group).get("state") == "REMOVED":
            raise ConfigurationError(
                f"The placement_group {group.id.hex()} was removed; make another one."
            )
        if not group.wait(self.placement_timeout):
            raise ServerStartError(
                f"Ray has not placed the placement_group within "
                f"{self.placement_timeout:g} s."
            )
        bundles = read_bundles(ray, group)
        if self.bundles is not None:
            unknown = set(self.bundles) - {bundle.index for bundle in bundles}
            if unknown:
                raise ConfigurationError(
                    f"bundles={list(self.bundles)!r}: the placement_group has no "
                    f"bundle {min(unknown)}; it has {len(bundles)}, from 0."
                )
            bundles = [each for each in bundles if each.index in self.bundles]
        return choose_seats(bundles, demand, count)


def _check_resources(resources: object) -> None:
    if resources is None:
        return
    for name, amount in check_mapping("resources", resources).items():
        number = to_python(amount)
        if name == "GPU" or not isinstance(number, (int, float)) or number < 0:
            raise ConfigurationError(
                f"resources={resources!r}: give amounts like {{'CPU': 8}}; GPUs follow "
                f"from tp_size, and gpu_fraction= is the share of each."
            )
        if name == "object_store_memory":
            raise ConfigurationError(
                f"resources={resources!r}: servers keep nothing in Ray's object store; "
                f"leave object_store_memory out."
            )


def _check_arguments(known: Mapping[str, Any]) -> None:
    for name, why in ASSIGNED.items():
        if known.get(name) is not None:
            raise ConfigurationError(
                f"{name}={known[name]!r} cannot be given with a Ray launcher: {why}; "
                f"leave it out."
            )


def make_key(addresses: Iterable[str]) -> str | None:
    """Returns a new key if one of the nodes' addresses is on a network."""
    return None if all(map(is_loopback, addresses)) else secrets.token_hex(KEY_BYTES)


def connect() -> Any:
    """Returns the module ``ray``, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "A Ray launcher needs Ray, which is not installed here; pip install "
            "torchrl-sglang[ray]."
        ) from error
    if not ray.is_initialized():
        _init(ray)
    if ray.util.client.ray.is_connected():
        raise ConfigurationError(
            "This process uses the cluster through Ray Client (ray://...), from where "
            "servers and router are not reached; run it on a node of the cluster, as "
            "with `ray job submit`."
        )
    return ray


def _init(ray: Any) -> None:
    """Connects to a cluster; the caller's handler of SIGTERM stays."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init()
    in_main = threading.current_thread() is threading.main_thread()
    # Ray's handler is better than none: it ends the process with a clean-up.
    if in_main and handler not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, handler)


def read_bundles(ray: Any, group: Any) -> list[Bundle]:
    """Returns the bundles of a placement group, and what is free in them."""
    table = ray.util.placement_group_table(group)
    places: Mapping[int, str] = table["bundles_to_node_id"]
    sizes: Mapping[int, Mapping[str, float]] = table["bundles"]
    group_id = group.id.hex()
    deadline = time.monotonic() + REPORT_SECONDS
    before: object = None
    free: Mapping[str, float] = {}
    while time.monotonic() < deadline:
        free = {
            name: amount
            for name, amount in ray.available_resources().items()
            if name.endswith(group_id)
        }
        if free == before and all(
            f"bundle_group_{index}_{group_id}" in free for index in places
        ):
            break
        before = free
        time.sleep(REPORT_INTERVAL_SECONDS)
    return [
        Bundle(
            index=index,
            node=node,
            size=sizes[index],
            free={
                name: free.get(f"{name}_group_{index}_{group_id}", 0.0)
                for name in sizes[index]
            },
        )
        for index, node in sorted(places.items())
    ]


def _remove(group: Any) -> None:
    import ray

    if ray.is_initialized():
        ray.util.remove_placement_group(group)
