"""Facts about this machine that ``doctor`` judges.

``gather()`` only reads, and each question may fail by itself: ``doctor`` has to work
where nothing else does. Facts are plain values, so that a test can write down any case.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement

from torchrl_sglang.errors import ConfigurationError

__all__ = ["Facts", "ModelFacts", "ServerProcess", "gather"]

PORTS_TRIED = 200
ASK_SECONDS = 60.0
VARIABLES = re.compile(r"(NCCL|GLOO)_\w+|(http|all|no)_proxy", re.IGNORECASE)
ENGINE_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
LFS_POINTER = "version https://git-lfs"
WATCHDOG = "torchrl_sglang/backends/launch/watchdog.py"
SERVERS = re.compile(
    r"torchrl_sglang/backends/launch/(cpu/launch|router_launch)\.py"
    r"|sglang\.launch_server|sglang::"
)
ASK_VERSIONS = """
import importlib.metadata as m, json, sys
found = {name: [d.version for d in m.distributions(name=name)] for name in sys.argv[1:]}
print(json.dumps({name: (found[name] or [None])[0] for name in found}))
"""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The files of a model."""

    name: str
    folder: str | None  # None for a hub name that is not in the cache
    config_error: str | None = None
    model_type: str | None = None
    dtype: str | None = None
    has_tokenizer: bool = False
    has_chat_template: bool = False
    weight_bytes: int = 0
    missing_files: tuple[str, ...] = ()  # named by the index of the weights
    pointer_files: tuple[str, ...] = ()  # references to Git LFS instead of weights


