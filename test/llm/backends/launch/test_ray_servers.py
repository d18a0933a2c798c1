"""Servers on the nodes of a Ray cluster, on a stand-in for SGLang where one will do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_engine import make_interpreter
from helpers.ray_cluster import add_node, address, processes, ray_cluster
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.launcher import start_servers
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher, make_key
from torchrl_sglang.errors import ConfigurationError, ServerStartError

SECONDS = 60

DRIVER = """
import sys
from torchrl_sglang.backends.launch.launcher import start_servers
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
import ray

ray.init(address=sys.argv[1], log_to_driver=False, _node_ip_address=sys.argv[2])
spec = {"model": sys.argv[3], "python": sys.argv[4], "device": "cpu"}
servers = start_servers(RayLauncher().bind(1, spec))
print("ready", flush=True)
sys.stdin.readline()
"""
"""A trainer that starts a server and does not stop it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node for the driver, and two with two GPUs each."""
    with ray_cluster(
        {"num_cpus": 2}, {"num_cpus": 4, "num_gpus": 2}, {"num_cpus": 4, "num_gpus": 2}
    ) as cluster:
        yield cluster


@pytest.fixture
def spec(tiny_model_path: str, tmp_path: Path) -> dict[str, Any]:
    interpreter = make_interpreter(tmp_path)
    return {"model": tiny_model_path, "device": "cuda", "python": interpreter}


@pytest.fixture
def bind(cluster: Any) -> Iterator[Callable[..., Any]]:
    bound = []

    def run(launcher: RayLauncher, *args: Any, **options: Any) -> Any:
        bound.append(launcher.bind(*args, **options))
        return bound[-1]

    yield run
    for each in bound:
        each.stop([])


def ask(server: Any, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}/{path}", timeout=10) as answer:
        return json.loads(answer.read())


def make_group(*bundles: dict[str, float], strategy: str = "PACK") -> Any:
    import ray

    group = ray.util.placement_group(list(bundles), strategy=strategy)
    assert group.wait(SECONDS)
    return group


@pytest.mark.slow
def test_strategies(bind, spec):
    spread = bind(RayLauncher(strategy="SPREAD"), 2, spec)
    places = [spread.where(rank) for rank in range(2)]
    assert {place.host for place in places} == {address(1), address(2)}
    assert [place.gpus for place in places] == [("0",), ("0",)]
    spread.stop([])
    packed = bind(RayLauncher(strategy="STRICT_PACK"), 2, spec)
    places = [packed.where(rank) for rank in range(2)]
    assert len({place.host for place in places}) == 1
    assert sorted(place.gpus for place in places) == [("0",), ("1",)]
    packed.stop([])
    chosen = bind(RayLauncher(nodes=[address(2)]), 2, spec)
    assert {chosen.where(rank).host for rank in range(2)} == {address(2)}


@pytest.mark.slow
def test_bundles_of_one_gpu_of_the_user(bind, spec):
    import ray

    group = make_group(*[{"GPU": 1}] * 4)
    launcher = bind(RayLauncher(placement_group=group), 2, {**spec, "tp_size": 2})
    servers = start_servers(launcher)
    assert {server.host for server in servers} == {address(1), address(2)}
    for rank, server in enumerate(servers):
        assert launcher.where(rank).gpus == ("0", "1")
        assert ask(server, "environment")["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert ask(server, "arguments")["tp_size"] == "2"
    # Nobody else gets them.
    with pytest.raises(ConfigurationError, match="room for 0 of 1 server"):
        RayLauncher(placement_group=group).bind(1, spec)
    launcher.stop(servers)
    assert not processes(spec["python"])
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    ray.util.remove_placement_group(group)


@pytest.mark.slow
def test_a_share_of_the_trainer_s_gpu(bind, spec):
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = make_group({"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}, strategy="SPREAD")

    def where() -> tuple[str, str]:
        return ray.util.get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]

    trainer = ray.remote(num_cpus=1, num_gpus=0.8)(where).options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 1)
    )
    host, gpu = ray.get(trainer.remote(), timeout=SECONDS)
    launcher = bind(
        RayLauncher(
            placement_group=group,
            bundles=[1],
            gpu_fraction=0.2,
            runtime_env={"env_vars": {"OF_THE_USER": "1"}},
        ),
        1,
        spec,
    )
    (server,) = start_servers(launcher)
    assert server.host == host
    assert launcher.where(0).gpus == (gpu,)
    environment = ask(server, "environment")
    assert environment["CUDA_VISIBLE_DEVICES"] == gpu
    assert environment["OF_THE_USER"] == "1"
    # What Ray sets for its workers is not the server's.
    assert not [name for name in environment if name.startswith("RAY_JOB")]
    # The trainer's share is free while the server runs.
    assert ray.get(trainer.remote(), timeout=SECONDS) == (host, gpu)
    launcher.stop([server])
    ray.util.remove_placement_group(group)
    with pytest.raises(ConfigurationError, match="was removed"):
        RayLauncher(placement_group=group).bind(1, spec)
    with pytest.raises(ConfigurationError, match="is not one of Ray's"):
        RayLauncher(placement_group="group").bind(1, spec)


@pytest.mark.slow
def test_a_server_on_two_nodes(bind, spec):
    launcher = bind(
        RayLauncher(strategy="SPREAD"), 1, {**spec, "tp_size": 4, "nnodes": 2}
    )
    (server,) = start_servers(launcher)
    first = ask(server, "arguments")
    meeting = first["dist_init_addr"]
    assert meeting.startswith(f"{server.host}:")
    assert (first["node_rank"], first["nnodes"], first["tp_size"]) == ("0", "2", "4")
    (second,) = processes("--node-rank 1 --dist-init-addr " + meeting)[-1:]
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: server.state == "dead")
    launcher.stop([server])
    assert not processes(spec["python"])


@pytest.mark.slow
def test_a_start_that_fails_tells_the_log_of_its_node(cluster, spec, tmp_path):
    (tmp_path / "empty").mkdir()
    launcher = RayLauncher(nodes=[address(1)]).bind(
        1, {**spec, "model": str(tmp_path / "empty"), "device": "cpu"}
    )
    with pytest.raises(ServerStartError) as caught:
        start_servers(launcher)
    told = str(caught.value)
    assert f"(node {address(1)}) ended with status 1" in told
    assert "There is no config.json" in told
    log = told.partition("kept as ")[2].partition(". The end")[0]
    assert Path(log).exists()
    assert not processes(spec["python"])


@pytest.mark.slow
def test_faults_of_a_node_are_found_before_anything_starts(cluster, spec):
    with pytest.raises(ConfigurationError, match="no model folder '/not/here'") as told:
        RayLauncher(nodes=[address(2)]).bind(1, {**spec, "model": "/not/here"})
    assert told.value.__notes__ == [f"Found on node {address(2)}."]
    with pytest.raises(
        ConfigurationError, match="no alive node of the cluster is named '10.0.0.9'"
    ):
        RayLauncher(nodes=["10.0.0.9"]).bind(1, spec)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_nothing_is_left_of_a_driver_that_ends(cluster, spec, number):
    driver = subprocess.Popen(
        [
            *(sys.executable, "-c", DRIVER, cluster.address, address(0)),
            *(spec["model"], spec["python"]),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert any(line == "ready\n" for line in driver.stdout)
    assert processes(spec["python"])
    if number is None:
        driver.stdin.write("\n")
        driver.stdin.flush()
    else:
        driver.send_signal(number)
    driver.wait(SECONDS)
    driver.stdin.close()
    driver.stdout.close()
    wait_until(lambda: not processes(spec["python"]))


@pytest.mark.slow
def test_a_lost_node(bind, cluster, spec):
    """Its server starts again on a node that joins, at another address."""
    import ray

    node = add_node(cluster, 3, num_cpus=2, resources={"special": 1})
    launcher = bind(
        RayLauncher(resources={"CPU": 1, "special": 1}), 1, {**spec, "device": "cpu"}
    )
    (server,) = start_servers(launcher)
    assert server.host == address(3)
    cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: server.state == "dead")
    wait_until(lambda: not processes(spec["python"]))
    assert "ended with its actor or its node" in server.log_tail()
    server.stop()
    again = launcher.restart(0)
    assert not again.check_ready()
    node = add_node(cluster, 4, num_cpus=2, resources={"special": 1})
    again.wait_ready()
    assert again.host == launcher.where(0).host == address(4)
    assert ask(again, "health") == {}
    launcher.stop([again])
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}
    cluster.remove_node(node)


@pytest.mark.slow
def test_an_actor_that_is_killed(bind, spec):
    """Nothing is left below it, and a restart has the old address."""
    import ray

    launcher = bind(RayLauncher(), 1, {**spec, "device": "cpu"})
    (server,) = start_servers(launcher)
    ray.kill(server._hosts[0])
    wait_until(lambda: server.state == "dead")
    wait_until(lambda: not processes(spec["python"]))
    server.stop()
    again = launcher.restart(0)
    again.wait_ready()
    assert again.url == server.url
    assert again.state == "ready"


def test_without_ray(monkeypatch, tiny_model_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match="pip install 'ray>=2.50'"):
        AsyncSGLang.from_pretrained(tiny_model_path, launcher="ray")


def test_a_key_is_made_beyond_loopback():
    assert make_key(["127.0.0.1", "127.0.0.2"]) is None
    keys = {make_key(["127.0.0.1", "10.0.0.2"]) for _ in range(2)}
    assert len(keys) == 2
    assert all(key is not None and len(key) >= 32 for key in keys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "TIGHT"}, "strategy='TIGHT' is none of PACK"),
        ({"placement_group": object(), "strategy": "PACK"}, "strategy='PACK' is for"),
        ({"bundles": [0]}, "bundles=.* for a placement group that is given"),
        ({"gpu_fraction": 0}, "gpu_fraction must be above 0"),
        ({"gpu_fraction": 2}, "gpu_fraction must be above 0"),
        ({"resources": {"GPU": 1}}, "GPUs follow from tp_size"),
        ({"resources": 8}, "resources must be a mapping"),
        ({"nodes": "10.0.0.1"}, "is a string; give a list"),
        ({"runtime_env": "env"}, "runtime_env must be a mapping"),
        ({"placement_timeout": 0}, "placement_timeout must be"),
    ],
)
def test_impossible_placements_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        RayLauncher(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "host='0.0.0.0' cannot be given with a Ray launcher"),
        ({"node_rank": 1}, "node_rank=1 cannot be given"),
        ({"cuda_devices": [0]}, "cuda_devices=.* is for launcher='local'"),
        ({"parallel_start": "staggered"}, "parallel_start='staggered' is for"),
        ({"launcher": "slurm"}, "launcher='slurm' is neither"),
    ],
)
def test_arguments_of_servers_that_cannot_be_given(options, words):
    start = partial(AsyncSGLang.from_pretrained, "owner/model")
    with pytest.raises(ConfigurationError, match=words):
        start(**{"launcher": "ray", "router_policy": None, **options})
