"""A GRPO run on a Ray cluster: trainer ranks on some nodes, servers on others.

    ray job submit --working-dir examples -- \
        python cluster/grpo_ray.py --nodes 2 --ranks-per-node 8 \
        run.yaml model=/shared/model engine.num_replicas=8 output=/shared/runs/a

The words after the options are those of ``examples/grpo/train.py``, which goes to the
nodes with the working directory, as ``run.yaml`` does if it is there. Each trainer node
has one Ray task, which is a torchrun: the program, its ranks and their GPUs are those
of a run without Ray. The first rank has the servers placed where Ray has GPUs left.

A run that ends with an error, such as of a lost node, goes on from its newest
checkpoint; the folders of the model and of ``output`` are on all nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchrl_sglang.backends.launch.environment import inherited_environment

TRAIN = Path(__file__).parents[1] / "grpo" / "train.py"
PLACEMENT_SECONDS = 1800.0
"""Wait for nodes, which a cluster that grows on demand starts first."""
END_SECONDS = 120.0
"""Wait for the other nodes after one of them has failed; their ranks lose it."""


def address() -> tuple[str, int]:
    """Returns the address of this node, and a port that is free now."""
    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def torchrun(
    rank: int, nodes: int, ranks: int, place: tuple[str, int], words: list[str]
) -> None:
    """Runs the trainer ranks of a node until they end; the task's GPUs are theirs."""
    host = ray.util.get_node_ip_address()
    # Of a worker of Ray, the ranks are none; the first one is a driver of its own.
    environment = {
        **inherited_environment(os.environ, own_python=False),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_NODE_IP_ADDRESS": host,
    }
    options = f"--nnodes {nodes} --node-rank {rank} --nproc-per-node {ranks}"
    options += f" --master-addr {place[0]} --master-port {place[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), *words]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    if status:
        raise RuntimeError(f"The ranks of node {rank} on {host} ended with {status}.")


def run_once(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Runs all trainer nodes; raises if one of them failed."""
    each = {"CPU": float(options.ranks_per_node)}
    if options.device == "cuda":
        each["GPU"] = float(options.ranks_per_node)
    group = placement_group([each] * options.nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=PLACEMENT_SECONDS)

        def on(bundle: int) -> dict[str, object]:
            return {
                "num_cpus": each["CPU"],
                "num_gpus": each.get("GPU", 0.0),
                "max_retries": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            }

        place = ray.get(ray.remote(address).options(**on(0)).remote())
        nodes, ranks = options.nodes, options.ranks_per_node
        tasks = [
            ray.remote(torchrun)
            .options(**on(rank))
            .remote(rank, nodes, ranks, place, list(words))
            for rank in range(nodes)
        ]
        wait_for(tasks)
    finally:
        remove_placement_group(group)


def wait_for(tasks: list[ray.ObjectRef]) -> None:
    """Waits for all tasks; soon ends the others if one of them fails."""
    done, left = ray.wait(tasks)
    try:
        while True:
            ray.get(done)
            if not left:
                return
            done, left = ray.wait(left)
    finally:
        if left:
            _, left = ray.wait(left, num_returns=len(left), timeout=END_SECONDS)
        for task in left:
            ray.cancel(task, force=True)


def main() -> None:
    """Runs until the run is done, or has failed too often."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, default=1, help="of the trainer")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--restarts", type=int, default=3, help="after an error")
    options, words = parser.parse_known_args()
    if not TRAIN.is_file():
        parser.error(f"there is no {TRAIN}; submit with --working-dir examples.")
    words = [str(TRAIN), *words, "engine.launcher=ray", "resume=auto"]
    ray.init(address="auto")
    for left in range(options.restarts, -1, -1):
        try:
            run_once(options, words)
            break
        except RayError as error:
            if not left:
                raise
            print(f"{error}\nThe run goes on; {left} restarts are left.", flush=True)


if __name__ == "__main__":
    main()
