"""One server that was started here: its process tree, its log, its end.

A :class:`ServerProcess` is owned by the process that created it. Between it and the
server sits ``watchdog.py``, which ends the whole tree when the owner asks, and also
when the owner is gone and cannot ask.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends import cpu
from torchrl_sglang.backends.command import to_flags, translate_vllm_names
from torchrl_sglang.errors import ConfigurationError, ServerStartError

__all__ = ["ServerProcess", "make_sglang_server"]

START_TIMEOUT_SECONDS = 600.0
"""Default budget for a start: a large model loads for minutes."""

READY_POLL_SECONDS = 0.1
"""How often a starting server is asked whether it is ready."""

STOP_TIMEOUT_SECONDS = 15.0
"""Budget for a tree to be gone; its watchdog needs 3 s at the most when it is asked."""

PORTS = range(20_000, 32_000)
"""Where a server's port is looked for."""

LOG_TAIL_LINES = 30
"""How many lines of the log an error carries."""

SERVER_ENVIRONMENT = {
    # Otherwise /health generates a token, which takes a second, and fails while
    # generation is paused.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # The last lines of a server that is killed are the ones worth reading.
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every server, whatever it runs on."""

LOG_TAIL_BYTES = 100_000
"""How much of a log is read for that: it grows for as long as its server runs."""

_WATCHDOG = Path(__file__).with_name("watchdog.py")

_LIVING: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for server in list(_LIVING):
        server.stop()


def find_free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port that nothing listens on at the moment.

    It lies outside the range that Linux takes for outgoing connections, one of which
    could otherwise take it while the server loads.
    """
    for _ in range(1000):
        # The system's randomness: seeded trainers would all try the same ports.
        port = PORTS[secrets.randbelow(len(PORTS))]
        if _is_free(host, port):
            return port
    raise ConfigurationError(f"No port from {PORTS} is free on {host!r}.")


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return port > 0


class ServerProcess:
    """A running command that serves HTTP, with everything below it.

    States: *starting* from construction, *ready* after :meth:`wait_ready`, *dead* when
    its process has ended, *stopped* after :meth:`stop`.

    Args:
        command: the server's command line.
        url: where it will answer.
        environment: its whole environment.
        name: what messages call it.
        hidden: texts that no message may show, such as keys.

    Raises:
        ServerStartError: if the command cannot be run at all.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        environment: Mapping[str, str],
        name: str = "SGLang server",
        hidden: Sequence[str] = (),
    ) -> None:
        self.url = url
        self._hidden = tuple(hidden)
        self.name = name
        self.command = tuple(command)
        self._owner_pid = os.getpid()
        self._ready = False
        self._stopped = False
        self._folder = Path(tempfile.mkdtemp(prefix="torchrl_sglang_"))
        self.log_path = self._folder / "server.log"
        if shutil.which(command[0]) is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ServerStartError(
                f"The {name} cannot be started: there is no program {command[0]!r}. "
                f"Give the interpreter that has sglang as python=..."
            )
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                # -P: its folder holds an http.py, which is not the library's.
                [sys.executable, "-SP", str(_WATCHDOG), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        _LIVING.add(self)
        torchrl_logger.debug(f"{name} starting: {self._hide(' '.join(command))}")

    @property
    def pid(self) -> int:
        """Process id of the tree's root."""
        return self._process.pid

    @property
    def state(self) -> str:
        """One of ``"starting"``, ``"ready"``, ``"dead"`` and ``"stopped"``."""
        if self._stopped:
            return "stopped"
        if self._process.poll() is not None:
            return "dead"
        return "ready" if self._ready else "starting"

    def wait_ready(self, timeout: float = START_TIMEOUT_SECONDS) -> None:
        """Waits until the server answers; stops it if it does not.

        Args:
            timeout: budget, in seconds.

        Raises:
            ServerStartError: if its process ends or the budget is used up. The message
                carries the end of the log.
        """
        deadline = time.monotonic() + timeout
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise ServerStartError(
                        f"The {self.name} ended with status "
                        f"{self._process.returncode} before it was ready. The end of "
                        f"its log:\n{self.log_tail()}"
                    )
                if time.monotonic() > deadline:
                    raise ServerStartError(
                        f"The {self.name} was not ready after {timeout:g} s; give it "
                        f"more with start_timeout=... The end of its log:\n"
                        f"{self.log_tail()}"
                    )
                time.sleep(READY_POLL_SECONDS)
        except BaseException:
            self.stop()
            raise
        self._ready = True

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines of the server's log, without progress bars."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(self.log_path) - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return "(the log is gone)"
        kept = [
            line for line in re.split(r"[\r\n]+", text) if line and "it/s]" not in line
        ]
        return self._hide("\n".join(kept[-lines:])) or "(the log is empty)"

    def _hide(self, text: str) -> str:
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return text

    def stop(self) -> None:
        """Ends the process tree and removes its log. Safe to call twice.

        Does nothing in a process that did not start the server, such as a fork.
        """
        if self._stopped or os.getpid() != self._owner_pid:
            return
        self._stopped = True
        _LIVING.discard(self)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                # Its own session, so the group holds the tree and nothing else.
                os.killpg(self._process.pid, 9)
                self._process.wait(STOP_TIMEOUT_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __getstate__(self) -> None:
        raise TypeError(
            "A ServerProcess belongs to the process that started it and does not "
            "pickle; pass its url and connect to that."
        )

    def __del__(self) -> None:
        # Construction may have failed before there was anything to stop.
        if hasattr(self, "_process"):
            self.stop()

    def __repr__(self) -> str:
        return f"ServerProcess({self.url!r}, pid={self.pid}, state={self.state!r})"


def make_sglang_server(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    python: str | os.PathLike[str] | None = None,
    start_timeout: float = START_TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
    sglang_version: str | None = None,
    **server_args: Any,
) -> ServerProcess:
    """Starts one SGLang server and waits until it is ready.

    Args:
        model: path or hub name of the model.
        device: ``"cuda"`` or ``"cpu"``; by default ``"cuda"`` where there is one.
        python: interpreter that has sglang installed. By default this one on CUDA, and
            on CPU that of the environment which
            ``python -m torchrl_sglang.backends.cpu.install`` made.
        start_timeout: budget for the start, in seconds.
        environment: variables to add to the server's environment.
        sglang_version: on CPU, which of the installed versions to run.
        **server_args: arguments of SGLang's server under its own names, such as
            ``tp_size``, ``mem_fraction_static`` and ``context_length``, or under
            vLLM's names.

    Returns:
        The running server. It ends with :meth:`ServerProcess.stop`, with this
        process, or with the last reference to it.

    Raises:
        ConfigurationError: if an argument is wrong or no engine is installed.
        ServerStartError: if the server ends or is not ready within the budget.

    Examples:
        >>> server = make_sglang_server(tiny_model_path, device="cpu")
        >>> server.state
        'ready'
        >>> server.stop()
    """
    arguments = translate_vllm_names(server_args)
    path = arguments.pop("model_path", None)
    if path is not None:
        raise ConfigurationError(
            f"The model is given twice, as {model!r} and as {path!r}; give one."
        )
    if device is None:
        device = "cuda" if _has_cuda() else "cpu"
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f"device={device!r} is not one that a server can be started on; give "
            f"'cuda' or 'cpu'."
        )
    _check_local_model(model)
    host = arguments.setdefault("host", "127.0.0.1")
    port = arguments.setdefault("port", find_free_port(host))
    if not str(port).isdigit() or not _is_free(host, int(port)):
        raise ConfigurationError(
            f"port={port!r} is not a free port of {host!r}: another process, perhaps a "
            f"server that was left running, has it. Give another one, or none."
        )
    variables = {**os.environ, **SERVER_ENVIRONMENT}
    if device == "cpu":
        arguments = {**cpu.default_server_args(), **arguments}
        command = cpu.launch_command(sglang_version, python)
        variables.update(cpu.engine_environment(sglang_version, python))
    else:
        interpreter = str(python) if python is not None else sys.executable
        command = [interpreter, "-m", "sglang.launch_server"]
        arguments = {"device": device, **arguments}
    variables.update(environment or {})
    server = ServerProcess(
        [*command, *to_flags({"model_path": os.fspath(model), **arguments})],
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        environment=variables,
        # SGLang writes its arguments, keys included, to its log.
        hidden=[
            str(value)
            for name, value in arguments.items()
            if name.endswith("api_key") and value
        ],
    )
    server.wait_ready(start_timeout)
    return server


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_local_model(model: str | os.PathLike[str]) -> None:
    # A hub name is "owner/name"; anything that looks like a path must exist.
    text = os.fspath(model)
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_local and not Path(text).is_dir():
        raise ConfigurationError(
            f"There is no model folder {text!r}; give the path of a folder with "
            f"config.json, or a hub name like 'Qwen/Qwen2.5-0.5B'."
        )
