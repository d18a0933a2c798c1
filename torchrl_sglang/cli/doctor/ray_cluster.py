"""Facts about a Ray cluster, and what they mean for servers on it.

An actor without a CPU on each node reads the facts of its node and tries to reach the
others, as a server and a sender of weights would. Each question may fail by itself.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_sglang.cli.doctor.facts import (
    gather_engine,
    gather_gpus,
    gather_model,
    read_requirements,
)
from torchrl_sglang.cli.doctor.findings import INSTALL, Finding, Rows, in_range
from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError

START_SECONDS = 60.0
"""Timeout for the actors to start, or to answer."""

REACH_SECONDS = 5.0
"""Timeout for a connection from node to node."""

Node = dict[str, Any]
"""Facts about one node."""


class Inspector:
    """The actor on a node."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> int:
        """Listens on the node's address; returns the port."""
        self._listener = socket.create_server((address, 0), backlog=1024)
        return int(self._listener.getsockname()[1])

    def reach(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Returns the addresses that this node cannot connect to."""
        lost = []
        for address in others:
            try:
                socket.create_connection(address, REACH_SECONDS).close()
            except OSError:
                lost.append(address[0])
        return lost

    def facts(self, device: str, python: str | None, model: str | None) -> Node:
        """Returns what is installed on the node, its GPUs, and where the model is."""
        from torchrl_sglang import __version__

        gpus = gather_gpus()["gpus"]
        about = None if model is None else gather_model(model)
        return {
            "python": platform.python_version(),
            "package": __version__,
            # Name, free MiB, total MiB
            "gpus": [list(gpu) for gpu in gpus],
            **gather_engine(device, python),
            "model_folder": None if about is None else _text(about.folder),
            "model_error": None if about is None else about.config_error,
            "model_incomplete": bool(getattr(about, "missing_files", None)),
        }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def gather_cluster(
    address: str,
    *,
    model: str | None = None,
    python: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Returns the facts about every node of a cluster.

    Raises:
        ConfigurationError: if Ray is not installed.
        ServerUnavailableError: if there is no cluster at the address.
    """
    ray = _connect(address)
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())
    alive = [node for node in ray.nodes() if node["Alive"]]
    if device is None:
        device = "cuda" if any(_gpus(node) for node in alive) else "cpu"
    found: list[Node] = [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "name": node["NodeManagerHostname"],
            "cpus": int(node["Resources"].get("CPU", 0)),
            "ray_gpus": _gpus(node),
        }
        for node in alive
    ]
    actors = [_start(ray, node) for node in found]
    ports = _ask(
        ray, [a.listen.remote(n["address"]) for a, n in zip(actors, found, strict=True)]
    )
    listening = [
        (node["address"], port)
        for node, port in zip(found, ports, strict=True)
        if isinstance(port, int)
    ]
    lost = _ask(ray, [actor.reach.remote(listening) for actor in actors])
    facts = _ask(ray, [actor.facts.remote(device, python, model) for actor in actors])
    for node, unreached, own in zip(found, lost, facts, strict=True):
        node["unreached"] = unreached if isinstance(unreached, list) else []
        node["error"] = own if isinstance(own, str) else None
        node.update(own if isinstance(own, Mapping) else {})
    for actor in actors:
        ray.kill(actor)
    return {
        "ray": ray.__version__,
        "device": device,
        "model": model,
        "engine_required": read_requirements()[2],
        "nodes": found,
    }


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
            _check_listens(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ServerUnavailableError(
                f"There is no Ray cluster at {address!r}: {reason} Start one with "
                f"`ray start --head`, or give its address."
            ) from error
    return ray


def _check_listens(address: str) -> None:
    """Raises OSError if nobody is there, for which Ray would wait two minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()


def _gpus(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _start(ray: Any, node: Node) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node["id"], soft=False)
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


def judge_cluster(cluster: Mapping[str, Any]) -> list[Finding]:
    """Returns all findings about the facts of :func:`gather_cluster`. Pure."""
    checks = (_nodes, _packages, _engines, _reach, _models)
    findings = [Finding(*row) for check in checks for row in check(cluster)]
    return [each._replace(remedy="") if each[0] == "ok" else each for each in findings]


def _answered(cluster: Mapping[str, Any]) -> list[Node]:
    return [node for node in cluster["nodes"] if node["error"] is None]


def _nodes(cluster: Mapping[str, Any]) -> Rows:
    nodes = cluster["nodes"]
    gpus = sum(node["ray_gpus"] for node in nodes)
    message = f"Ray {cluster['ray']}, {len(nodes)} nodes, {gpus} GPUs."
    if cluster["device"] == "cuda" and not gpus:
        yield "problem", "ray", message, "Start nodes with GPUs, or give --device cpu."
    else:
        yield "ok", "ray", message
    for node in nodes:
        check = f"node {node['address']}"
        if node["error"] is not None:
            message = f"It does not answer: {node['error']}."
            remedy = "Install this package there, for the Python that runs Ray."
            yield "problem", check, message, remedy
            continue
        free = [f"{n} {f / 1024:.0f} of {t / 1024:.0f} GiB" for n, f, t in node["gpus"]]
        about = f"{node['name']}, {node['cpus']} CPUs, {node['ray_gpus']} GPUs"
        yield "ok", check, f"{about}{''.join(f', {each} free' for each in free)}."


def _packages(cluster: Mapping[str, Any]) -> Rows:
    rows = (("package", "torchrl_sglang", "package"), ("python", "Python", "python"))
    for check, name, key in rows:
        versions = _by(_answered(cluster), lambda node, key=key: node[key])
        if len(versions) > 1:
            remedy = "Install the same version on every node."
            yield "problem", check, f"{name} is {_tell(versions)}.", remedy
        elif versions:
            yield "ok", check, f"{name} {next(iter(versions))} on every node."


def _engines(cluster: Mapping[str, Any]) -> Rows:
    missing = False
    for node in _answered(cluster):
        if node["engine_packages"].get("sglang") is None:
            missing = True
            python = node["engine_python"]
            message = node["engine_error"] or f"{python} has no sglang."
            install = INSTALL[cluster["device"]]
            remedy = f"Name an interpreter with --python, or {install} there."
            yield "problem", f"node {node['address']}", message, remedy
    nodes = [n for n in _answered(cluster) if n["engine_packages"].get("sglang")]
    versions = _by(nodes, lambda node: node["engine_packages"]["sglang"])
    if len(versions) > 1:
        remedy = "Install the same version on every node."
        yield "warning", "engine", f"SGLang is {_tell(versions)}.", remedy
    wanted = cluster["engine_required"]
    for version, addresses in versions.items():
        if not in_range(version, wanted):
            message = f"SGLang {version} on {', '.join(addresses)} is not in {wanted}."
            yield "warning", "engine", message, "Install a version that is."
        elif len(versions) == 1 and not missing:
            pythons = _by(nodes, lambda node: node["engine_python"])
            where = next(iter(pythons)) if len(pythons) == 1 else _tell(pythons)
            yield "ok", "engine", f"SGLang {version} on every node, in {where}."


def _reach(cluster: Mapping[str, Any]) -> Rows:
    found = False
    for node in _answered(cluster):
        if node["unreached"]:
            found = True
            message = f"It cannot connect to {', '.join(node['unreached'])}."
            remedy = "Open all TCP ports between the nodes of the cluster."
            yield "problem", f"node {node['address']}", message, remedy
    if not found and len(cluster["nodes"]) > 1:
        yield "ok", "network", "Each node reaches the others."


def _models(cluster: Mapping[str, Any]) -> Rows:
    model, nodes = cluster["model"], _answered(cluster)
    if model is None:
        return
    folders = _by(nodes, lambda node: node["model_folder"])
    absent = folders.pop(None, [])
    if absent:
        is_path = model.startswith((".", "/", "~"))
        level = "problem" if is_path or folders else "warning"
        message = f"{model} is not on {', '.join(absent)}."
        remedy = "Give a folder that all nodes share, or a name of the hub."
        if not is_path:
            remedy = "Each node downloads it at the first start; or share a folder."
            level = "warning"
        yield level, "model", message, remedy
    for node in nodes:
        problem = node["model_error"]
        if problem is None and node["model_incomplete"]:
            problem = "weights are missing"
        if problem is not None:
            message = f"{model} cannot be loaded there: {problem}."
            remedy = "Give the folder that a model was saved to."
            yield "problem", f"node {node['address']}", message, remedy
    if not absent:
        yield "ok", "model", f"{model} is on every node."


def _by(nodes: Iterable[Node], key: Any) -> dict[Any, list[str]]:
    """Returns the nodes' addresses by something that they have."""
    found: dict[Any, list[str]] = {}
    for node in nodes:
        found.setdefault(key(node), []).append(node["address"])
    return found


def _tell(values: Mapping[Any, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(at)}" for value, at in values.items())
