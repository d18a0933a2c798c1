"""Finding out, on this machine and on folders made for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.cli import main
from torchrl_sglang.cli.doctor.checks import CHECKS, run_checks
from torchrl_sglang.cli.doctor.machine import (
    Machine,
    find_model,
    read_engine,
    read_requirements,
)


def look_here() -> Machine:
    return Machine.here(model=None, python=None, device="cpu")


def find_servers() -> str:
    """Returns what is told of this machine's servers."""
    found = run_checks(CHECKS, look_here())
    return next(each.message for each in found if each.check == "servers")


def test_this_machine_can_run_the_tests(tiny_model_path, capsys):
    status = main(["doctor", "--model", tiny_model_path, "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    problems = [row for row in found["findings"] if row["level"] == "problem"]
    assert problems == []
    assert found["ok"] is True
    assert status == 0
    checks = {row["check"] for row in found["findings"]}
    assert {"python", "torch", "engine", "nccl", "ports", "servers", "model"} <= checks


def test_a_problem_is_an_exit_status(tmp_path, capsys):
    python = str(tmp_path / "none")
    assert main(["doctor", "--python", python, "--device", "cpu"]) == 1
    shown = capsys.readouterr()
    (line,) = [row for row in shown.out.splitlines() if row.startswith("problem")]
    assert python in line
    assert "--python" in line
    assert "1 problem, " in shown.err


def test_what_this_machine_has():
    found = {each.check: each.message for each in run_checks(CHECKS, look_here())}
    assert ".".join(map(str, sys.version_info[:3])) in found["python"]
    assert set(read_requirements().packages) <= found.keys()
    assert f"SGLang {cpu.DEFAULT_VERSION}" in found["engine"]
    assert str(cpu.engine_python()) in found["engine"]
    assert f"{len(os.sched_getaffinity(0))} cores" in found["memory"]


def test_variables_that_matter(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = {each.check: each.message for each in run_checks(CHECKS, look_here())}
    assert "NCCL_P2P_DISABLE=1" in found["nccl"]


def test_requirements_are_those_of_the_project():
    python, packages, engine = read_requirements()
    assert SpecifierSet(python) == SpecifierSet(">=3.11,<3.14")
    assert SpecifierSet(packages["torch"]) == SpecifierSet(">=2.11,<3")
    assert "pytest" not in packages
    assert ">=0.5.15" in engine


def test_an_engine_is_found_by_its_interpreter():
    _, packages, error = read_engine("cuda", str(cpu.engine_python()))
    assert packages["sglang"] == cpu.DEFAULT_VERSION
    assert error is None
    assert read_engine("cuda", None)[0] == sys.executable


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo no packages", "does not list"), ("echo broken >&2; exit 3", "broken")],
)
def test_an_interpreter_that_is_none(tmp_path, script, message):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    _, packages, error = read_engine("cuda", str(program))
    assert message in error
    assert packages == {}


def test_servers_of_a_test_are_in_use(engine):
    (watchdog,) = engine.servers
    found = find_servers()
    assert str(watchdog.pid) not in found
    if "None is left over" in found:
        assert "; 0 in use" not in found


def test_servers_that_nobody_looks_after():
    """Of a server that was left over and its child, the upper one is named."""
    child = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", child, "sglang::scheduler"]
    parent = f"import subprocess; subprocess.run({words})"
    words = [sys.executable, "-c", parent, "sglang.launch_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as process:
        child_pid = int(process.stdout.readline())
        found = find_servers()
        process.communicate()
    left = re.findall(r"\d+", found)
    assert str(process.pid) in left
    assert str(child_pid) not in left


def test_a_model_folder(tiny_model_path, tmp_path):
    assert str(find_model(tiny_model_path)) == tiny_model_path
    assert find_model(str(tmp_path / "none")) is None
