"""The checks of a Ray cluster: its nodes, their versions and the network.

An actor without a CPU runs the checks of a machine on each node, and connects to the
other nodes.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.launch.ray_launcher import REACH_SECONDS, connect
from torchrl_sglang.cli.doctor.checks import CHECKS, Finding, run_checks
from torchrl_sglang.cli.doctor.machine import Machine, Rows

ANSWER_SECONDS = 120.0
"""Timeout for the actors to start, or to check their nodes."""

AT_ONCE = 64
"""Concurrent connections tried by a node."""

DIFFER = ("engine", "gpu", "model")
"""Checks whose findings are also listed for each node where all is well."""

SEE_GPUS = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
"""Ray 2.50 hides the GPUs of a node from an actor without a reservation."""


@dataclass(frozen=True)
class RayNode:
    """A node of a cluster, and the report of the actor on it."""

    address: str
    name: str
    cpus: int
    gpus: int
    findings: Sequence[Finding] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """By package; None: not installed."""


@dataclass(frozen=True)
class RayCluster:
    """A cluster."""

    ray: str  # version of Ray
    device: str  # cpu or cuda: where servers shall run
    nodes: list[RayNode]


class Inspector:
    """The actor on a node."""

    listener: socket.socket

    def listen(self, address: str) -> int:
        """Listens on the node's address; returns the port."""
        self.listener = socket.create_server((address, 0), backlog=1024)
        return int(self.listener.getsockname()[1])

    def look(
        self, others: Sequence[tuple[str, int]], **options: Any
    ) -> tuple[list[Finding], dict[str, str | None]]:
        """Returns findings and versions; the options are ``Machine.here``'s."""
        from torchrl_sglang import __version__

        machine = Machine.here(**options)
        findings = run_checks(CHECKS, machine)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            connected = zip(others, pool.map(_can_connect, others), strict=True)
            unreached = [address for (address, _), ok in connected if not ok]
        if unreached:
            message = f"It cannot connect to {', '.join(unreached)}."
            remedy = "Open all TCP ports between the nodes of the cluster."
            findings.append(Finding("problem", "network", message, remedy))
        _, packages, _ = machine.engine
        return findings, {
            "torchrl_sglang": __version__,
            "Python": platform.python_version(),
            "SGLang": packages.get("sglang"),
        }


def _can_connect(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, REACH_SECONDS).close()
    except OSError:
        return False
    return True


def look_at_cluster(
    address: str, *, model: str | None, python: str | None, device: str | None
) -> RayCluster:
    """Returns a cluster with the reports of its nodes."""
    ray = connect(address, log_to_driver=False, logging_level="ERROR")
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [
        RayNode(
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    ]
    device = device or ("cuda" if any(node.gpus for node in nodes) else "cpu")
    options = {"model": model, "python": python, "device": device}
    actors = [_start(ray, node["NodeID"]) for node in alive]
    pairs = zip(actors, nodes, strict=True)
    ports = _get(ray, [actor.listen.remote(node.address) for actor, node in pairs])
    listeners = zip(nodes, ports, strict=True)
    addresses = [(node.address, at) for node, at in listeners if isinstance(at, int)]
    reports = _get(ray, [actor.look.remote(addresses, **options) for actor in actors])
    for actor in actors:
        ray.kill(actor)
    answers = zip(nodes, reports, strict=True)
    nodes = [with_report(node, report) for node, report in answers]
    return RayCluster(ray.__version__, device, nodes)


def with_report(node: RayNode, report: Any) -> RayNode:
    """Returns a node with the report of its actor, or the text of its error."""
    if isinstance(report, str):
        remedy = "Install this package there, for the Python that runs Ray."
        message = f"It does not answer: {report}."
        report = [Finding("problem", "actor", message, remedy)], {}
    findings, versions = report
    return replace(node, findings=findings, versions=versions)


def _start(ray: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": SEE_GPUS,
    }
    return ray.remote(**options)(Inspector).remote()


def _get(ray: Any, calls: Sequence[Any]) -> list[Any]:
    """Returns the results of calls; the error's text for each that failed."""
    results: list[Any] = []
    deadline = time.monotonic() + ANSWER_SECONDS
    for call in calls:
        try:
            remaining = max(deadline - time.monotonic(), 0.0)
            results.append(ray.get(call, timeout=remaining))
        except Exception as error:  # noqa: BLE001 - Ray's, of many kinds.
            lines = [line for line in str(error).splitlines() if line.strip()]
            results.append(f"{type(error).__name__}: {(lines or ['no answer'])[-1]}")
    return results


def _nodes(cluster: RayCluster) -> Rows:
    gpus = sum(node.gpus for node in cluster.nodes)
    level = "problem" if cluster.device == "cuda" and not gpus else "ok"
    message = f"Ray {cluster.ray}, {len(cluster.nodes)} nodes, {gpus} GPUs."
    yield level, "ray", message, "Start nodes with GPUs, or give --device cpu."
    for node in cluster.nodes:
        about = f"{node.name}, {node.cpus} CPUs, {node.gpus} GPUs."
        yield "ok", f"node {node.address}", about
        for finding in node.findings:
            without_gpus = finding.check == "gpu" and not node.gpus
            if not without_gpus and (finding.level != "ok" or finding.check in DIFFER):
                yield finding._replace(check=f"{node.address} {finding.check}")


def _versions(cluster: RayCluster) -> Rows:
    for name in ("torchrl_sglang", "Python", "SGLang"):
        addresses: dict[str | None, list[str]] = {}
        for node in cluster.nodes:
            addresses.setdefault(node.versions.get(name), []).append(node.address)
        versions = [version for version in addresses if version is not None]
        if len(versions) > 1:
            level = "warning" if name == "SGLang" else "problem"
            places = [f"{v} on {', '.join(addresses[v])}" for v in versions]
            remedy = "Install the same version on every node."
            yield level, "versions", f"{name} is {'; '.join(places)}.", remedy
        elif versions and None not in addresses:
            yield "ok", "versions", f"{name} {versions[0]} on every node."


def _network(cluster: RayCluster) -> Rows:
    checks = {finding.check for node in cluster.nodes for finding in node.findings}
    if len(cluster.nodes) > 1 and checks.isdisjoint(("actor", "network")):
        yield "ok", "network", "Each node reaches the others."


CLUSTER_CHECKS = (_nodes, _versions, _network)
"""The checks of a cluster, in the order of the report."""
