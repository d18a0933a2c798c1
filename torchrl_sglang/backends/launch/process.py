"""An HTTP server process, its process tree and its log.

A :class:`ServerProcess` belongs to its creating process. Between it and the server runs
``watchdog.py``, which ends the whole tree on a request of the owner, or after the
owner's end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from torchrl_sglang.backends.client.http import get
from torchrl_sglang.backends.fleet.replica import NotStartedError, stop_all
from torchrl_sglang.backends.launch.ports import PortLease
from torchrl_sglang.backends.launch.start_log import find_remedy
from torchrl_sglang.backends.launch.watchdog import FOLDER_VARIABLE
from torchrl_sglang.errors import ServerStartError, SGLangError
from torchrl_sglang.support.event_loop import on_background_loop
from torchrl_sglang.support.log import torchrl_logger

START_TIMEOUT_SECONDS = 600.0
"""Default timeout for a start: a large model loads for minutes."""

READY_POLL_SECONDS = 0.1
"""Interval between polls of a starting server."""

HEALTH_TIMEOUT_SECONDS = 2.0
"""Timeout of such a poll."""

STOP_TIMEOUT_SECONDS = 15.0
"""Timeout for a tree to end; its watchdog needs at most 2 s."""

LOG_TAIL_LINES = 30
LOG_LINE_CHARACTERS = 500
LOG_TAIL_BYTES = 100_000
"""Lines of a log in an error, and bytes read for them."""

MAX_FOLDER_BYTES = 80
"""Longest folder path: a socket path has at most 107 bytes, about 20 for its name."""

FOLDER_PREFIX = "torchrl_sglang_"

SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for a server's files if the usual path is too long."""

_WATCHDOG = Path(__file__).with_name("watchdog.py")

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_WRONG_ARGUMENT = re.compile(r"[\w .-]+: error: ")
"""Error of argparse, after hundreds of lines of usage."""

_LIVING: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


@atexit.register
def _stop_living() -> None:
    stop_all(list(_LIVING))


def short_folder(
    usual: str | None = None, others: Sequence[str] = SHORT_FOLDERS
) -> str:
    """Returns the folder for servers' files, whose sockets need short paths."""
    usual = tempfile.gettempdir() if usual is None else usual
    for folder in (usual, *others):
        # mkdtemp adds eight characters.
        path = os.path.join(os.path.abspath(folder), FOLDER_PREFIX + 8 * "x")
        if len(os.fsencode(path)) <= MAX_FOLDER_BYTES and os.access(folder, os.W_OK):
            return folder
    raise ServerStartError(
        f"The folder for temporary files has a path of {len(usual)} characters, too "
        f"long for the sockets of a server ({usual}), and none of "
        f"{', '.join(others)} can be written to. Set TMPDIR to a short path."
    )


def stop_unreachable() -> None:
    """Stops servers held only by reference cycles: they occupy GPUs."""
    if _LIVING:
        gc.collect()


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Command line and environment of an HTTP server process."""

    line: tuple[str, ...]
    """Program and arguments, visible to other users of the machine."""
    environment: Mapping[str, str] = field(repr=False)
    url: str
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secret arguments; a file has them until the server is ready."""
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """Texts to hide in messages, such as keys."""
    leases: tuple[PortLease, ...] = ()
    """Ports of the server; released at its end."""
    when_ready: str | None = None
    """Path of a request when the server is ready; its outcome is ignored."""

    def release(self) -> None:
        """Releases the ports of an unused command."""
        for lease in self.leases:
            lease.release()


