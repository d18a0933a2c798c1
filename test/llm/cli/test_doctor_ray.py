"""``doctor --ray``: its findings on a cluster, and on reports made up for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.ray_cluster import address, ray_cluster

from torchrl_sglang import __version__
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.cli import main
from torchrl_sglang.cli.doctor.checks import Finding, run_checks
from torchrl_sglang.cli.doctor.ray_cluster import (
    CLUSTER_CHECKS,
    Inspector,
    RayCluster,
    RayNode,
    with_report,
)

VERSIONS = {"torchrl_sglang": "0.1.0", "Python": "3.11.7", "SGLang": "0.5.23"}
FINDINGS = [
    Finding("ok", "python", "Python 3.11.7."),
    Finding("ok", "engine", "SGLang 0.5.23 for cuda in /opt/bin/python."),
    Finding("ok", "gpu", "2 visible, H200 140 of 141 GiB free."),
]
NODE = RayNode("10.0.0.1", "worker-1", 8, 2, FINDINGS, VERSIONS)


def second(**versions: str | None) -> RayNode:
    """Returns another node, with other versions."""
    versions = {**VERSIONS, **versions}
    return replace(NODE, address="10.0.0.2", name="worker-2", versions=versions)


def judge(*nodes: RayNode, device: str = "cuda") -> list[Finding]:
    return run_checks(CLUSTER_CHECKS, RayCluster("2.60.0", device, list(nodes)))


def test_a_healthy_cluster_is_ok():
    findings = judge(NODE, second())
    assert {finding.level for finding in findings} == {"ok"}
    rows = {finding.check: finding.message for finding in findings}
    assert rows["ray"] == "Ray 2.60.0, 2 nodes, 4 GPUs."
    assert rows["node 10.0.0.2"] == "worker-2, 8 CPUs, 2 GPUs."
    assert rows["10.0.0.2 gpu"] == FINDINGS[2].message
    assert rows["10.0.0.2 engine"] == FINDINGS[1].message
    assert "10.0.0.2 python" not in rows
    assert Finding("ok", "versions", "SGLang 0.5.23 on every node.") in findings
    assert rows["network"] == "Each node reaches the others."


@pytest.mark.parametrize(
    ("node", "level", "message"),
    [
        (second(torchrl_sglang="0.2"), "problem", "0.1.0 on 10.0.0.1; 0.2 on 10.0.0.2"),
        (second(Python="3.12.1"), "problem", "3.12.1 on 10.0.0.2"),
        (second(SGLang="0.5.20"), "warning", "0.5.20 on 10.0.0.2"),
        (
            replace(
                NODE, findings=[Finding("problem", "model", "No folder.", "Give one.")]
            ),
            *("problem", "No folder."),
        ),
    ],
)
def test_a_fault_of_one_node_is_a_finding(node, level, message):
    (finding,) = [row for row in judge(NODE, node) if row.level != "ok"]
    assert finding.level == level
    assert message in finding.message
    assert finding.remedy


def test_an_engine_that_is_missing_is_not_on_every_node():
    messages = " ".join(row.message for row in judge(NODE, second(SGLang=None)))
    assert "Python 3.11.7 on every node." in messages
    assert "SGLang 0.5.23 on every node." not in messages


def test_servers_on_cpu_need_no_gpu():
    missing = Finding("problem", "gpu", "There is no GPU.", "Give --device cpu.")
    node = replace(NODE, gpus=0, findings=[missing])
    assert judge(node)[0].level == "problem"
    assert {row.level for row in judge(node, device="cpu")} == {"ok"}
    assert {row.level for row in judge(NODE, node)} == {"ok"}


def test_an_actor_reports_its_node(tmp_path):
    inspector = Inspector()
    port = inspector.listen("127.0.0.1")
    options = {"model": str(tmp_path), "python": "/none", "device": "cuda"}
    with inspector.listener:
        others = [("127.0.0.1", port), ("127.0.0.2", 1)]
        findings, versions = inspector.look(others, **options)
    assert versions["torchrl_sglang"] == __version__
    assert versions["SGLang"] is None
    messages = {row.check: row.message for row in findings}
    assert "/none" in messages["engine"]
    assert "config.json" in messages["model"]
    assert messages["network"] == "It cannot connect to 127.0.0.2."
    messages = [row.message for row in judge(NODE, replace(NODE, findings=findings))]
    assert "It cannot connect to 127.0.0.2." in messages
    assert "Each node reaches the others." not in messages


def test_an_actor_that_fails_is_a_problem_of_its_node():
    findings = judge(NODE, with_report(NODE, "ImportError: none"))
    (problem,) = [row for row in findings if row.level != "ok"]
    assert (problem.level, problem.check) == ("problem", "10.0.0.1 actor")
    assert "ImportError: none" in problem.message
    assert "Each node reaches the others." not in [row.message for row in findings]


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
    for at in map(address, range(2)):
        assert "1 CPUs" in rows[f"node {at}"]
        assert cpu.DEFAULT_VERSION in rows[f"{at} engine"]
        assert tiny_model_path in rows[f"{at} model"]
    assert rows["network"] == "Each node reaches the others."
    assert f"SGLang {cpu.DEFAULT_VERSION} on every node." in rows["versions"]


def test_no_cluster(capsys):
    pytest.importorskip("ray")
    assert main(["doctor", "--ray", "127.0.0.1:1"]) == 1
    assert "no Ray cluster at '127.0.0.1:1'" in capsys.readouterr().err
