"""One process that serves HTTP, its process tree and its log.

A :class:`ServerProcess` belongs to the process that created it. Between it and the
server runs ``watchdog.py``, which ends the whole tree when the owner asks for it or has
ended itself.
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
from pathlib import Path
from typing import Self

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.http import get
from torchrl_sglang.backends.fleet.replica import stop_all
from torchrl_sglang.backends.launch.ports import PortLease
from torchrl_sglang.backends.launch.watchdog import FOLDER_VARIABLE
from torchrl_sglang.backends.support.event_loop import on_background_loop
from torchrl_sglang.errors import ServerStartError, SGLangError

__all__ = ["START_TIMEOUT_SECONDS", "ServerProcess", "stop_unreachable"]

START_TIMEOUT_SECONDS = 600.0
"""Default timeout for a start: a large model loads for minutes."""

READY_POLL_SECONDS = 0.1
"""How often a starting server is polled."""

HEALTH_TIMEOUT_SECONDS = 2.0
"""Timeout of one such poll."""

STOP_TIMEOUT_SECONDS = 15.0
"""Timeout for a tree to end; its watchdog needs at most 2 s."""

LOG_TAIL_LINES = 30
"""Lines of the log in an error."""

LOG_LINE_CHARACTERS = 500
"""Characters of such a line; a server logs all its arguments in one."""

LOG_TAIL_BYTES = 100_000
"""Bytes of the log that are read for them."""

MAX_FOLDER_BYTES = 80
"""A socket's path has at most 107, some 20 of them for its name."""

_WATCHDOG = Path(__file__).with_name("watchdog.py")

_COLOR = re.compile(r"\x1b\[[0-9;]*m")

_LIVING: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


@atexit.register
def _stop_living() -> None:
    stop_all(list(_LIVING))


def stop_unreachable() -> None:
    """Stops servers that only reference cycles hold; until then they keep GPUs."""
    if _LIVING:
        gc.collect()


