"""Servers on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.ray_cluster import address, processes, ray_cluster

from torchrl_sglang import AsyncSGLang

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        yield cluster


@pytest.mark.slow
def test_two_servers_on_two_nodes(cluster, tiny_model_path):
    import ray

    with AsyncSGLang.from_pretrained(
        tiny_model_path, num_replicas=2, device="cpu", launcher="ray"
    ) as engine:
        hosts = sorted(server.host for server in engine.servers)
        assert hosts == [address(0), address(1)]
        answers = engine.generate(
            input_ids=[[5, 6, 7]] * 8,
            sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        )
        assert [len(answer.token_ids) for answer in answers] == [4] * 8
        assert processes(tiny_model_path)
    assert not processes(tiny_model_path)
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}
