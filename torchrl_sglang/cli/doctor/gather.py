"""Finding out what ``doctor`` wants to know; nothing here decides or changes anything.

It has to work where nothing else does, so every question may fail by itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torchrl_sglang
from torchrl_sglang.cli.doctor.facts import (
    Facts,
    GpuFacts,
    ProcessFacts,
    SystemFacts,
    TrainerFacts,
)
from torchrl_sglang.cli.doctor.gather_engine import gather_engine
from torchrl_sglang.cli.doctor.gather_model import gather_model

__all__ = ["gather"]

NAME = "torchrl-sglang"

PORTS_TRIED = 200
"""How many ports are looked at, of thousands: the share is what counts."""

QUESTION_SECONDS = 30.0
"""Budget for a program that is asked something."""

VARIABLES = re.compile(r"(NCCL|GLOO)_\w+|(http|all|no)_proxy", re.IGNORECASE)

WATCHDOG = b"torchrl_sglang/backends/launch/watchdog.py"
SERVERS = (
    b"torchrl_sglang/backends/launch/cpu/launch.py",
    b"torchrl_sglang/backends/launch/router_launch.py",
    b"sglang.launch_server",
    b"sglang::",
)


def gather(
    *, model: str | None = None, python: str | None = None, device: str | None = None
) -> Facts:
    """Returns everything that there is to know here.

    Args:
        model: folder or hub name to look at.
        python: interpreter that has SGLang.
        device: ``"cpu"`` or ``"cuda"``; by default what a server would take.
    """
    requires_python, requirements, engine_range = read_requirements()
    trainer = gather_trainer(requires_python, requirements)
    gpus = gather_gpus()
    on_gpu = device == "cuda" or (device is None and gpus.visible > 0)
    chosen: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
    return Facts(
        trainer=trainer,
        engine=gather_engine(chosen, python, required=engine_range),
        gpus=gpus,
        system=gather_system(),
        model=None if model is None else gather_model(model),
    )


def read_requirements() -> tuple[str, dict[str, str], str]:
    """Returns the ranges for Python, for packages, and for SGLang.

    A checkout's pyproject.toml goes before what was noted down when it was installed.
    """
    file = Path(torchrl_sglang.__file__).parents[1] / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text())["project"]
        if project["name"] == NAME:
            extra = project["optional-dependencies"]["sglang"]
            return (
                str(project["requires-python"]),
                parse_requirements(project["dependencies"]),
                parse_requirements(extra).get("sglang", ""),
            )
    except (OSError, KeyError, ValueError):
        pass
    try:
        about = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "", {}, ""
    lines = about.requires or []
    own = [line for line in lines if ";" not in line]
    extra = [line.partition(";")[0] for line in lines if '"sglang"' in line]
    python = about.metadata["Requires-Python"] or ""
    return python, parse_requirements(own), parse_requirements(extra).get("sglang", "")


def parse_requirements(lines: Iterable[str]) -> dict[str, str]:
    """Returns package -> range of lines like ``torch>=2.11,<3``. Pure.

    Examples:
        >>> parse_requirements(["sglang[all]>=0.5.15,<0.6"])
        {'sglang': '>=0.5.15,<0.6'}
    """
    found = {}
    for line in lines:
        match = re.match(r"([\w.-]+)\s*(\[[^]]*\])?\s*(.*)", line)
        if match:
            found[match.group(1)] = match.group(3).strip()
    return found


def gather_trainer(requires: str, requirements: Mapping[str, str]) -> TrainerFacts:
    """Returns what this Python and its packages are."""
    packages: dict[str, str | None] = {}
    broken: dict[str, str] = {}
    for name in requirements:
        try:
            packages[name] = importlib.metadata.version(name)
            importlib.import_module(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
        except Exception as error:  # noqa: BLE001 - A broken package fails as it likes.
            said = (str(error).splitlines() or [""])[0]
            broken[name] = f"{type(error).__name__}: {said}"
    return TrainerFacts(
        python=platform.python_version(),
        requires_python=requires,
        packages=packages,
        requirements=requirements,
        broken=broken,
    )


def gather_gpus() -> GpuFacts:
    """Returns what PyTorch and the driver say about accelerators."""
    driver = _ask_driver()
    try:
        import torch

        visible = torch.cuda.device_count()
        peers = all(
            torch.cuda.can_device_access_peer(one, other)
            for one in range(visible)
            for other in range(visible)
            if one != other
        )
        cuda = torch.version.cuda
    except (ImportError, OSError, RuntimeError, AssertionError):
        visible, peers, cuda = 0, False, None
    return GpuFacts(
        visible=visible,
        cuda=cuda,
        driver=driver[0][3] if driver else None,
        names=tuple(row[0] for row in driver),
        total_mib=tuple(_number(row[1]) for row in driver),
        free_mib=tuple(_number(row[2]) for row in driver),
        peers=peers if visible > 1 else None,
    )


def _ask_driver() -> list[list[str]]:
    """Returns name, total and free memory in MiB and driver of each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUESTION_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 4]


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def gather_system() -> SystemFacts:
    """Returns what the operating system gives."""
    from torchrl_sglang.backends.launch.ports import PORTS

    tried = [PORTS[secrets.randbelow(len(PORTS))] for _ in range(PORTS_TRIED)]
    ephemeral = _numbers_in("/proc/sys/net/ipv4/ip_local_port_range")
    temp = tempfile.gettempdir()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SystemFacts(
        environment={
            name: value for name, value in os.environ.items() if VARIABLES.match(name)
        },
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        ports=PORTS,
        ports_tried=len(tried),
        ports_free=sum(map(_is_free, tried)),
        ephemeral_from=ephemeral[0] if len(ephemeral) == 2 else None,
        ephemeral_to=ephemeral[1] if len(ephemeral) == 2 else None,
        shm_free=_free_bytes("/dev/shm"),
        open_files=-1 if soft == resource.RLIM_INFINITY else soft,
        sockets_wanted=_sockets_wanted(),
        temp_folder=temp,
        temp_free=_free_bytes(temp) if os.access(temp, os.W_OK) else None,
        memory_free=_memory_free(),
        cores=len(os.sched_getaffinity(0)),
        processes=tuple(find_processes()),
    )


def _sockets_wanted() -> int:
    try:
        from torchrl_sglang.backends.async_sglang import MAX_IN_FLIGHT
    except ImportError:
        return 2048
    return MAX_IN_FLIGHT


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _numbers_in(file: str) -> list[int]:
    try:
        return [int(word) for word in Path(file).read_text().split()]
    except (OSError, ValueError):
        return []


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _memory_free() -> int | None:
    try:
        found = re.search(
            r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text()
        )
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def find_processes() -> Iterator[ProcessFacts]:
    """Yields this user's server processes; a parent is the nearest of them above."""
    parents: dict[int, int] = {}
    kinds: dict[int, Literal["watchdog", "server"]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2]
            line = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            mine = os.stat(f"/proc/{entry}").st_uid == os.getuid()
        except OSError:
            continue
        parents[int(entry)] = int(fields.split()[1])
        # The words in front: what follows may quote anything.
        words = line[:4]
        if not mine:
            continue
        if any(word.endswith(WATCHDOG) for word in words):
            kinds[int(entry)] = "watchdog"
        elif any(mark in word for word in words for mark in SERVERS):
            kinds[int(entry)] = "server"
    for pid, kind in kinds.items():
        above = parents[pid]
        while above in parents and above not in kinds:
            above = parents[above]
        yield ProcessFacts(pid=pid, parent=above if above in kinds else 0, kind=kind)