class ServerProcess(NamedTuple):
    """A process of this user that belongs to a server."""

    pid: int
    parent: int  # the nearest such process above it, or 0
    kind: Literal["watchdog", "server"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts; ``None`` is what could not be found out."""

    # This Python and its packages
    python: str
    requires_python: str
    packages: Mapping[str, str | None]  # package -> installed version
    requirements: Mapping[str, str]  # package -> supported versions
    broken: Mapping[str, str] = field(default_factory=dict)  # package -> import error
    # The Python that SGLang would run in
    device: str  # cpu or cuda
    engine_python: str | None  # its interpreter
    engine_error: str | None = None  # why there is none, or why it does not answer
    engine_packages: Mapping[str, str | None] = field(default_factory=dict)
    engine_required: str = ""  # supported versions of SGLang
    engine_generations: tuple[str, ...] = ()  # further versions of SGLang beside it
    # GPUs
    visible_gpus: int = 0  # to PyTorch
    cuda: str | None = None  # that PyTorch was built for; None for a CPU build
    driver: str | None = None  # version; None if nvidia-smi did not answer
    gpus: tuple[tuple[str, int, int], ...] = ()  # name, free MiB, total MiB
    peers: bool | None = None  # whether each GPU can copy directly to each other one
    # The operating system
    environment: Mapping[str, str]  # variables of NCCL, gloo and proxies
    interfaces: tuple[str, ...]  # of the network
    ports: range  # that servers listen on
    ports_tried: int
    ports_free: int  # of those tried
    ephemeral: tuple[int, int] | None  # first and last port of outgoing connections
    shm_free: int | None  # bytes of /dev/shm
    open_files: int  # soft limit; -1 for none
    sockets_wanted: int  # most requests of an engine in flight
    temp_folder: str
    temp_free: int | None  # bytes; None if nothing can be written
    memory_free: int | None  # bytes
    cores: int
    processes: tuple[ServerProcess, ...] = ()
    # The model, where one was named
    model: ModelFacts | None = None


def gather(
    *, model: str | None = None, python: str | None = None, device: str | None = None
) -> Facts:
    """Returns all facts about this machine, SGLang's ``python`` and a ``model``."""
    requires_python, requirements, sglang = read_requirements()
    gpus = _gpus()
    device = device or ("cuda" if gpus["visible_gpus"] else "cpu")
    return Facts(
        requires_python=requires_python,
        requirements=requirements,
        **_trainer(requirements),
        device=device,
        engine_required=sglang,
        **gather_engine(device, python),
        **gpus,
        **_system(),
        model=None if model is None else gather_model(model),
    )


def read_requirements() -> tuple[str, dict[str, str], str]:
    """Returns the supported versions of Python, of packages, and of SGLang."""
    try:
        about = importlib.metadata.distribution("torchrl-sglang")
    except importlib.metadata.PackageNotFoundError:
        return "", {}, ""
    found = [Requirement(line) for line in about.requires or []]
    own = {each.name: str(each.specifier) for each in found if each.marker is None}
    sglang = [str(each.specifier) for each in found if each.name == "sglang"]
    return about.metadata["Requires-Python"] or "", own, (sglang or [""])[0]


def _trainer(requirements: Mapping[str, str]) -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    broken: dict[str, str] = {}
    for name in requirements:
        try:
            packages[name] = importlib.metadata.version(name)
            importlib.import_module(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
        except Exception as error:  # noqa: BLE001 - A broken package may raise anything.
            broken[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return {
        "python": platform.python_version(),
        "packages": packages,
        "broken": broken,
    }


def gather_engine(device: str, python: str | None) -> dict[str, Any]:
    """Returns which SGLang a server would run, without importing it."""
    from torchrl_sglang.backends.launch import cpu
    from torchrl_sglang.backends.launch.environment import inherited_environment

    interpreter, own = python or sys.executable, dict[str, str]()
    versions: tuple[str, ...] = ()
    try:
        if device == "cpu":
            interpreter = str(cpu.engine_python(python=python))
            own, versions = cpu.engine_environment(python=python), cpu.VERSIONS
    except ConfigurationError as error:
        return {"engine_python": None, "engine_error": str(error)}
    other = interpreter != sys.executable
    environment = inherited_environment(os.environ, own_python=other)
    ask = [interpreter, "-c", ASK_VERSIONS, *ENGINE_PACKAGES]
    try:
        packages = json.loads(_run(ask, {**environment, **own}))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        message = f"{interpreter} does not tell its packages: {''.join(said[-1:])}."
        return {"engine_python": None, "engine_error": message}
    folder = Path(interpreter).parent.parent
    beside = tuple(v for v in versions if (folder / f"sglang-{v}").is_dir())
    return {
        "engine_python": interpreter,
        "engine_packages": packages,
        "engine_generations": beside,
    }


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ASK_SECONDS,
        check=True,
    ).stdout


def _gpus() -> dict[str, Any]:
    query = "--query-gpu=name,memory.free,memory.total,driver_version"
    rows: list[list[str]] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
        rows = [line.split(", ") for line in text.splitlines()]
        rows = [row for row in rows if len(row) == 4]
    try:
        import torch

        cuda, count = torch.version.cuda, torch.cuda.device_count()
        pairs = ((a, b) for a in range(count) for b in range(count) if a != b)
        peers = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    except (ImportError, OSError, RuntimeError, AssertionError):
        cuda, count, peers = None, 0, False
    return {
        "visible_gpus": count,
        "cuda": cuda,
        "driver": rows[0][3] if rows else None,
        "gpus": tuple((name, _mib(free), _mib(total)) for name, free, total, _ in rows),
        "peers": peers if count > 1 else None,
    }


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _system() -> dict[str, Any]:
    from torchrl_sglang.backends.launch.ports import PORTS

    tried = [PORTS[secrets.randbelow(len(PORTS))] for _ in range(PORTS_TRIED)]
    ports = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    memory = re.search(r"MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"))
    temp = tempfile.gettempdir()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "environment": {k: v for k, v in os.environ.items() if VARIABLES.match(k)},
        "interfaces": tuple(name for _, name in socket.if_nameindex()),
        "ports": PORTS,
        "ports_tried": len(tried),
        "ports_free": sum(map(_is_free, tried)),
        "ephemeral": (int(ports[0]), int(ports[1])) if len(ports) == 2 else None,
        "shm_free": _free_bytes("/dev/shm"),
        "open_files": -1 if soft == resource.RLIM_INFINITY else soft,
        "sockets_wanted": _sockets_wanted(),
        "temp_folder": temp,
        "temp_free": _free_bytes(temp) if os.access(temp, os.W_OK) else None,
        "memory_free": int(memory[1]) * 1024 if memory else None,
        "cores": len(os.sched_getaffinity(0)),
        "processes": tuple(find_processes()),
    }


