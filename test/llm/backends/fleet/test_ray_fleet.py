"""A fleet on the nodes of a Ray cluster, and a copy of it in an actor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.echo_engine import make_interpreter
from helpers.engines import fleet_of
from helpers.ray_cluster import add_node, address, ray_cluster
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
from torchrl_sglang.errors import ServerStartError
from torchrl_sglang.support.event_loop import run_sync

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.timeout(300),
    # Ray's own, about futures and processes.
    pytest.mark.filterwarnings("ignore"),
]

SERVER = {"num_cpus": 1, "resources": {"server": 1}}
SECONDS = 60.0
PROMPTS = [[5 + index, 7] for index in range(6)]


@pytest.fixture
def nodes() -> Iterator[tuple[Any, list[Any]]]:
    """A cluster whose first node has the driver and its actors."""
    from ray import cloudpickle

    # An actor cannot import this module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_cluster({"num_cpus": 2}) as cluster:
        yield cluster, [add_node(cluster, index, **SERVER) for index in (1, 2)]
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Holder:
    def __init__(self, engine: AsyncSGLang) -> None:
        self.engine = engine

    def generate(self) -> list[list[int]]:
        return generate(self.engine)

    def urls(self) -> list[str]:
        return urls(self.engine)


def generate(engine: AsyncSGLang) -> list[list[int]]:
    answers = engine.generate(
        input_ids=PROMPTS, sampling_params={"max_new_tokens": 4, "ignore_eos": True}
    )
    return [answer.token_ids for answer in answers]


def urls(engine: AsyncSGLang) -> list[str]:
    servers = engine.stats().servers
    return [server.url for server in servers if server.state == "serving"]


@pytest.mark.slow
def test_a_node_is_lost(nodes, tiny_model_path, tmp_path):
    """Its server starts on another node; router and copies follow it there."""
    import ray

    cluster, (first, second) = nodes
    launcher = RayLauncher(resources={"CPU": 1, "server": 1})
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        num_replicas=2,
        device="cpu",
        python=make_interpreter(tmp_path),
        launcher=launcher,
    ) as engine:
        holder = ray.remote(num_cpus=1)(Holder).remote(engine)
        expected = [prompt * 2 for prompt in PROMPTS]
        assert generate(engine) == expected
        assert ray.get(holder.generate.remote(), timeout=SECONDS) == expected
        before = urls(engine)
        lost = first if engine.servers[0].host == address(1) else second
        cluster.remove_node(lost, allow_graceful=False)
        # What was sent to it goes to the other one.
        assert generate(engine) == expected
        assert ray.get(holder.generate.remote(), timeout=SECONDS) == expected
        add_node(cluster, 3, **SERVER)
        # Until its loss is noticed, it counts as serving.
        wait_until(lambda: urls(engine) != before and len(urls(engine)) == 2, SECONDS)
        after = urls(engine)
        assert after[0].startswith(f"http://{address(3)}:")
        assert after[1] == before[1]
        router = fleet_of(engine).router
        wait_until(
            lambda: (
                {url for url, well in run_sync(router.workers()) if well} == set(after)
            ),
            SECONDS,
        )
        wait_until(
            lambda: ray.get(holder.urls.remote(), timeout=SECONDS) == after, SECONDS
        )
        assert ray.get(holder.generate.remote(), timeout=SECONDS) == expected
        assert generate(engine) == expected


@pytest.mark.slow
def test_servers_join_and_leave_on_nodes(nodes, tiny_model_path, tmp_path):
    """Ray places new ones, what a removed one had is free, and copies follow."""
    import ray

    launcher = RayLauncher(resources={"CPU": 1, "server": 1}, placement_timeout=20.0)
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        python=make_interpreter(tmp_path),
        launcher=launcher,
    ) as engine:
        holder = ray.remote(num_cpus=0)(Holder).remote(engine)
        expected = generate(engine)
        (second,) = engine.add_servers(1)
        first = engine.servers[0].url
        assert urls(engine) == [first, second]
        assert len({server.host for server in engine.servers}) == 2
        wait_until(lambda: ray.get(holder.urls.remote()) == [first, second], SECONDS)
        with pytest.raises(ServerStartError, match="Ray has not placed"):
            engine.add_servers(1)
        # The first one's place in the engine's own group goes to the next.
        engine.remove_servers(first)
        wait_until(lambda: ray.get(holder.urls.remote()) == [second], SECONDS)
        (third,) = engine.add_servers(1)
        engine.remove_servers(second)
        (fourth,) = engine.add_servers(1)
        assert urls(engine) == [third, fourth]
        wait_until(lambda: ray.get(holder.urls.remote()) == [third, fourth], SECONDS)
        assert ray.get(holder.generate.remote()) == expected
