"""The checks of a Ray cluster.

An actor without a CPU on each node looks at it and tries to reach the others, as a
server and a sender of weights would. Each question may fail by itself.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchrl_sglang.cli.doctor.checks import INSTALL, in_range
from torchrl_sglang.cli.doctor.machine import (
    Rows,
    find_model,
    missing_files,
    read_engine,
    read_gpus,
    read_json,
    read_requirements,
)
from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError

START_SECONDS = 60.0
"""Timeout for the actors to start, or to answer."""

REACH_SECONDS = 5.0
"""Timeout for a connection from node to node."""

AT_ONCE = 64
"""Connections that a node tries at the same time."""

SAME = "Install the same version on every node."
Cluster = SimpleNamespace
"""Result of :func:`look_at_cluster`."""


class Inspector:
    """The actor on a node."""

    listener: socket.socket

    def listen(self, address: str) -> int:
        """Listens on the node's address; returns the port."""
        self.listener = socket.create_server((address, 0), backlog=1024)
        return int(self.listener.getsockname()[1])

    def look(
        self,
        others: Sequence[tuple[str, int]],
        device: str,
        python: str | None,
        model: str | None,
    ) -> dict[str, Any]:
        """Returns what is on the node, and which others it cannot connect to."""
        from torchrl_sglang import __version__

        with ThreadPoolExecutor(AT_ONCE) as pool:
            reached = list(pool.map(_can_connect, others))
        folder = None if model is None else find_model(model)
        interpreter, packages, error = read_engine(device, python)
        return {
            "error": None,  # why it does not answer
            "unreached": [
                host for (host, _), ok in zip(others, reached, strict=True) if not ok
            ],
            "python": platform.python_version(),
            "package": __version__,
            "memory": read_gpus().memory,
            "sglang": packages.get("sglang"),
            "engine_python": interpreter,
            "engine_error": error,
            "has_model": folder is not None,
            "model_problem": None if folder is None else _problem(folder),
        }


