"""Finding out, on this machine and on folders made for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.cli import main
from torchrl_sglang.cli.doctor.facts import (
    PORTS_TRIED,
    find_servers,
    gather,
    gather_engine,
    gather_model,
    read_requirements,
)


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
    assert "1 problems" in shown.err


def test_facts_of_this_machine(tiny_model_path):
    facts = gather(model=tiny_model_path, device="cpu")
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert {name for name, *_ in facts.packages} == set(read_requirements()[1])
    assert all(version and not error for _, _, version, error in facts.packages)
    assert facts.engine_packages["sglang"] == cpu.DEFAULT_VERSION
    assert facts.engine_python == str(cpu.engine_python())
    assert 0 < facts.ports_free <= PORTS_TRIED
    assert "lo" in facts.interfaces
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.model is not None
    assert facts.model.weight_bytes > 0


def test_variables_that_matter(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("no_proxy", "x")
    monkeypatch.setenv("NCCLX", "1")
    found = gather(device="cpu").environment
    assert found["NCCL_P2P_DISABLE"] == "1"
    assert found["no_proxy"] == "x"
    assert "NCCLX" not in found
    assert "PATH" not in found


def test_requirements_are_those_of_the_project():
    python, packages, engine = read_requirements()
    assert SpecifierSet(python) == SpecifierSet(">=3.11,<3.14")
    assert SpecifierSet(packages["torch"]) == SpecifierSet(">=2.11,<3")
    assert "pytest" not in packages
    assert ">=0.5.15" in engine


def test_an_engine_is_found_by_its_interpreter():
    found = gather_engine("cuda", str(cpu.engine_python()))
    assert found["engine_packages"]["sglang"] == cpu.DEFAULT_VERSION
    assert found["engine_generations"] == []
    assert gather_engine("cuda", None)["engine_python"] == sys.executable


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo no packages", "does not tell"), ("echo broken >&2; exit 3", "broken")],
)
def test_an_interpreter_that_is_none(tmp_path, script, message):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert message in gather_engine("cuda", str(program))["engine_error"]


def test_servers_of_a_test_are_in_use(engine):
    in_use, left = find_servers()
    (watchdog,) = engine.servers
    assert watchdog.pid in in_use
    assert watchdog.pid not in left


def test_servers_that_nobody_looks_after():
    """Of a server that was left over and its child, the upper one is named."""
    child = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", child, "sglang::scheduler"]
    parent = f"import subprocess; subprocess.run({words})"
    words = [sys.executable, "-c", parent, "sglang.launch_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as process:
        child_pid = int(process.stdout.readline())
        in_use, left = find_servers()
        process.communicate()
    assert process.pid in left
    assert child_pid not in left
    assert not {process.pid, child_pid} & set(in_use)


def test_a_model_folder(tiny_model_path):
    found = gather_model(tiny_model_path)
    assert str(found.folder) == tiny_model_path
    assert found.model_type == "qwen2"
    assert found.dtype == "float32"
    assert found.has_tokenizer
    assert found.has_chat_template
    assert not found.missing_files
    assert not found.pointer_files


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_that_is_no_model(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert gather_model(str(tmp_path)).config_error


def test_a_model_that_is_not_whole(tmp_path):
    config = {"model_type": "x", "text_config": {"dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    (tmp_path / "1.safetensors").write_text(pointer)
    found = gather_model(str(tmp_path))
    assert found.dtype == "bfloat16"
    assert found.missing_files == ["2.safetensors"]
    assert found.pointer_files == ["1.safetensors"]
    assert not found.has_tokenizer
    assert not found.has_chat_template
    (tmp_path / "2.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "chat_template.jinja").write_text("x")
    found = gather_model(str(tmp_path))
    assert found.missing_files == []
    assert found.has_chat_template


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "not a name at all"])
def test_a_model_that_is_not_here(name):
    assert gather_model(name).folder is None