def _sockets_wanted() -> int:
    try:
        from torchrl_sglang.backends.async_sglang import MAX_IN_FLIGHT
    except ImportError:  # The findings about packages say which one is broken.
        return 2048
    return MAX_IN_FLIGHT


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _free_bytes(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def find_processes() -> Iterator[ServerProcess]:
    """Yields this user's server processes."""
    parents: dict[int, int] = {}
    kinds: dict[int, Literal["watchdog", "server"]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        pid, status = int(entry.name), _read(entry / "status")
        words = _read(entry / "cmdline").split("\0")[:4]
        parent = re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)
        if parent is None:
            continue  # The process has ended.
        parents[pid] = int(parent[1])
        if not re.search(rf"^Uid:\s*{os.getuid()}\b", status, re.MULTILINE):
            continue
        if any(word.endswith(WATCHDOG) for word in words):
            kinds[pid] = "watchdog"
        elif any(map(SERVERS.search, words)):
            kinds[pid] = "server"
    for pid, kind in kinds.items():
        above = parents[pid]
        while above in parents and above not in kinds:
            above = parents[above]
        yield ServerProcess(pid, above if above in kinds else 0, kind)


def gather_model(name: str) -> ModelFacts:
    """Returns what is in a model's folder or in the hub's cache."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        cached = _cached_config(name)
        if cached is None:
            return ModelFacts(name=name, folder=None)
        folder = Path(cached).parent
    try:
        config = _json(folder / "config.json")
    except (OSError, ValueError) as error:
        return ModelFacts(name=name, folder=str(folder), config_error=str(error))
    text = config.get("text_config")
    configs = [config, text] if isinstance(text, dict) else [config]
    dtypes = [c.get(key) for c in configs for key in ("dtype", "torch_dtype")]
    files = sorted({file for mark in WEIGHTS for file in folder.glob(mark)})
    files = [file for file in files if file.is_file()]
    pointers = [f.name for f in files if _read(f, len(LFS_POINTER)) == LFS_POINTER]
    return ModelFacts(
        name=name,
        folder=str(folder),
        model_type=config.get("model_type"),
        dtype=next((str(dtype) for dtype in dtypes if dtype), None),
        has_tokenizer=any((folder / file).is_file() for file in TOKENIZERS),
        has_chat_template=_has_chat_template(folder),
        weight_bytes=sum(file.stat().st_size for file in files),
        missing_files=_missing_files(folder),
        pointer_files=tuple(pointers),
    )


def _cached_config(name: str) -> str | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # ValueError: the hub has no such names.
        return None
    return found if isinstance(found, str) else None


def _has_chat_template(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        if _json(folder / "tokenizer_config.json").get("chat_template"):
            return True
    return any(folder.glob("chat_template.*"))


def _missing_files(folder: Path) -> tuple[str, ...]:
    missing: set[str] = set()
    for index in folder.glob("*.index.json"):
        with contextlib.suppress(OSError, ValueError):
            files = set(_json(index).get("weight_map", {}).values())
            absent = {file for file in files if not (folder / file).exists()}
            if not absent:
                return ()  # One complete format is enough.
            missing |= absent
    return tuple(sorted(missing))


def _json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _read(file: str | Path, size: int = -1) -> str:
    """Returns the beginning of a file, or nothing if it cannot be read."""
    with contextlib.suppress(OSError), open(file, "rb") as content:
        return content.read(size).decode(errors="replace")
    return ""
