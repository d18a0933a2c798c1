"""``doctor --ray``: what it finds on a cluster, and what it says of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ray_cluster import address, ray_cluster

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.cli import main
from torchrl_sglang.cli.doctor.checks import run_checks
from torchrl_sglang.cli.doctor.ray_cluster import CLUSTER_CHECKS, Inspector

NODE = {
    "address": "10.0.0.1",
    "name": "worker-1",
    "cpus": 8,
    "gpus": 2,
    "unreached": [],
    "error": None,
    "python": "3.11.7",
    "package": "0.1.0",
    "memory": [("H200", 140 * 1024, 141 * 1024)],
    "sglang": "0.5.23",
    "engine_python": "/opt/bin/python",
    "engine_error": None,
    "has_model": True,
    "model_problem": None,
}
SECOND = {**NODE, "address": "10.0.0.2", "name": "worker-2"}


def judge(*nodes: Any, model: str = "/shared/model", device: str = "cuda") -> Any:
    cluster = SimpleNamespace(
        ray="2.60.0",
        device=device,
        model=model,
        wanted=">=0.5.15",
        nodes=[SimpleNamespace(**node) for node in nodes],
    )
    return run_checks(CLUSTER_CHECKS, cluster)


def test_a_cluster_that_is_well():
    findings = judge(NODE, SECOND)
    assert {finding.level for finding in findings} == {"ok"}
    told = " ".join(finding.message for finding in findings)
    assert "Ray 2.60.0, 2 nodes, 4 GPUs." in told
    assert "worker-2, 8 CPUs, 2 GPUs, H200 140 of 141 GiB free." in told
    assert "SGLang 0.5.23 on every node, in /opt/bin/python." in told
    assert "/shared/model is on every node." in told


@pytest.mark.parametrize(
    ("second", "level", "words"),
    [
        ({"error": "ModuleNotFoundError: torchrl_sglang"}, "problem", "ModuleNotFound"),
        ({"package": "0.2.0"}, "problem", "0.1.0 on 10.0.0.1; 0.2.0 on 10.0.0.2"),
        ({"python": "3.12.1"}, "problem", "3.12.1 on 10.0.0.2"),
        ({"sglang": None}, "problem", "/opt/bin/python has no sglang"),
        ({"sglang": "0.5.20"}, "warning", "0.5.20 on 10.0.0.2"),
        ({"sglang": "0.4.0"}, "warning", "not in >=0.5.15"),
        ({"unreached": ["10.0.0.1"]}, "problem", "cannot connect to 10.0.0.1"),
        ({"has_model": False}, "problem", "/shared/model is not on 10.0.0.2"),
        ({"model_problem": "no config.json"}, "problem", "no config.json"),
    ],
)
def test_what_is_wrong_on_one_node(second, level, words):
    found = judge(NODE, {**SECOND, **second})
    found = [each for each in found if each.level != "ok"]
    assert level in {finding.level for finding in found}
    assert words in " ".join(finding.message for finding in found)
    assert all(finding.remedy for finding in found)


def test_a_name_of_the_hub_may_be_downloaded():
    found = judge(NODE, {**SECOND, "has_model": False}, model="owner/model")
    found = [each for each in found if each.level != "ok"]
    assert [finding.level for finding in found] == ["warning"]
    assert "downloads it" in found[0].remedy


def test_servers_on_cpu_need_no_gpu():
    node = {**NODE, "gpus": 0, "memory": []}
    assert judge(node)[0].level == "problem"
    assert judge(node, device="cpu")[0].level == "ok"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "config.json"),
        ({"config.json": "[]"}, "no JSON object"),
        (
            {"config.json": "{}", "x.index.json": '{"weight_map": {"a": "b"}}'},
            "weights are missing",
        ),
    ],
)
def test_what_an_actor_finds_of_a_model(tmp_path, files, problem):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = Inspector().look([], "cuda", "/none", str(tmp_path))
    assert problem in found["model_problem"]


def test_an_actor_tells_whom_it_does_not_reach():
    inspector = Inspector()
    port = inspector.listen("127.0.0.1")
    with inspector.listener:
        others = [("127.0.0.1", port), ("127.0.0.2", 1)]
        found = inspector.look(others, "cuda", "/none", None)
    assert found["unreached"] == ["127.0.0.2"]


@pytest.fixture
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_cluster_of_two_nodes(cluster, tiny_model_path, capsys):
    words = ["--device", "cpu", "--model", tiny_model_path, "--json"]
    status = main(["doctor", "--ray", cluster.address, *words])
    # Ray may print lines of its own before.
    shown = capsys.readouterr().out
    found = json.loads(shown[shown.index("{\n") :])
    assert status == 0, found
    rows = {row["check"]: row["message"] for row in found["findings"]}
    assert {f"node {address(index)}" for index in range(2)} <= rows.keys()
    assert rows["network"] == "Each node reaches the others."
    assert cpu.DEFAULT_VERSION in rows["engine"]
    assert tiny_model_path in rows["model"]
    assert {row["level"] for row in found["findings"]} == {"ok"}


def test_no_cluster(capsys):
    pytest.importorskip("ray")
    assert main(["doctor", "--ray", "127.0.0.1:1"]) == 1
    assert "no Ray cluster at '127.0.0.1:1'" in capsys.readouterr().err
