"""From facts to findings: every case, written down."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_sglang.backends.async_sglang import MAX_IN_FLIGHT
from torchrl_sglang.cli.doctor import to_lines
from torchrl_sglang.cli.doctor.findings import (
    GIB,
    SOCKETS_WANTED,
    Finding,
    in_range,
    judge,
)

MODEL = SimpleNamespace(
    name="m",
    folder="/m",
    config_error=None,
    model_type="qwen2",
    dtype="bfloat16",
    has_tokenizer=True,
    has_chat_template=True,
    weight_bytes=GIB,
    missing_files=[],
    pointer_files=[],
)

TORCH = ("torch", ">=2.11,<3", "2.13.0+cpu", None)
TORCHRL = ("torchrl", ">=0.14.1,<0.15", "0.14.1", None)

HEALTHY = SimpleNamespace(
    python="3.11.7",
    requires_python=">=3.11,<3.13",
    packages=[TORCH, TORCHRL],
    device="cpu",
    engine_python="/engine/bin/python",
    engine_error=None,
    engine_packages={"sglang": "0.5.23", "sglang-router": "0.3.2"},
    engine_required=">=0.5.15,<0.6",
    engine_generations=["0.5.20"],
    visible_gpus=0,
    cuda=None,
    driver=None,
    gpus=[],
    peers=None,
    environment={},
    interfaces=("lo", "eth0"),
    ports_free=198,
    ephemeral=(32_768, 60_999),
    shm_free=8 * GIB,
    open_files=65_536,
    temp_folder="/tmp",
    temp_free=50 * GIB,
    memory_free=16 * GIB,
    cores=2,
    servers=([7], []),
    model=MODEL,
)

TWO_GPUS = {
    "visible_gpus": 2,
    "cuda": "13.0",
    "driver": "580.1",
    "gpus": (("H200", 142_000, 143_000), ("H200", 142_000, 143_000)),
    "peers": True,
}


def change(**fields: Any) -> SimpleNamespace:
    """Returns the healthy facts with some fields changed."""
    return SimpleNamespace(**{**vars(HEALTHY), **fields})


def on_gpus(**fields: Any) -> SimpleNamespace:
    return change(**{**TWO_GPUS, "device": "cuda", **fields})


def environment(**variables: str) -> SimpleNamespace:
    return change(environment=variables)


def model(**fields: Any) -> SimpleNamespace:
    return change(model=SimpleNamespace(**{**vars(MODEL), **fields}))


def not_ok(facts: SimpleNamespace) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level != "ok"]


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        change(model=None),
        on_gpus(),
        on_gpus(gpus=(), driver=None),
        on_gpus(visible_gpus=1, peers=None),
        environment(NCCL_CUMEM_ENABLE="0", NCCL_P2P_DISABLE="0", NCCL_DEBUG="INFO"),
        environment(NCCL_SOCKET_IFNAME="eth", GLOO_SOCKET_IFNAME="lo"),
        environment(NCCL_SOCKET_IFNAME="^docker"),
        environment(NCCL_SOCKET_IFNAME="=eth0,lo"),
        environment(http_proxy="http://p:1", no_proxy="x, localhost,127.0.0.1"),
        environment(http_proxy="http://p:1", NO_PROXY="*"),
        environment(https_proxy="http://p:1"),
        change(ephemeral=None),
        change(open_files=math.inf),
        change(memory_free=None),
    ],
)
def test_what_is_as_it_should_be(facts):
    assert not_ok(facts) == []
    assert all(finding.remedy == "" for finding in judge(facts))


@pytest.mark.parametrize(
    ("facts", "level", "check", "message", "remedy"),
    [
        (
            change(python="3.13.1"),
            *("problem", "python", "3.13.1 is not in >=3.11,<3.13", "Make"),
        ),
        (
            change(packages=[TORCH, (*TORCHRL[:2], None, None)]),
            *("problem", "torchrl", "not installed", '"torchrl>=0.14.1,<0.15"'),
        ),
        (
            change(packages=[(*TORCH[:2], "2.10.1", None), TORCHRL]),
            *("problem", "torch", "2.10.1 is not in >=2.11,<3", "pip install"),
        ),
        (
            change(packages=[(*TORCH[:3], "OSError: no libcuda"), TORCHRL]),
            *("problem", "torch", "OSError: no libcuda", "Install it again"),
        ),
        (
            change(engine_error="There is no x.", engine_packages={}),
            *("problem", "engine", "There is no x.", "launch.cpu.install"),
        ),
        (
            change(engine_packages={}),
            *("problem", "engine", "/engine/bin/python has no sglang", "install"),
        ),
        (
            change(engine_packages={"sglang": "0.5.9", "sglang-router": "1"}),
            *("warning", "engine", "0.5.9 in", "Install a version"),
        ),
        (
            change(engine_packages={"sglang": "0.5.23"}),
            *("warning", "router", "no sglang-router", "one server"),
        ),
        (
            change(**{**TWO_GPUS, "visible_gpus": 0, "cuda": None}),
            *("warning", "gpu", "PyTorch is a build for CPU", "CUDA build"),
        ),
        (
            change(**{**TWO_GPUS, "visible_gpus": 0}),
            *("warning", "gpu", "finds none", "CUDA_VISIBLE_DEVICES"),
        ),
        (
            change(device="cuda"),
            *("problem", "gpu", "no GPU", "--device cpu"),
        ),
        (
            on_gpus(gpus=(("H200", 142_000, 143_000), ("H200", 9_000, 143_000))),
            *("warning", "gpu memory", "GPU 1 is", "--cuda-devices"),
        ),
        (
            on_gpus(peers=False),
            *("warning", "gpu links", "cannot all copy", "nvidia-smi topo"),
        ),
        (
            environment(NCCL_CUMEM_ENABLE="1"),
            *("warning", "nccl", "NCCL_CUMEM_ENABLE=1", "NCCL_CUMEM_ENABLE=0"),
        ),
        (
            on_gpus(environment={"NCCL_CUMEM_ENABLE": "1"}),
            *("problem", "nccl", "NCCL_CUMEM_ENABLE=1", "NCCL_CUMEM_ENABLE=0"),
        ),
        (
            environment(NCCL_P2P_DISABLE="1"),
            *("warning", "nccl", "NCCL_P2P_DISABLE=1", "Unset NCCL_P2P_DISABLE"),
        ),
        (
            environment(NCCL_SHM_DISABLE="1"),
            *("warning", "nccl", "NCCL_SHM_DISABLE=1", "Unset NCCL_SHM_DISABLE"),
        ),
        (
            environment(NCCL_NVLS_ENABLE="2"),
            *("warning", "nccl", "NCCL_NVLS_ENABLE=2", "Unset NCCL_NVLS_ENABLE"),
        ),
        (
            environment(NCCL_SOCKET_IFNAME="ib0,eth0"),
            *("problem", "nccl", "names ib0, and", "lo, eth0"),
        ),
        (
            environment(GLOO_SOCKET_IFNAME="ib0"),
            *("problem", "gloo", "GLOO_SOCKET_IFNAME names ib0", "Unset it"),
        ),
        (
            change(ports_free=0),
            *("problem", "ports", "0 of 200", "--port"),
        ),
        (
            change(ports_free=60),
            *("warning", "ports", "60 of 200", "servers that nobody needs"),
        ),
        (
            change(ephemeral=(1024, 60_999)),
            *("warning", "ports", "from 1024 to 60999", "begin at 32000"),
        ),
        (
            environment(HTTP_PROXY="http://me:secret@p:1", no_proxy="localhost"),
            *("warning", "proxy", "exempt 127.0.0.1.", "no_proxy=localhost,127.0.0.1."),
        ),
        (
            environment(all_proxy="socks://p:1"),
            *("warning", "proxy", "all_proxy is set", "no_proxy=127.0.0.1,localhost."),
        ),
        (
            change(shm_free=None),
            *("warning", "/dev/shm", "0.00 GiB", "--shm-size"),
        ),
        (
            change(shm_free=64 << 20),
            *("warning", "/dev/shm", "0.06 GiB", "--shm-size"),
        ),
        (
            change(open_files=1024),
            *("warning", "open files", "limit is 1024", "ulimit -n 4096"),
        ),
        (
            change(open_files=128),
            *("problem", "open files", "limit is 128", "ulimit -n 4096"),
        ),
        (
            change(temp_free=None),
            *("problem", "temp", "Nothing can be written to /tmp", "TMPDIR"),
        ),
        (
            change(temp_free=1 << 20),
            *("warning", "temp", "0.00 GiB are free in /tmp", "TMPDIR"),
        ),
        (
            change(temp_folder="/" + "x" * 90),
            *("warning", "temp", "too long for sockets", "56 characters"),
        ),
        (
            change(memory_free=GIB + (GIB >> 1)),
            *("warning", "memory", "1.5 GiB", "2 GiB"),
        ),
        (
            change(servers=([7], [5, 9])),
            *("warning", "servers", "not look after: 5, 9.", "`kill 5 9`"),
        ),
        (
            model(name="a/b", folder=None),
            *("warning", "model", "a/b is neither", "downloaded"),
        ),
        (
            model(config_error="no file"),
            *("problem", "model", "no usable config.json: no file", "Give"),
        ),
        (
            model(weight_bytes=0),
            *("problem", "weights", "missing: *.safetensors", "load_format=dummy"),
        ),
        (
            model(missing_files=["a", "b", "c", "d"]),
            *("problem", "weights", "missing: a, b, c.", "Complete the download"),
        ),
        (
            model(pointer_files=["a.safetensors"]),
            *("problem", "weights", "a.safetensors is a reference", "git lfs pull"),
        ),
        (
            model(has_tokenizer=False),
            *("warning", "tokenizer", "no tokenizer", "skip_tokenizer_init"),
        ),
        (
            model(has_chat_template=False),
            *("warning", "chat template", "no chat template", "Conversations"),
        ),
        (
            model(weight_bytes=20 * GIB),
            *("warning", "model size", "20.0 GiB, and 16.0 GiB", "tp_size"),
        ),
        (
            on_gpus(model=model(weight_bytes=300 * GIB).model),
            *("warning", "model size", "300.0 GiB, and 138.7 GiB", "tp_size"),
        ),
    ],
)
def test_what_is_not(facts, level, check, message, remedy):
    (finding,) = not_ok(facts)
    assert (finding.level, finding.check) == (level, check)
    assert message in finding.message
    assert remedy in finding.remedy
    assert "secret" not in finding.message
    assert finding.message.endswith(".")
    assert finding.remedy.endswith(".")


@pytest.mark.parametrize(
    "engine",
    [{"engine_packages": {}}, {"engine_error": "No.", "engine_packages": {}}],
)
def test_without_an_engine_on_gpus(engine):
    (finding,) = not_ok(on_gpus(**engine))
    assert finding.level == "problem"
    assert "cpu.install" not in finding.remedy


def test_sockets_are_those_of_an_engine():
    assert SOCKETS_WANTED == MAX_IN_FLIGHT


def test_one_line_each():
    facts = change(engine_error="One\nline.", engine_packages={})
    lines = to_lines(judge(facts))
    assert len(lines) == len(judge(facts))
    assert not any("\n" in line or line.endswith(" ") for line in lines)
    assert to_lines([]) == []


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.11", ">=2.11,<3", True),
        ("2.11.0+cu130", ">=2.11,<3", True),
        ("2.10.9", ">=2.11,<3", False),
        ("3.0.0", ">=2.11,<3", False),
        ("3", "<=3", True),
        ("0.5.23.post1", ">=0.5.15,<0.6", True),
        ("0.14.1", ">=0.14.1,<0.15", True),
        ("0.15", ">=0.14.1,<0.15", False),
        ("1.2", "==1.2.0", True),
        ("1.2", "!=1.2", False),
        ("1.2", ">1.2", False),
        ("1.2", "", True),
        ("unknown", ">=1", False),
    ],
)
def test_versions(version, specifier, expected):
    assert in_range(version, specifier) is expected
