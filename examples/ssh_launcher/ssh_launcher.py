"""Starts an engine's servers over ssh: a launcher of one's own in a file.

Each host has this package, SGLang and the model, and its port is open to this machine::

    engine = AsyncSGLang.from_pretrained(
        "/shared/model", num_replicas=2, launcher=SSH(["node1", "node2"], "key.txt")
    )
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.launch.launcher import Launcher
from torchrl_sglang.backends.launch.process import Command, ServerProcess
from torchrl_sglang.errors import ConfigurationError


@dataclass(frozen=True)
class SSH:
    """A placement: one server on each of several hosts, with the key in a file."""

    hosts: Sequence[str]
    key_file: str | None = None
    port: int = 30000
    """Of the first server; the next one has the next port."""

    def bind(
        self, num_replicas: int, spec: Mapping[str, Any], **options: Any
    ) -> SSHServers:
        """Returns what starts the servers, and starts none of them."""
        given = {name: value for name, value in spec.items() if value is not None}
        if num_replicas > len(self.hosts):
            raise ConfigurationError(f"{num_replicas} servers need as many hosts.")
        if options["cuda_devices"] is not None or {"api_key", "environment"} & {*given}:
            raise ConfigurationError(
                "SSH takes no cuda_devices, environment or api_key; give key_file."
            )
        command = ["python3", "-m", "torchrl_sglang", "serve", str(given.pop("model"))]
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        if self.key_file is not None:
            command += ["--api-key-file", self.key_file]
        return SSHServers(self, command, num_replicas, options["start_timeout"])


class SSHServers(Launcher):
    """Starts the servers; one that has ended starts again at its address."""

    def __init__(
        self, place: SSH, command: Sequence[str], count: int, seconds: float
    ) -> None:
        self.num_servers = self.at_once = count
        if place.key_file is not None:
            self.api_key = Path(place.key_file).read_text().strip()
        self._place, self._command, self._seconds = place, command, seconds

    def start(self, rank: int) -> ServerProcess:
        """Begins to start a server, which ends with its connection."""
        host, port = self._place.hosts[rank], self._place.port + rank
        line = shlex.join([*self._command, "--host", host, "--port", str(port)])
        return ServerProcess(
            Command(
                # With a terminal, its end is that of the program.
                line=("ssh", "-tt", host, f"exec {line}"),
                environment=os.environ,
                url=f"http://{host}:{port}",
            ),
            name=f"SGLang server on {host}",
            host=host,
            start_timeout=self._seconds,
        )
