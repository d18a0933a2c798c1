"""Engine objects that healthy servers would not give."""

from __future__ import annotations

import copy
import pickle
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.fleet.membership import Fleet


def fleet_of(engine: AsyncSGLang) -> Fleet:
    """Returns the servers of an engine and their states."""
    return engine._fleet


def supervisor_of(engine: AsyncSGLang) -> Any:
    """Returns the loop that watches an engine's servers."""
    return engine._supervisor


def with_capabilities(engine: AsyncSGLang, **capabilities: Any) -> AsyncSGLang:
    """Returns an engine for the same servers that attributes others to them."""
    changed = copy.copy(engine)
    changed.capabilities = replace(engine.capabilities, **capabilities)
    return pickle.loads(pickle.dumps(changed))


@dataclass
class Process:
    """A server's process without a process."""

    state: str = "ready"
    pid: int = 0
    url: str = "http://a"
    host: str = field(default_factory=socket.gethostname)
    log_path: Path = Path("log")

    def log_tail(self, lines: int = 30) -> str:
        return "its last words"

    def request_stop(self) -> None:
        self.state = "stopped"

    stop = request_stop
