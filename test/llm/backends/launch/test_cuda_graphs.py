"""Servers on large GPUs have CUDA graphs for a training batch, by default."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.cuda_graphs import gpu_memory, graph_arguments
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.cli.doctor.machine import read_gpus

NAMES = ("cuda_graph_max_bs_decode",)
H100 = 81_559


@pytest.fixture(autouse=True)
def forget():
    gpu_memory.cache_clear()
    yield
    gpu_memory.cache_clear()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 512),
        ({"tp_size": 8, "enable_lora": True, "disable_cuda_graph": False}, 512),
        ({"max_running_requests": 4096}, 512),
        ({"max_running_requests": "300"}, 300),
        ({"max_running_requests": 256}, None),
        ({"max_running_requests": "many"}, None),
        ({"mem_fraction_static": 0.85}, 512),
        ({"mem_fraction_static": 0.9}, None),
        ({"mem_fraction_static": "most"}, None),
        ({"cuda_graph_max_bs_decode": 64}, None),
        ({"cuda_graph_bs_decode": [1, 2]}, None),
        ({"cuda_graph_config": {"decode": {"max_bs": 8}}}, None),
        ({"disable_cuda_graph": True}, None),
        ({"disable_decode_cuda_graph": True}, None),
        ({"speculative_algorithm": "EAGLE"}, None),
        ({"enable_dp_attention": True}, None),
        ({"moe_a2a_backend": "deepep"}, None),
        ({"max_running_requests": math.inf}, 512),
        ({"cuda_graph_max_bs_decode": 0}, None),
        ({"cuda_graph_bs_decode": []}, None),
        ({"cuda_graph_max_bs_decode": None}, 512),
        ({"nnodes": 2}, None),
        ({"nnodes": "1"}, 512),
    ],
)
def test_arguments_of_a_large_gpu(given, expected):
    found = graph_arguments(given, NAMES, H100)
    assert found.get("cuda_graph_max_bs_decode") == expected
    assert graph_arguments(given, NAMES, 60 * 1024 - 1) == {}
    assert graph_arguments(given, NAMES, None) == {}
    # A version that has no such argument, or whose arguments are not known.
    assert graph_arguments(given, (), H100) == {}


def put_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (r"printf '143771, Disabled\n143771, Disabled\n'", 143_771),
        (r"printf '143771, [N/A]\n24564, [N/A]\n'", 24_564),
        (r"printf 'WARNING: infoROM is corrupted\n81559, Disabled\n'", 81_559),
        (r"printf '81559, Disabled\n81559, Enabled\n'", None),
        ("echo '[N/A], Disabled'", None),
        ("echo '\u00b2, Disabled'", None),
        ("echo No devices were found", None),
        (r"printf '\377, \377'", None),
        ("exit 9", None),
    ],
)
def test_what_nvidia_smi_tells(script, expected, tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, script, monkeypatch)
    assert gpu_memory() == expected


def test_doctor_reads_the_same_program(tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, "echo 580.1, NVIDIA H200, 1000, 143771", monkeypatch)
    found = read_gpus()
    assert found.driver == "580.1"
    assert found.memory == (("NVIDIA H200", 1000, 143_771),)


def make_line(folder: Path, **arguments: object) -> str:
    (folder / "config.json").write_text("{}")
    python = str(cpu.engine_python())
    made = make_server_command(str(folder), device="cuda", python=python, **arguments)
    for lease in made.leases:
        lease.release()
    return " ".join(made.line)


def test_the_command_of_a_server(tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, "echo 143771, Disabled", monkeypatch)
    flag = "--cuda-graph-max-bs-decode"
    assert f"{flag} 512" in make_line(tmp_path)
    assert flag not in make_line(tmp_path, max_num_seqs=128)
    assert f"{flag} 64" in make_line(tmp_path, cuda_graph_max_bs_decode=64)
    assert flag not in make_line(tmp_path, enforce_eager=True)
    gpu_memory.cache_clear()
    put_nvidia_smi(tmp_path, "exit 9", monkeypatch)
    assert flag not in make_line(tmp_path)
