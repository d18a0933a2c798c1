"""Ray clusters whose nodes have addresses on a network, and servers that span nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from helpers.ray_cluster import ray_cluster

from torchrl_sglang import AsyncSGLang, RayLauncher
from torchrl_sglang.support.urls import is_loopback

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

GREEDY = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes; that of the driver has the machine's own address."""
    host = ray.util.get_node_ip_address()
    if is_loopback(host):
        pytest.skip("The machine has loopback only.")
    with ray_cluster({"num_cpus": 2, "node_ip_address": host}, {"num_cpus": 2}):
        yield


def test_a_key_is_made_and_asked_for(cluster, tiny_model_path):
    with AsyncSGLang.from_pretrained(
        tiny_model_path, num_replicas=2, device="cpu", launcher="ray"
    ) as engine:
        payload = {"input_ids": [5, 6], "sampling_params": GREEDY}
        for url in (engine.server_url, *(server.url for server in engine.servers)):
            refused = requests.post(f"{url}/generate", json=payload, timeout=30)
            assert refused.status_code == 401
        key = {"Authorization": f"Bearer {engine.api_key}"}
        url = f"{engine.server_url}/generate"
        taken = requests.post(url, json=payload, headers=key, timeout=30)
        assert taken.status_code == 200
        assert not is_loopback(engine.server_url.split("/")[2].split(":")[0])
        answers = engine.generate(input_ids=[[5, 6]] * 4, sampling_params=GREEDY)
        assert [len(answer.token_ids) for answer in answers] == [8] * 4


def test_a_server_over_two_nodes_computes_the_same(cluster, engine, tiny_model_path):
    """Tensor parallelism over gloo; each rank has a core of its own."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        tp_size=2,
        nnodes=2,
        device="cpu",
        launcher=RayLauncher(strategy="STRICT_SPREAD"),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": f"{first}|{last}"},
    ) as wide:
        assert wide.get_tp_size() == 2
        prompt = [5, 6, 7, 8]
        ours, theirs = (
            each.generate(
                input_ids=[prompt], sampling_params=GREEDY, return_logprobs=True
            )[0]
            for each in (wide, engine)
        )
    assert ours.token_ids == theirs.token_ids
    assert ours.log_probs == pytest.approx(theirs.log_probs, abs=TOLERANCE)