class ServerProcess:
    """A running command that serves HTTP, with all processes below it.

    Args:
        command: the command line.
        url: where the server will answer.
        environment: the whole environment.
        name: what messages call the server.
        hidden: texts that no message may show, such as keys.
        config: arguments that other users must not see on the command line; they are
            passed in a file that only the owner can read, until the server is ready.
        leases: ports that the server listens on; released at its end.
        start_timeout: timeout for the start, in seconds.

    Raises:
        ServerStartError: if there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        environment: Mapping[str, str],
        name: str = "SGLang server",
        hidden: Sequence[str] = (),
        config: Mapping[str, str] | None = None,
        leases: Sequence[PortLease] = (),
        start_timeout: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self.url = url
        self.name = name
        self.host = socket.gethostname()
        self._hidden = tuple(hidden)
        self._leases = tuple(leases)
        self._start_timeout = start_timeout
        self._owner_pid = os.getpid()
        self._ready = False
        self._stop_requested = False
        self._stopped = False
        self._failed = False
        self._begun = time.monotonic()
        if shutil.which(command[0]) is None:
            self._release()
            raise ServerStartError(
                f"The {name} cannot be started: there is no program {command[0]!r}. "
                f"Give the interpreter that has sglang as python=..."
            )
        # Created with access for the owner alone.
        self._folder = Path(tempfile.mkdtemp(prefix="torchrl_sglang_"))
        self.log_path = self._folder / "server.log"
        self._config = self._folder / "config.yaml"
        if config:
            self._config.touch(mode=0o600)
            # A JSON object is a YAML mapping too. SGLang expects names with dashes.
            flags = {name.replace("_", "-"): text for name, text in config.items()}
            self._config.write_text(json.dumps(flags))
            command = [*command, "--config", str(self._config)]
        self.command = tuple(command)
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                # -P: the script's folder must not shadow the standard library.
                [sys.executable, "-SP", str(_WATCHDOG), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **self._folders(environment)},
                start_new_session=True,
            )
        _LIVING.add(self)
        torchrl_logger.debug(f"{name} starting: {self._hide(' '.join(command))}")

    def _folders(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns variables with which the tree's temporary files end with it."""
        variables = {FOLDER_VARIABLE: str(self._folder)}
        # SGLang's sockets are created there, and the path of a socket must be short.
        if len(os.fsencode(self._folder)) <= MAX_FOLDER_BYTES:
            variables["TMPDIR"] = str(self._folder)
            # Later servers can use this cache again, so it stays where it was.
            cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
            name = "TORCHINDUCTOR_CACHE_DIR"
            variables[name] = environment.get(name, str(cache))
            # They would be made anew in each server's folder, 10 s for each.
            name = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
            variables[name] = environment.get(name, "0")
        return variables

    @property
    def pid(self) -> int:
        """Process id of the tree's root."""
        return self._process.pid

    @property
    def state(self) -> str:
        """``"starting"``, ``"ready"``, ``"dead"`` (it ended) or ``"stopped"``."""
        if self._stopped:
            return "stopped"
        # A fork cannot wait for its parent's child, and would find that it has ended.
        if os.getpid() == self._owner_pid and self._process.poll() is not None:
            return "dead"
        return "ready" if self._ready else "starting"

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    def wait_ready(self) -> None:
        """Waits until the server answers; stops it if it does not.

        Raises:
            ServerStartError: if the process ends, is stopped, or does not answer within
                the timeout. The message has the end of the log, and the log's path.
        """
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
        if self._answers():
            self._ready = True
            self._config.unlink(missing_ok=True)
        elif self._process.poll() is not None:
            status = self._process.returncode
            raise self._start_error(f"ended with status {status} before it was ready.")
        elif self.age > self._start_timeout:
            raise self._start_error(
                f"was not ready after {self._start_timeout:g} s; give it more with "
                f"start_timeout=..."
            )
        return self._ready

    def _answers(self) -> bool:
        try:
            return get(f"{self.url}/health", timeout=HEALTH_TIMEOUT_SECONDS).ok
        except SGLangError:
            return False

    def _start_error(self, reason: str) -> ServerStartError:
        self._failed = True
        return ServerStartError(
            f"The {self.name} {reason} Its log is kept as {self.log_path}. The end of "
            f"its log:\n{self.log_tail()}"
        )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines of the log, without progress bars and colors."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(self.log_path) - LOG_TAIL_BYTES))
                text = _COLOR.sub("", log.read().decode(errors="replace"))
        except OSError:
            return "(the log is gone)"
        kept = [
            # Keys are hidden before lines are cut: a part of a key would not be found.
            self._hide(line)[:LOG_LINE_CHARACTERS]
            for line in re.split(r"[\r\n]+", text)
            if line and "it/s]" not in line
        ]
        return "\n".join(kept[-lines:]) or "(the log is empty)"

    def _hide(self, text: str) -> str:
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return text

    def request_stop(self) -> None:
        """Begins to end the process tree; does not wait."""
        if self._stop_requested or os.getpid() != self._owner_pid:
            return
        if self._process.poll() is None:
            self._process.terminate()
        else:
            # It ended by itself: its log says why.
            self._failed = True
        self._stop_requested = True

    def stop(self) -> None:
        """Ends the process tree and waits for its end. Can be called twice.

        The log is deleted, or kept without keys if the server failed. Does nothing in a
        fork of the process that started the server.
        """
        if self._stopped or os.getpid() != self._owner_pid:
            return
        self.request_stop()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            # Its session is its own, so the group holds the tree and nothing else.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_SECONDS)
        # Only now, so that an interrupted stop can be repeated.
        self._stopped = True
        _LIVING.discard(self)
        self._release()
        self._clean_up()

    def _release(self) -> None:
        for lease in self._leases:
            lease.release()

    def _clean_up(self) -> None:
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.log_path:
                path.unlink(missing_ok=True)
        if self._hidden and self.log_path.exists():
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
        if not hasattr(self, "_process"):
            return
        if on_background_loop():
            # A stop blocks, and other engines use this loop.
            threading.Thread(target=self.stop, name="torchrl_sglang-stop").start()
        else:
            self.stop()

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.url!r}, pid={self.pid}, state={self.state!r})"
