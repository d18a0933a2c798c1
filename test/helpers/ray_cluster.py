"""A Ray cluster of several nodes on this machine, each with an address of its own."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIRST_HOST = 11
"""The nodes are 127.0.0.11, 127.0.0.12, ...; Ray takes 127.0.0.1 for the machine's."""

QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""A dead node refuses a connection, and is known after two seconds; one of a busy
machine answers late."""

TRIES = 3


def start_patiently(start: Callable[[], Any]) -> Any:
    """Starts a node: a busy machine takes longer than the 30 s that Ray gives it."""
    import ray

    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
        ray.shutdown()
        # Ray ends its processes when this one ends, and does not wait for them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return start()


@contextmanager
def ray_cluster(*nodes: Mapping[str, Any]) -> Iterator[Any]:
    """Starts a cluster and connects to it; the driver runs on the first node.

    Args:
        nodes: arguments of each node, such as ``num_cpus`` and ``num_gpus``, and
            ``node_ip_address`` in place of an own one on loopback.

    Yields:
        The :class:`ray.cluster_utils.Cluster`.
    """
    import ray
    from ray.cluster_utils import Cluster

    # A finalizer that called Ray after its end has started it again.
    ray.shutdown()
    cluster = Cluster()
    try:
        for index, node in enumerate(nodes):
            settings = {} if index else {"_system_config": QUICK}
            add_node(cluster, index, **settings, **node)
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            _node_ip_address=cluster.head_node.node_ip_address,
        )
        yield cluster
    finally:
        # A finalizer that calls Ray afterwards would start it again.
        gc.collect()
        ray.shutdown()
        cluster.shutdown()


def address(index: int) -> str:
    """Returns the address of a node."""
    return f"127.0.0.{FIRST_HOST + index}"


def add_node(cluster: Any, index: int, **arguments: Any) -> Any:
    """Adds a node to a cluster."""
    own = {"node_ip_address": address(index), "object_store_memory": 80 * 2**20}
    node = {**own, "include_dashboard": False, **arguments}
    return start_patiently(lambda: cluster.add_node(**node))


def processes(text: str) -> list[int]:
    """Returns the processes whose command line contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(int(path.parent.name))
    return found