def _can_connect(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _problem(folder: Path) -> str | None:
    """Returns why a model cannot be loaded."""
    try:
        read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        return str(error)
    return "weights are missing" if missing_files(folder) else None


def look_at_cluster(
    address: str, *, model: str | None, python: str | None, device: str | None
) -> Cluster:
    """Returns what was found on every node of a cluster.

    Raises:
        ConfigurationError: if Ray is not installed.
        ServerUnavailableError: if there is no cluster at the address.
    """
    ray = _connect(address)
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [
        SimpleNamespace(
            address=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    ]
    device = device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    actors = [_start(ray, node["NodeID"]) for node in alive]
    pairs = zip(actors, nodes, strict=True)
    ports = _ask(ray, [actor.listen.remote(node.address) for actor, node in pairs])
    found = zip(nodes, ports, strict=True)
    others = [(node.address, port) for node, port in found if isinstance(port, int)]
    looks = [actor.look.remote(others, device, python, model) for actor in actors]
    for node, seen in zip(nodes, _ask(ray, looks), strict=True):
        vars(node).update({"error": seen} if isinstance(seen, str) else seen)
    for actor in actors:
        ray.kill(actor)
    return Cluster(
        ray=ray.__version__,
        device=device,
        model=model,
        wanted=read_requirements().sglang,  # supported versions
        nodes=nodes,
    )


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "doctor --ray needs Ray, which is not installed; "
            "pip install torchrl-sglang[ray]."
        ) from error
    if not ray.is_initialized():
        try:
            # Where nobody listens, Ray would wait two minutes.
            host, _, port = address.rpartition(":")
            if host and port.isdigit() and "/" not in host:
                socket.create_connection((host, int(port)), REACH_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ServerUnavailableError(
                f"There is no Ray cluster at {address!r}: {reason} Start one with "
                f"`ray start --head`, or give its address."
            ) from error
    return ray


def _start(ray: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=strategy)(Inspector).remote()


def _ask(ray: Any, calls: Sequence[Any]) -> list[Any]:
    """Returns the answers; the reason, a text, where there is none."""
    answers: list[Any] = []
    deadline = time.monotonic() + START_SECONDS
    for call in calls:
        try:
            left = max(deadline - time.monotonic(), 0.0)
            answers.append(ray.get(call, timeout=left))
        except Exception as error:  # noqa: BLE001 - Ray's, of many kinds.
            lines = [line for line in str(error).splitlines() if line.strip()]
            answers.append(f"{type(error).__name__}: {(lines or ['no answer'])[-1]}")
    return answers


def _nodes(cluster: Cluster) -> Rows:
    gpus = sum(node.gpus for node in cluster.nodes)
    level = "problem" if cluster.device == "cuda" and not gpus else "ok"
    message = f"Ray {cluster.ray}, {len(cluster.nodes)} nodes, {gpus} GPUs."
    yield level, "ray", message, "Start nodes with GPUs, or give --device cpu."
    for node in cluster.nodes:
        check = f"node {node.address}"
        if node.error is not None:
            remedy = "Install this package there, for the Python that runs Ray."
            yield "problem", check, f"It does not answer: {node.error}.", remedy
            continue
        free = [f"{n} {f / 1024:.0f} of {t / 1024:.0f} GiB" for n, f, t in node.memory]
        about = f"{node.name}, {node.cpus} CPUs, {node.gpus} GPUs"
        yield "ok", check, f"{about}{''.join(f', {each} free' for each in free)}."


def _packages(cluster: Cluster) -> Rows:
    for check, name in (("package", "torchrl_sglang"), ("python", "Python")):
        versions = _by(cluster, check)
        if len(versions) > 1:
            yield "problem", check, f"{name} is {_tell(versions)}.", SAME
        elif versions:
            yield "ok", check, f"{name} {next(iter(versions))} on every node."


def _engines(cluster: Cluster) -> Rows:
    install = INSTALL[cluster.device]
    for node in _answered(cluster):
        if node.sglang is None:
            message = node.engine_error or f"{node.engine_python} has no sglang."
            remedy = f"Name an interpreter with --python, or {install} there."
            yield "problem", f"node {node.address}", message, remedy
    versions = _by(cluster, "sglang")
    missing = versions.pop(None, [])
    if len(versions) > 1:
        yield "warning", "engine", f"SGLang is {_tell(versions)}.", SAME
    wanted = cluster.wanted
    for version, addresses in versions.items():
        if not in_range(version, wanted):
            message = f"SGLang {version} on {', '.join(addresses)} is not in {wanted}."
            yield "warning", "engine", message, "Install a version that is."
        elif len(versions) == 1 and not missing:
            pythons = _by(cluster, "engine_python")
            where = next(iter(pythons)) if len(pythons) == 1 else _tell(pythons)
            yield "ok", "engine", f"SGLang {version} on every node, in {where}."


def _network(cluster: Cluster) -> Rows:
    cut_off = [node for node in _answered(cluster) if node.unreached]
    for node in cut_off:
        message = f"It cannot connect to {', '.join(node.unreached)}."
        remedy = "Open all TCP ports between the nodes of the cluster."
        yield "problem", f"node {node.address}", message, remedy
    if not cut_off and len(cluster.nodes) > 1:
        yield "ok", "network", "Each node reaches the others."


def _model(cluster: Cluster) -> Rows:
    if (model := cluster.model) is None:
        return
    absent = [node.address for node in _answered(cluster) if not node.has_model]
    if not absent:
        yield "ok", "model", f"{model} is on every node."
    elif model.startswith((".", "/", "~")):
        remedy = "Give a folder that all nodes share, or a name of the hub."
        yield "problem", "model", f"{model} is not on {', '.join(absent)}.", remedy
    else:
        remedy = "Each node downloads it at the first start; or share a folder."
        yield "warning", "model", f"{model} is not on {', '.join(absent)}.", remedy
    for node in _answered(cluster):
        if node.model_problem is not None:
            message = f"{model} cannot be loaded there: {node.model_problem}."
            remedy = "Give the folder that a model was saved to."
            yield "problem", f"node {node.address}", message, remedy


def _answered(cluster: Cluster) -> list[SimpleNamespace]:
    return [node for node in cluster.nodes if node.error is None]


def _by(cluster: Cluster, name: str) -> dict[Any, list[str]]:
    """Returns the addresses of the nodes by something that was found there."""
    found: dict[Any, list[str]] = {}
    for node in _answered(cluster):
        found.setdefault(getattr(node, name), []).append(node.address)
    return found


def _tell(values: Mapping[Any, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(at)}" for value, at in values.items())


CLUSTER_CHECKS = (_nodes, _packages, _engines, _network, _model)
"""The checks of a cluster, in the order of the report."""