class ServerProcess:
    """A running command, with all processes below it.

    Args:
        command: starts the server.
        name: of the server in messages.
        host: its machine, if the command starts it remotely, as ssh does.
        start_timeout: in seconds.
    """

    def __init__(
        self,
        command: Command,
        *,
        name: str = "SGLang server",
        host: str | None = None,
        start_timeout: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.command = command
        self.url = command.url
        self.name = name
        self.host = host or socket.gethostname()
        self._start_timeout = start_timeout
        self._owner_pid = os.getpid()
        self._ready = False
        self._stop_requested = False
        self._stopped = False
        self._failed = False
        self._begun = time.monotonic()
        line = command.line
        if shutil.which(line[0]) is None:
            command.release()
            raise ServerStartError(
                f"The {name} cannot be started: there is no program {line[0]!r}. Give "
                f"the interpreter that has sglang as python=..."
            )
        try:
            place = short_folder()
        except ServerStartError:
            command.release()
            raise
        # Created with access for the owner alone.
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
        self.log_path = self._folder / "server.log"
        self._config = self._folder / "config.yaml"
        if command.config:
            self._config.touch(mode=0o600)
            # A JSON object is a YAML mapping too. SGLang expects names with dashes.
            flags = {k.replace("_", "-"): text for k, text in command.config.items()}
            self._config.write_text(json.dumps(flags))
            line = (*line, "--config", str(self._config))
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                # -P: the script's folder must not shadow the standard library.
                [sys.executable, "-SP", str(_WATCHDOG), str(os.getpid()), *line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        _LIVING.add(self)
        # A killed predecessor on another host may still hold the address.
        self._occupied = self._answers()
        torchrl_logger.debug(f"{name} starting: {self._hide(' '.join(line))}")

    def _environment(self) -> dict[str, str]:
        """Returns all variables; the tree's temporary files are in its folder."""
        # SGLang's sockets are created there.
        folders = {FOLDER_VARIABLE: str(self._folder), "TMPDIR": str(self._folder)}
        # The cache is shared with later servers, so it stays outside of the folder.
        cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        defaults = {
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # The headers would be compiled again in each server's folder, in 10 s each.
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }
        return {**defaults, **self.command.environment, **folders}

    @property
    def log_file(self) -> str:
        """Path of the log."""
        return str(self.log_path)

    @property
    def pid(self) -> int:
        """Process id of the tree's root."""
        return self._process.pid

    @property
    def state(self) -> str:
        """``"starting"``, ``"ready"``, ``"dead"`` (it ended) or ``"stopped"``."""
        if self._stopped:
            return "stopped"
        # A fork cannot wait for its parent's child, and would consider it ended.
        if os.getpid() == self._owner_pid and self._process.poll() is not None:
            return "dead"
        return "ready" if self._ready else "starting"

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    def wait_ready(self) -> None:
        """Waits until the server answers; else stops it and raises ServerStartError."""
        try:
            while not self.check_ready():
                time.sleep(READY_POLL_SECONDS)
        except BaseException:
            self.stop()
            raise

    def check_ready(self) -> bool:
        """Returns whether the server answers, or raises as :meth:`wait_ready` does."""
        if self._ready:
            return True
        answers = self._answers()
        if answers and not self._occupied:
            self._tell_ready()
            self._ready = True
            self._config.unlink(missing_ok=True)
        elif self._stop_requested:
            raise NotStartedError(f"The {self.name} was stopped before it was ready.")
        elif self._process.poll() is not None:
            status = self._process.returncode
            raise self._start_error(f"ended with status {status} before it was ready.")
        elif self.age > self._start_timeout:
            raise self._start_error(
                f"was not ready after {self._start_timeout:g} s; give it more with "
                f"start_timeout=..."
            )
        self._occupied = self._occupied and answers
        return self._ready

    def _answers(self) -> bool:
        try:
            return get(f"{self.url}/health", timeout=HEALTH_TIMEOUT_SECONDS).ok
        except SGLangError:
            return False

    def _tell_ready(self) -> None:
        if self.command.when_ready is None:
            return
        config = self.command.config
        key = config.get("admin_api_key") or config.get("api_key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{self.url}{self.command.when_ready}"
        try:
            answer = get(url, timeout=HEALTH_TIMEOUT_SECONDS, headers=headers)
        except SGLangError as error:
            torchrl_logger.debug(f"{self.name}: {error}")
        else:
            torchrl_logger.debug(f"{self.name}: {url} answered {answer.status}.")

    def _start_error(self, reason: str) -> ServerStartError:
        self._failed = True
        tail = self.log_tail()
        remedy = find_remedy(tail, self.command.line)
        return ServerStartError(
            f"The {self.name} {reason} {remedy}{' ' if remedy else ''}Its log is kept "
            f"as {self.log_path}. The end of its log:\n{tail}"
        )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines of the log, without progress bars and usage."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(self.log_path) - LOG_TAIL_BYTES))
                text = _COLOR.sub("", log.read().decode(errors="replace"))
        except OSError:
            return "(the log is gone)"
        shown = [
            # Before lines are cut: a part of a key would not be found.
            self._hide(line)[:LOG_LINE_CHARACTERS]
            for line in re.split(r"[\r\n]+", text)
            if line and "it/s]" not in line
        ]
        return "\n".join(_without_usage(shown)[-lines:]) or "(the log is empty)"

    def _hide(self, text: str) -> str:
        for secret in self.command.hidden:
            text = text.replace(secret, "***")
        return text

    def request_stop(self) -> None:
        """Begins to end the process tree; does not wait."""
        if self._stop_requested or os.getpid() != self._owner_pid:
            return
        # First, for a thread waiting for the start.
        self._stop_requested = True
        if self._process.poll() is None:
            self._process.terminate()
        else:
            # The process ended by itself: its log has the reason.
            self._failed = True

    def stop(self) -> None:
        """Ends the process tree and waits for its end. Can be called twice.

        The log is deleted, or kept without keys if the server failed. In a fork of the
        owner process, it does nothing.
        """
        if self._stopped or os.getpid() != self._owner_pid:
            return
        self.request_stop()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            # The process has its own session, so the group holds the tree and nothing
            # else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_SECONDS)
        # Only now: an interrupted stop can be repeated.
        self._stopped = True
        _LIVING.discard(self)
        self.command.release()
        self._clean_up()

    def _clean_up(self) -> None:
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.log_path:
                path.unlink(missing_ok=True)
        if self.command.hidden and self.log_path.exists():
            clean = self.log_path.with_suffix(".clean")
            with open(self.log_path, errors="replace") as log, open(clean, "w") as out:
                out.writelines(map(self._hide, log))
            clean.replace(self.log_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __getstate__(self) -> None:
        raise TypeError(
            "A ServerProcess belongs to the process that started it and does not "
            "pickle; pass its url and connect to that."
        )

    def __del__(self) -> None:
        # Construction may have failed before there was anything to stop.
        if not hasattr(self, "_process") or self._stopped:
            return
        if on_background_loop():
            # A stop blocks, and other engines use this loop.
            threading.Thread(target=self.stop, name="torchrl_sglang-stop").start()
        else:
            self.stop()

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.url!r}, pid={self.pid}, state={self.state!r})"


def _without_usage(lines: list[str]) -> list[str]:
    """Removes argparse's usage before its error."""
    for start, line in enumerate(lines):
        if line.startswith("usage: "):
            for end in range(start, len(lines)):
                if _WRONG_ARGUMENT.match(lines[end]):
                    return lines[:start] + lines[end:]
    return lines
