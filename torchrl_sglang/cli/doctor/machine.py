"""``Machine``: facts for several checks of ``doctor``, and their readers.

Each reader may fail alone: ``doctor`` has to work where nothing else does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.gpus import query_gpus
from torchrl_sglang.errors import ConfigurationError

VERSIONS_SECONDS = 60.0
ENGINE_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
VERSIONS_SCRIPT = """
import importlib.metadata as m, json, sys
versions = {n: [d.version for d in m.distributions(name=n)] for n in sys.argv[1:]}
print(json.dumps({name: (versions[name] or [None])[0] for name in versions}))
"""

Rows = Iterator[tuple[str, ...]]
"""Fields of each :class:`~.checks.Finding` of a check."""


@dataclass(frozen=True)
class GPUs:
    """The GPUs of a machine, as PyTorch and nvidia-smi see them."""

    visible: int = 0  # to PyTorch
    cuda: str | None = None  # that PyTorch was built for; None for a CPU build
    peers: bool | None = None  # each can copy to each other one; None of a single one
    driver: str | None = None  # None if nvidia-smi did not answer
    memory: tuple[tuple[str, int, int], ...] = ()  # name, free MiB, total MiB


class Required(NamedTuple):
    """Supported versions; a range is empty if it is not known."""

    python: str
    packages: dict[str, str]
    sglang: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts for several checks."""

    device: str  # cpu or cuda: where servers shall run
    python: str | None = None  # the interpreter with SGLang, if it was named
    model: str | None = None  # the folder or the hub's name to check
    gpus: GPUs
    required: Required
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    proc: Path = Path("/proc")

    @classmethod
    def here(
        cls, *, model: str | None, python: str | None, device: str | None
    ) -> Machine:
        """Returns this machine."""
        gpus, required = read_gpus(), read_requirements()
        device = device or ("cuda" if gpus.visible else "cpu")
        return cls(
            device=device, python=python, model=model, gpus=gpus, required=required
        )

    @cached_property
    def engine(self) -> tuple[str, dict[str, str | None], str | None]:
        """Interpreter of a server, its packages, and the error if they are unknown."""
        return read_engine(self.device, self.python)

    def memory_free(self) -> int | None:
        """Returns bytes of memory; None if unknown."""
        free = re.search(r"MemAvailable:\s*(\d+) kB", read(self.proc / "meminfo"))
        return int(free[1]) * 1024 if free else None


def read_requirements() -> Required:
    """Returns the package's required versions."""
    try:
        about = importlib.metadata.distribution("torchrl-sglang")
    except importlib.metadata.PackageNotFoundError:
        return Required("", {}, "")
    rows = [Requirement(line) for line in about.requires or []]
    packages = {row.name: str(row.specifier) for row in rows if row.marker is None}
    sglang = next((str(row.specifier) for row in rows if row.name == "sglang"), "")
    return Required(about.metadata["Requires-Python"] or "", packages, sglang)


def read_gpus() -> GPUs:
    """Returns the GPUs of this machine."""
    rows = query_gpus("driver_version", "name", "memory.free", "memory.total")
    driver = rows[0][0] if rows else None
    memory = tuple((name, _mib(free), _mib(total)) for _, name, free, total in rows)
    try:
        import torch

        cuda, count = torch.version.cuda, torch.cuda.device_count()
        pairs = ((a, b) for a in range(count) for b in range(count) if a != b)
        peers = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    except (ImportError, OSError, RuntimeError, AssertionError):
        return GPUs(driver=driver, memory=memory)
    return GPUs(count, cuda, peers if count > 1 else None, driver, memory)


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0


def read_engine(
    device: str, python: str | None
) -> tuple[str, dict[str, str | None], str | None]:
    """Returns the interpreter of a server, the versions of its packages, an error."""
    interpreter, variables = python or sys.executable, dict[str, str]()
    try:
        if device == "cpu":
            interpreter = str(cpu.engine_python(python=python))
            variables = cpu.engine_environment(python=python)
        other = interpreter != sys.executable
        inherited = inherited_environment(os.environ, own_python=other)
        command = [interpreter, "-c", VERSIONS_SCRIPT, *ENGINE_PACKAGES]
        output = _run(command, {**inherited, **variables})
        return interpreter, json.loads(output), None
    except ConfigurationError as refusal:
        return interpreter, {}, str(refusal)
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        lines = str(getattr(failure, "stderr", None) or failure).strip().splitlines()
        error = f"{interpreter} does not list its packages: {''.join(lines[-1:])}."
        return interpreter, {}, error


def _run(command: list[str], environment: dict[str, str]) -> str:
    options: Any = {"env": environment, "text": True, "timeout": VERSIONS_SECONDS}
    options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return str(subprocess.check_output(command, **options))


def find_model(name: str) -> Path | None:
    """Returns a model's folder, which may be in the cache of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # ValueError: the hub has no such names.
        return None
    return Path(file).parent if isinstance(file, str) else None


def missing_files(folder: Path) -> list[str]:
    """Returns the absent files of the index of a model's weights."""
    missing: set[str] = set()
    for index in folder.glob("*.index.json"):
        with contextlib.suppress(OSError, ValueError):
            files = set(read_json(index).get("weight_map", {}).values())
            absent = {file for file in files if not (folder / file).exists()}
            if not absent:
                return []  # One complete format is enough.
            missing |= absent
    return sorted(missing)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file; OSError or ValueError if there is none."""
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def read(file: Path, size: int = -1) -> str:
    """Returns the beginning of a file, or nothing if it cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as content:
        return content.read(size).decode(errors="replace")
    return ""
