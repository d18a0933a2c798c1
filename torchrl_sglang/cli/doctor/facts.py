"""Facts about this machine that ``doctor`` judges.

``gather()`` only reads, and each question may fail by itself: ``doctor`` has to work
where nothing else does. Facts are plain values, so that a test can write down any case.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.requirements import Requirement

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.ports import PORTS
from torchrl_sglang.errors import ConfigurationError

PORTS_TRIED = 200
ASK_SECONDS = 60.0
VARIABLES = re.compile(r"(NCCL|GLOO)_\w+|(http|all|no)_proxy", re.IGNORECASE)
ENGINE_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
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


def gather(
    *, model: str | None = None, python: str | None = None, device: str | None = None
) -> SimpleNamespace:
    """Returns all facts; ``None`` is what could not be found out."""
    requires_python, requirements, engine_required = read_requirements()
    gpus = gather_gpus()
    device = device or ("cuda" if gpus["visible_gpus"] else "cpu")
    ports = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    memory = re.search(r"MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"))
    temp = tempfile.gettempdir()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SimpleNamespace(
        python=platform.python_version(),
        requires_python=requires_python,
        # Name, supported versions, installed version, import error
        packages=[(name, want, *_version(name)) for name, want in requirements.items()],
        device=device,  # cpu or cuda
        engine_required=engine_required,  # supported versions of SGLang
        **gather_engine(device, python),
        **gpus,
        environment={k: v for k, v in os.environ.items() if VARIABLES.match(k)},
        interfaces=[name for _, name in socket.if_nameindex()],  # of the network
        ports_free=sum(_is_free(secrets.choice(PORTS)) for _ in range(PORTS_TRIED)),
        # First and last port of outgoing connections
        ephemeral=(int(ports[0]), int(ports[1])) if len(ports) == 2 else None,
        shm_free=_free_bytes("/dev/shm"),
        open_files=math.inf if soft == resource.RLIM_INFINITY else soft,
        temp_folder=temp,
        temp_free=_free_bytes(temp) if os.access(temp, os.W_OK) else None,
        memory_free=int(memory[1]) * 1024 if memory else None,
        cores=len(os.sched_getaffinity(0)),
        servers=find_servers(),
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


def _version(name: str) -> tuple[str | None, str | None]:
    """Returns the installed version of a package, and why it cannot be imported."""
    version = None
    try:
        version = importlib.metadata.version(name)
        importlib.import_module(name)
    except importlib.metadata.PackageNotFoundError:
        return None, None
    except Exception as error:  # noqa: BLE001 - A broken package may raise anything.
        return version, f"{type(error).__name__}: {error}".partition("\n")[0]
    return version, None


def gather_engine(device: str, python: str | None) -> dict[str, Any]:
    """Returns which SGLang a server would run, without importing it."""
    interpreter, variables = python or sys.executable, dict[str, str]()
    packages, error = dict[str, str | None](), None
    try:
        if device == "cpu":
            interpreter = str(cpu.engine_python(python=python))
            variables = cpu.engine_environment(python=python)
        other = interpreter != sys.executable
        inherited = inherited_environment(os.environ, own_python=other)
        ask = [interpreter, "-c", ASK_VERSIONS, *ENGINE_PACKAGES]
        packages = json.loads(_ask(ask, {**inherited, **variables}))
    except ConfigurationError as refusal:
        error = str(refusal)
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        said = str(getattr(failure, "stderr", None) or failure).strip().splitlines()
        error = f"{interpreter} does not tell its packages: {''.join(said[-1:])}."
    folder, versions = Path(interpreter).parent.parent, cpu.VERSIONS * (device == "cpu")
    return {
        "engine_python": interpreter,
        "engine_error": error,  # why there is no interpreter, or no answer from it
        "engine_packages": packages,
        # Further versions of SGLang beside it
        "engine_generations": [
            v for v in versions if (folder / f"sglang-{v}").is_dir()
        ],
    }


def _ask(command: list[str], environment: dict[str, str] | None = None) -> str:
    options: Any = {"env": environment, "text": True, "timeout": ASK_SECONDS}
    options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return str(subprocess.check_output(command, **options))


def gather_gpus() -> dict[str, Any]:
    """Returns the GPUs of this machine, as nvidia-smi and PyTorch see them."""
    query = "--query-gpu=name,memory.free,memory.total,driver_version"
    rows: list[list[str]] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = _ask(["nvidia-smi", query, "--format=csv,noheader,nounits"])
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
        "visible_gpus": count,  # to PyTorch
        "cuda": cuda,  # that PyTorch was built for; None for a CPU build
        "driver": rows[0][3] if rows else None,  # None if nvidia-smi did not answer
        # Name, free MiB, total MiB
        "gpus": [(name, _mib(free), _mib(total)) for name, free, total, _ in rows],
        "peers": peers if count > 1 else None,  # each GPU can copy to each other one
    }


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _free_bytes(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def find_servers() -> tuple[list[int], list[int]]:
    """Returns this user's server processes: those that are looked after, and others.

    A server without a watchdog above it was left over, or started by hand.
    """
    parents: dict[int, int] = {}
    found: dict[int, bool] = {}  # whether it is a watchdog
    for entry in Path("/proc").glob("[0-9]*"):
        pid, status = int(entry.name), _read(entry / "status")
        words = _read(entry / "cmdline").split("\0")[:4]
        parent = re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)
        if parent is None:
            continue  # The process has ended.
        parents[pid] = int(parent[1])
        if re.search(rf"^Uid:\s*{os.getuid()}\b", status, re.MULTILINE):
            watchdog = any(word.endswith(WATCHDOG) for word in words)
            if watchdog or any(map(SERVERS.search, words)):
                found[pid] = watchdog
    tops = []
    for pid in found:
        above = parents[pid]
        while above in parents and above not in found:
            above = parents[above]
        tops += [] if above in found else [pid]
    return [p for p in tops if found[p]], sorted(p for p in tops if not found[p])


def gather_model(name: str) -> SimpleNamespace:
    """Returns what is in a model's folder or in the hub's cache."""
    path = Path(name).expanduser()
    folder = path if path.is_dir() else _cached_folder(name)
    facts = SimpleNamespace(name=name, folder=folder, config_error=None)
    if folder is None:
        return facts
    try:
        config = _json(folder / "config.json")
    except (OSError, ValueError) as error:
        facts.config_error = str(error)
        return facts
    text = config.get("text_config")
    configs = [config, text] if isinstance(text, dict) else [config]
    dtypes = [c.get(key) for c in configs for key in ("dtype", "torch_dtype")]
    files = [f for f in sorted(folder.iterdir()) if f.suffix in WEIGHTS and f.is_file()]
    pointers = [f.name for f in files if _read(f, len(LFS_POINTER)) == LFS_POINTER]
    tokenizer: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        tokenizer = _json(folder / "tokenizer_config.json")
    templates = any(folder.glob("chat_template.*"))
    facts.model_type = config.get("model_type") or "A model"
    facts.dtype = next((str(dtype) for dtype in dtypes if dtype), "unknown")
    facts.has_tokenizer = any((folder / file).is_file() for file in TOKENIZERS)
    facts.has_chat_template = templates or bool(tokenizer.get("chat_template"))
    facts.weight_bytes = sum(file.stat().st_size for file in files)
    facts.missing_files = _missing_files(folder)  # named by the index of the weights
    facts.pointer_files = pointers  # references to Git LFS instead of weights
    return facts


def _cached_folder(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # ValueError: the hub has no such names.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _missing_files(folder: Path) -> list[str]:
    missing: set[str] = set()
    for index in folder.glob("*.index.json"):
        with contextlib.suppress(OSError, ValueError):
            files = set(_json(index).get("weight_map", {}).values())
            absent = {file for file in files if not (folder / file).exists()}
            if not absent:
                return []  # One complete format is enough.
            missing |= absent
    return sorted(missing)


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
