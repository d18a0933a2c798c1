"""What each check finds, on machines and folders that are made up for it."""

from __future__ import annotations

import itertools
import json
import math
import resource
import secrets
import shutil
import socket
import tempfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchrl_sglang.backends.async_sglang import MAX_IN_FLIGHT
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.cli.doctor import checks, to_lines
from torchrl_sglang.cli.doctor.checks import (
    CHECKS,
    GIB,
    SOCKETS_WANTED,
    Finding,
    in_range,
    run_checks,
)
from torchrl_sglang.cli.doctor.machine import GPUs, Machine, Required

SGLANG = {"sglang": "0.5.23", "sglang-router": "0.3.2"}
REQUIRED = Required("", {}, ">=0.5.15,<0.6")
NO_GPU = GPUs()
H200 = ("H200", 142_000, 143_000)
TWO = GPUs(2, "13.0", peers=True, driver="580.1", memory=(H200, H200))
Make = Callable[..., Machine]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Returns a function that makes up a machine."""

    def make(
        *,
        memory_free: int | None = 16 * GIB,
        outgoing: str = "32768\t60999",
        answer: str = json.dumps(SGLANG),
        required: Required = REQUIRED,
        gpus: GPUs = NO_GPU,
        **fields: Any,
    ) -> Machine:
        ports = tmp_path / "sys/net/ipv4/ip_local_port_range"
        ports.parent.mkdir(parents=True, exist_ok=True)
        ports.write_text(outgoing)
        if memory_free is not None:
            text = f"MemTotal: 9 kB\nMemAvailable: {memory_free >> 10} kB\n"
            (tmp_path / "meminfo").write_text(text)
        python = tmp_path / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.write_text(f"#!/bin/sh\necho '{answer}'\n")
        python.chmod(0o755)
        (tmp_path / "sglang-0.5.20").mkdir(exist_ok=True)
        own: dict[str, Any] = {
            "device": "cuda" if gpus.visible else "cpu",
            "python": str(python),
            "environment": {},
            "proc": tmp_path,
        }
        return Machine(gpus=gpus, required=required, **{**own, **fields})

    return make


def of(name: str, machine: Machine) -> list[Finding]:
    """Returns what one check finds."""
    return run_checks([getattr(checks, name)], machine)


def not_ok(name: str, machine: Machine) -> list[Finding]:
    return [finding for finding in of(name, machine) if finding.level != "ok"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("_python", {}),
        ("_packages", {"required": Required("", {"torch": ">=2.11,<3"}, "")}),
        ("_engine", {}),
        ("_engine", {"device": "cuda"}),
        ("_gpus", {}),
        ("_gpus", {"gpus": TWO}),
        ("_gpus", {"gpus": replace(TWO, memory=(), driver=None)}),
        ("_gpus", {"gpus": replace(TWO, visible=1, peers=None)}),
        ("_nccl", {}),
        ("_nccl", {"environment": {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "INFO"}}),
        ("_nccl", {"environment": {"NCCL_P2P_DISABLE": "0"}}),
        ("_nccl", {"environment": {"NCCL_SOCKET_IFNAME": "l"}}),
        ("_nccl", {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}),
        ("_nccl", {"environment": {"NCCL_SOCKET_IFNAME": "^docker"}}),
        ("_nccl", {"environment": {"NCCL_SOCKET_IFNAME": "=lo,lo"}}),
        ("_ports", {"outgoing": ""}),
        ("_proxy", {"environment": {"no_proxy": "x"}}),
        (
            "_proxy",
            {
                "environment": {
                    "http_proxy": "http://p:1",
                    "no_proxy": "x, localhost,127.0.0.1",
                }
            },
        ),
        ("_proxy", {"environment": {"http_proxy": "http://p:1", "NO_PROXY": "*"}}),
        ("_proxy", {"environment": {"https_proxy": "http://p:1"}}),
        ("_memory", {}),
        ("_memory", {"memory_free": None}),
        ("_memory", {"memory_free": GIB, "gpus": TWO}),
        ("_model", {}),
    ],
)
def test_a_machine_in_order_has_no_findings(make, name, fields):
    assert not_ok(name, make(**fields)) == []
    assert all(finding.remedy == "" for finding in of(name, make(**fields)))


NO_ROUTER = json.dumps({"sglang": "0.5.23"})
OLD = json.dumps({**SGLANG, "sglang": "0.5.9"})


@pytest.mark.parametrize(
    ("name", "fields", "level", "check", "message", "remedy"),
    [
        (
            *("_python", {"required": Required(">=9", {}, "")}),
            *("problem", "python", " is not in >=9.", "Make"),
        ),
        (
            *("_packages", {"required": Required("", {"no-such": ">=1,<2"}, "")}),
            *("problem", "no-such", "not installed", '"no-such>=1,<2"'),
        ),
        (
            *("_packages", {"required": Required("", {"torch": ">=99"}, "")}),
            *("problem", "torch", "is not in >=99", "pip install"),
        ),
        (
            *("_engine", {"answer": "{}"}),
            *("problem", "engine", "/bin/python has no sglang", cpu.INSTALL_COMMAND),
        ),
        (
            *("_engine", {"python": "/none"}),
            *("problem", "engine", "/none does not list", cpu.INSTALL_COMMAND),
        ),
        (
            *("_engine", {"answer": OLD}),
            *("warning", "engine", "0.5.9 in", "Install a version"),
        ),
        (
            *("_engine", {"answer": NO_ROUTER}),
            *("warning", "router", "no sglang-router", "one server"),
        ),
        (
            *("_gpus", {"gpus": replace(TWO, visible=0, cuda=None)}),
            *("warning", "gpu", "PyTorch is a build for CPU", "CUDA build"),
        ),
        (
            *("_gpus", {"gpus": replace(TWO, visible=0)}),
            *("warning", "gpu", "finds none", "CUDA_VISIBLE_DEVICES"),
        ),
        (
            *("_gpus", {"device": "cuda"}),
            *("problem", "gpu", "no GPU", "--device cpu"),
        ),
        (
            *("_gpus", {"gpus": replace(TWO, memory=(H200, ("H200", 9_000, 143_000)))}),
            *("warning", "gpu memory", "GPU 1 is", "--cuda-devices"),
        ),
        (
            *("_gpus", {"gpus": replace(TWO, peers=False)}),
            *("warning", "gpu links", "cannot all copy", "nvidia-smi topo"),
        ),
        (
            *("_nccl", {"environment": {"NCCL_CUMEM_ENABLE": "1"}}),
            *("warning", "nccl", "NCCL_CUMEM_ENABLE=1", "NCCL_CUMEM_ENABLE=0"),
        ),
        (
            *("_nccl", {"environment": {"NCCL_CUMEM_ENABLE": "1"}, "gpus": TWO}),
            *("problem", "nccl", "NCCL_CUMEM_ENABLE=1", "NCCL_CUMEM_ENABLE=0"),
        ),
        (
            *("_nccl", {"environment": {"NCCL_P2P_DISABLE": "1"}}),
            *("warning", "nccl", "NCCL_P2P_DISABLE=1", "Unset NCCL_P2P_DISABLE"),
        ),
        (
            *("_nccl", {"environment": {"NCCL_SHM_DISABLE": "1"}}),
            *("warning", "nccl", "NCCL_SHM_DISABLE=1", "Unset NCCL_SHM_DISABLE"),
        ),
        (
            *("_nccl", {"environment": {"NCCL_NVLS_ENABLE": "2"}}),
            *("warning", "nccl", "NCCL_NVLS_ENABLE=2", "Unset NCCL_NVLS_ENABLE"),
        ),
        (
            *("_nccl", {"environment": {"NCCL_SOCKET_IFNAME": "none0,lo"}}),
            *("problem", "nccl", "names none0, and", "choose from "),
        ),
        (
            *("_nccl", {"environment": {"GLOO_SOCKET_IFNAME": "none0"}}),
            *("problem", "gloo", "GLOO_SOCKET_IFNAME names none0", "Unset it"),
        ),
        (
            *("_ports", {"outgoing": "1024\t60999"}),
            *("warning", "ports", "from 1024 to 60999", "begin at 32000"),
        ),
        (
            "_proxy",
            {
                "environment": {
                    "HTTP_PROXY": "http://me:secret@p:1",
                    "no_proxy": "localhost",
                }
            },
            *("warning", "proxy", "exempt 127.0.0.1.", "no_proxy=localhost,127.0.0.1."),
        ),
        (
            *("_proxy", {"environment": {"all_proxy": "socks://p:1"}}),
            *("warning", "proxy", "all_proxy is set", "no_proxy=127.0.0.1,localhost."),
        ),
        (
            *("_memory", {"memory_free": GIB + (GIB >> 1)}),
            *("warning", "memory", "1.5 GiB", "2 GiB"),
        ),
        (
            *("_model", {"model": "no-such-owner/none"}),
            *("warning", "model", "no-such-owner/none is neither", "downloaded"),
        ),
        (
            *("_model", {"model": "/no-such/model"}),
            *("problem", "model", "no folder /no-such/model", "all machines share"),
        ),
        (
            *("_model", {"model": "not a name at all"}),
            *("warning", "model", "not a name at all is neither", "downloaded"),
        ),
    ],
)
def test_each_fault_is_a_finding_with_a_remedy(
    make, name, fields, level, check, message, remedy
):
    (finding,) = not_ok(name, make(**fields))
    expect(finding, level, check, message, remedy)


def expect(finding: Finding, level: str, check: str, message: str, remedy: str) -> None:
    assert (finding.level, finding.check) == (level, check)
    assert message in finding.message
    assert remedy in finding.remedy
    assert "secret" not in finding.message
    assert finding.message.endswith(".")
    assert finding.remedy.endswith(".")


def install(folder: Path, distribution: str, version: str, source: str) -> None:
    """Makes up a distribution whose module is ``made_up``."""
    about = folder / f"{distribution}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (folder / "made_up.py").write_text(source)


MADE_UP = Required("", {"made_up": ">=1,<2"}, "")


def test_a_broken_package_is_a_problem(make, tmp_path, monkeypatch):
    install(tmp_path, "made_up", "1.0", "raise OSError('no libcuda')")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = not_ok("_packages", make(required=MADE_UP))
    expect(finding, "problem", "made_up", "OSError: no libcuda", "Install it again")


def test_a_nightly_outside_the_range_is_a_warning(make, tmp_path, monkeypatch):
    install(tmp_path, "made_up_nightly", "2026.11.28", "")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = not_ok("_packages", make(required=MADE_UP))
    message = "made_up-nightly 2026.11.28 is not in >=1,<2."
    expect(finding, "warning", "made_up", message, "made_up>=1,<2")


def test_versions_beside_the_default_one_are_named(make):
    (found, _) = of("_engine", make())
    assert "SGLang 0.5.23, 0.5.20 for cpu in " in found.message
    (found, _) = of("_engine", make(device="cuda"))
    assert "SGLang 0.5.23 for cuda in " in found.message


@pytest.mark.parametrize("fields", [{"answer": "{}"}, {"python": "/none"}])
def test_without_an_engine_on_gpus(make, fields):
    (finding,) = not_ok("_engine", make(device="cuda", **fields))
    assert finding.level == "problem"
    assert cpu.INSTALL_COMMAND not in finding.remedy


@pytest.mark.parametrize(
    ("taken", "level", "message"),
    [(200, "problem", "0 of 200"), (140, "warning", "60")],
)
def test_ports_that_are_taken(make, monkeypatch, taken, level, message):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        used, free = server.getsockname()[1], probe.getsockname()[1]
        probe.close()
        ports = itertools.chain([used] * taken, itertools.repeat(free))
        monkeypatch.setattr(secrets, "choice", lambda _: next(ports))
        (finding,) = not_ok("_ports", make())
    expect(finding, level, "ports", message, "--port")


@pytest.mark.parametrize(
    ("name", "check", "free", "message", "remedy"),
    [
        ("_shared_memory", "/dev/shm", 64 << 20, "0.06 GiB", "--shm-size"),
        ("_shared_memory", "/dev/shm", None, "0.00 GiB", "--shm-size"),
        ("_temp", "temp", 1 << 20, "0.00 GiB are free in ", "TMPDIR"),
    ],
)
def test_folders_that_are_full(make, monkeypatch, name, check, free, message, remedy):
    def usage(folder: str) -> Any:
        if free is None:
            raise OSError(folder)
        return namedtuple("Usage", "free")(free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    (finding,) = not_ok(name, make())
    expect(finding, "warning", check, message, remedy)


@pytest.mark.parametrize(
    ("folder", "level", "message", "remedy"),
    [
        ("/none", "problem", "Nothing can be written to /none", "TMPDIR"),
        ("x" * 90, "warning", "too long for sockets", "56 characters"),
    ],
)
def test_temporary_folders(make, tmp_path, monkeypatch, folder, level, message, remedy):
    path = tmp_path / folder
    if folder != "/none":
        path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    (finding,) = not_ok("_temp", make())
    expect(finding, level, "temp", message, remedy)


@pytest.mark.parametrize(
    ("limit", "level"),
    [
        (65_536, None),
        (resource.RLIM_INFINITY, None),
        (1024, "warning"),
        (128, "problem"),
    ],
)
def test_open_files(make, monkeypatch, limit, level):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = of("_open_files", make())
    if level is None:
        shown = math.inf if limit == resource.RLIM_INFINITY else limit
        assert f"The limit is {shown};" in found[0].message
        assert found[0].level == "ok"
    else:
        (finding,) = found
        expect(finding, level, "open files", f"limit is {limit}", "ulimit -n 4096")


def save_model(folder: Path, **files: str) -> str:
    """Writes a whole model, some of whose files are others, or absent if empty."""
    whole = {
        "config.json": json.dumps({"model_type": "x", "text_config": {"dtype": "f"}}),
        "model.safetensors": "weights",
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": "x"}),
    }
    folder.mkdir()
    for name, content in (whole | files).items():
        if content:
            (folder / name).write_text(content)
    return str(folder)


INDEX = {"weight_map": {"a": "1", "b": "2", "c": "3", "d": "4"}}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


@pytest.mark.parametrize(
    ("files", "level", "check", "message", "remedy"),
    [
        (
            {"config.json": ""},
            *("problem", "model", "no usable config.json: [Errno", "Give"),
        ),
        ({"config.json": "{"}, *("problem", "model", "no usable config", "Give")),
        ({"config.json": "[]"}, *("problem", "model", "no JSON object", "Give")),
        (
            {"model.safetensors": ""},
            *("problem", "weights", "missing: *.safetensors", "load_format=dummy"),
        ),
        (
            {"x.index.json": json.dumps(INDEX)},
            *("problem", "weights", "missing: 1, 2, 3.", "Complete the download"),
        ),
        (
            {"model.safetensors": POINTER},
            *("problem", "weights", "model.safetensors is a reference", "git lfs pull"),
        ),
        (
            {"tokenizer.json": ""},
            *("warning", "tokenizer", "no tokenizer", "skip_tokenizer_init"),
        ),
        (
            {"tokenizer_config.json": ""},
            *("warning", "chat template", "no chat template", "Conversations"),
        ),
    ],
)
def test_models_that_are_not_whole(
    make, tmp_path, files, level, check, message, remedy
):
    model = save_model(tmp_path / "model", **files)
    (finding,) = not_ok("_model", make(model=model))
    expect(finding, level, check, message, remedy)


def test_a_model_that_is_whole(make, tmp_path):
    index = json.dumps({"weight_map": {"a": "model.safetensors"}})
    files = {"tokenizer_config.json": "", "chat_template.jinja": "x"}
    # One complete format is enough.
    files |= {"x.index.json": index, "y.index.json": json.dumps(INDEX)}
    model = save_model(tmp_path / "model", **files)
    about, tokenizer = of("_model", make(model=model))
    assert about.message.startswith("x of dtype f, ")
    assert model in about.message
    assert tokenizer.level == "ok"


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (20 * GIB, {}, "20.0 GiB, and 16.0 GiB"),
        (300 * GIB, {"gpus": TWO}, "300.0 GiB, and 138.7 GiB"),
    ],
)
def test_models_that_are_too_large(make, tmp_path, size, fields, message):
    model = save_model(tmp_path / "model")
    with open(f"{model}/model.safetensors", "r+b") as file:
        file.truncate(size)
    (finding,) = not_ok("_model", make(model=model, **fields))
    expect(finding, "warning", "model size", message, "tp_size")


def test_a_check_of_somebody_else(make):
    def look(machine: Machine) -> checks.Rows:
        level = "warning" if machine.device == "cpu" else "ok"
        yield level, "amx", "The processor has no AMX.", "Take another one."

    findings = run_checks([*CHECKS, look], make())
    assert findings[-1] == Finding(
        "warning", "amx", "The processor has no AMX.", "Take another one."
    )
    (found,) = run_checks([look], make(gpus=TWO))
    assert found.remedy == ""


def test_sockets_are_those_of_an_engine():
    assert SOCKETS_WANTED == MAX_IN_FLIGHT


def test_one_line_each():
    findings = [Finding("problem", "a", "One\nline.", "Do."), Finding("ok", "bc", "x")]
    assert to_lines(findings) == ["problem  a   One line. Do.", "ok       bc  x"]
    assert to_lines([]) == []


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.11", ">=2.11,<3", True),
        ("2.11.0+cu130", ">=2.11,<3", True),
        ("2.10.9", ">=2.11,<3", False),
        ("2.12.0.dev20261128", ">=2.11,<3", True),
        ("1.2", "", True),
        ("unknown", ">=1", False),
        ("unknown", "", True),
    ],
)
def test_versions(version, specifier, expected):
    assert in_range(version, specifier) is expected
