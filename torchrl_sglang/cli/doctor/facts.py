"""What ``doctor`` knows about a machine; ``findings.py`` decides what it means.

Plain values, so that every case can be written down in a test. What could not be found
out is ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "EngineFacts",
    "Facts",
    "GpuFacts",
    "ModelFacts",
    "ProcessFacts",
    "SystemFacts",
    "TrainerFacts",
]


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """This Python and its packages."""

    python: str
    """Its version."""
    requires_python: str
    """The versions that this package takes."""
    packages: Mapping[str, str | None]
    """Package -> installed version."""
    requirements: Mapping[str, str]
    """Package -> versions that this package takes."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Packages that are installed and cannot be imported, and why."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The Python that SGLang would run in."""

    device: Literal["cpu", "cuda"]
    """What the engine would run on."""
    python: str | None
    """Its interpreter."""
    error: str | None = None
    """Why there is none, or why it does not answer."""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Package -> installed version."""
    required: str = ""
    """The versions of SGLang that this package is used with."""
    generations: tuple[str, ...] = ()
    """Further versions of SGLang that are installed beside it."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The accelerators, as PyTorch and as the driver see them."""

    visible: int
    """How many PyTorch finds."""
    cuda: str | None = None
    """The CUDA that PyTorch was built for; ``None`` for a CPU build."""
    driver: str | None = None
    """Version of the driver; ``None`` if nvidia-smi did not answer."""
    names: tuple[str, ...] = ()
    """Those that the driver knows."""
    total_mib: tuple[int, ...] = ()
    """Memory of each."""
    free_mib: tuple[int, ...] = ()
    """How much of it is free."""
    peers: bool | None = None
    """Whether each GPU can copy to each other one directly."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is in a model's folder."""

    name: str
    """As it was given."""
    folder: str | None
    """Where it is on this machine; ``None`` for a hub name that is not in the cache."""
    config_error: str | None = None
    """Why its config.json cannot be used."""
    model_type: str | None = None
    """As its configuration says."""
    dtype: str | None = None
    """As its configuration says."""
    has_tokenizer: bool = False
    """Whether there is a tokenizer."""
    has_chat_template: bool = False
    """Whether that has a chat template."""
    weight_bytes: int = 0
    """Size of all weights."""
    missing_files: tuple[str, ...] = ()
    """Files of weights that the index names and that are not there."""
    pointer_files: tuple[str, ...] = ()
    """Files that hold a reference to Git LFS instead of weights."""


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """A process of this user that belongs to a server."""

    pid: int
    """Its id."""
    parent: int
    """Its parent's."""
    kind: Literal["watchdog", "server"]
    """What it is."""


@dataclass(frozen=True, kw_only=True)
class SystemFacts:
    """What the operating system gives."""

    environment: Mapping[str, str]
    """The variables that matter."""
    interfaces: tuple[str, ...]
    """Network interfaces."""
    ports: range
    """Where servers look for a port."""
    ports_tried: int
    """How many of them were looked at."""
    ports_free: int
    """How many of those are free."""
    ephemeral_from: int | None
    """Where the range of outgoing connections begins."""
    ephemeral_to: int | None
    """Where it ends."""
    shm_free: int | None
    """Free bytes of /dev/shm."""
    open_files: int
    """The soft limit of open files; -1 for none."""
    sockets_wanted: int
    """Most requests that an engine has under way."""
    temp_folder: str
    """Where temporary files go."""
    temp_free: int | None
    """Free bytes there; ``None`` if nothing can be written."""
    memory_free: int | None
    """Bytes of memory that can be had."""
    cores: int
    """Processors that this process may use."""
    processes: tuple[ProcessFacts, ...] = ()
    """Processes of servers of this user."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All of it."""

    trainer: TrainerFacts
    """This Python."""
    engine: EngineFacts
    """SGLang's Python."""
    gpus: GpuFacts
    """The accelerators."""
    system: SystemFacts
    """The operating system."""
    model: ModelFacts | None = None
    """The model, where one was named."""
