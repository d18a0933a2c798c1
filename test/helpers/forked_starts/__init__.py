"""Starts of SGLang servers on CPU that take a second or two instead of half a minute.

Nearly all of a start is imports. Within :func:`forked_starts`, the first server that is
started leaves behind a process that has everything imported and has run nothing, and
every later server is a fork of it::

    test ── watchdog.py ── interpreter.py ···· preloaded.py ── server ── scheduler ...
                           (killed with)      (one for each SGLang)

``interpreter.py`` takes the place of SGLang's Python. It hands its arguments, its
environment and its streams over, lives exactly as long as the server does, and takes
the server along when it is killed. What differs from a true start: the server is no
descendant of its watchdog. A test about process trees starts its server with
:func:`true_interpreter`.

For tests alone: a server that is to last belongs to a process tree of its own.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.watchdog import descendants

__all__ = ["forked_starts", "processes_below", "true_interpreter"]

MAX_PRELOADED = 6
"""Processes with everything imported, of 700 MB each; further servers start truly."""

PRELOAD_TIMEOUT_SECONDS = 300.0
"""Timeout for all imports; they take 20 s on a quiet machine."""

READ_BY_IMPORTS = (
    "CUDA_",
    "HF_",
    "HOME",
    "LD_",
    "OMP_",
    "PYTHONPATH",
    "SGLANG_",
    "TORCH_",
    "TRANSFORMERS_",
    "TRITON_",
)
"""How variables begin that imports may read: a fork has the values of its import."""

APPLIED_LATER = {
    "OMP_NUM_THREADS",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
}
"""Variables of that kind that a fork follows all the same."""

STREAMS = 3
"""Standard input, output and error travel with a request."""

_FOLDER = Path(__file__).parent


@contextmanager
def forked_starts() -> Iterator[Path]:
    """Forks the servers on CPU that are started meanwhile, here and in subprocesses.

    Sets ``TORCHRL_SGLANG_PYTHON``, so a start that names another interpreter with
    ``python=`` is a true one.

    Yields:
        The interpreter that forks.

    Raises:
        ConfigurationError: if SGLang's environment for CPU is not installed.

    Example of a fixture, in a ``conftest.py``::

        @pytest.fixture(scope="session", autouse=True)
        def quick_starts():
            with forked_starts():
                yield
    """
    python = cpu.engine_python()
    before = os.environ.get(cpu.PYTHON_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="forked_") as name:
        folder = Path(name)
        interpreter = _make_interpreter(folder, python)
        with _Starter(folder / "socket", python):
            os.environ[cpu.PYTHON_VARIABLE] = str(interpreter)
            try:
                yield interpreter
            finally:
                del os.environ[cpu.PYTHON_VARIABLE]
                if before is not None:
                    os.environ[cpu.PYTHON_VARIABLE] = before


def true_interpreter(interpreter: Path) -> Path:
    """Returns the interpreter that one which forks stands in for."""
    return (interpreter.parents[1] / "python").readlink()


def processes_below(pid: int) -> list[int]:
    """Returns the living descendants of a process, with the servers forked for them."""
    found = []
    for below in descendants(pid):
        found.append(below)
        with suppress(OSError):
            word, _, number = Path(f"/proc/{below}/comm").read_text().partition(" ")
            if word == "forked":
                found += [int(number), *descendants(int(number))]
    return found


def _make_interpreter(folder: Path, python: Path) -> Path:
    """Makes a folder that looks like the environment of ``python``; returns its own."""
    (folder / "bin").mkdir()
    interpreter = folder / "bin" / "python"
    # Isolated and without site-packages, it starts in 15 ms.
    source = (_FOLDER / "interpreter.py").read_text()
    interpreter.write_text(f"#!{sys.executable} -IS\n{source}")
    interpreter.chmod(0o755)
    (folder / "python").symlink_to(python)
    for older in python.parent.parent.glob("sglang-*"):
        (folder / older.name).symlink_to(older)
    return interpreter


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables on which the outcome of an import may depend. Pure.

    Examples:
        >>> read_by_imports({"SGLANG_USE_CPU_ENGINE": "1", "TMPDIR": "/tmp"})
        {'SGLANG_USE_CPU_ENGINE': '1'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_BY_IMPORTS) and name not in APPLIED_LATER
    }


class _Preloaded(threading.Thread):
    """A process with everything imported, and the thread that started it.

    The process ends with its thread, which hands it one request after another. Until
    everything is imported, requests wait.

    Args:
        python: SGLang's own interpreter.
        environment: all variables of the first request.
    """

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        super().__init__(name="preloaded", daemon=True)
        self.environment = read_by_imports(environment)
        self._command = [str(python), str(_FOLDER / "preloaded.py")]
        self._inherited = dict(environment)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()

    def put(self, request: _Request | None) -> None:
        """Adds a request; ``None`` ends process and thread."""
        self._requests.put(request)

    def run(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [
                        *self._command,
                        str(theirs.fileno()),
                        str(Path(cpu.__file__).with_name("launch.py")),
                    ],
                    env=self._inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # A Ctrl-C that is meant for the test does not end it.
                    start_new_session=True,
                )
            ours.settimeout(PRELOAD_TIMEOUT_SECONDS)
            try:
                ready = ours.recv(1) == b"+"
            except OSError:
                ready = False
            if not ready:
                process.kill()
            ours.settimeout(None)
            for request in iter(self._requests.get, None):
                # Where this fails, the connection closes and the start is a true one.
                with request, suppress(OSError):
                    request.forward(ours)
        process.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A server's start, as ``interpreter.py`` sends it."""

    content: bytes
    connection: socket.socket
    streams: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> Self:
        """Reads a request. Raises ``OSError`` if its sender has ended."""
        head, streams, _, _ = socket.recv_fds(connection, 8, STREAMS)
        length = int.from_bytes(head, "big")
        content = b""
        while len(content) < length:
            part = connection.recv(length - len(content))
            if not part:
                raise OSError("The sender has ended.")
            content += part
        return cls(content=content, connection=connection, streams=list(streams))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the server is to have."""
        environment: dict[str, str] = json.loads(self.content)["environment"]
        return environment

    def forward(self, control: socket.socket) -> None:
        """Sends the request on to a preloaded process."""
        fds = [self.connection.fileno(), *self.streams]
        socket.send_fds(control, [len(self.content).to_bytes(8, "big")], fds)
        control.sendall(self.content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for stream in self.streams:
            os.close(stream)
        self.connection.close()


class _Starter:
    """Hands each request to a process that was preloaded in such an environment.

    Args:
        path: where it listens.
        python: SGLang's own interpreter.
    """

    def __init__(self, path: Path, python: Path) -> None:
        self._python = python
        self._preloaded: list[_Preloaded] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._thread = threading.Thread(
            target=self._run, name="forked-starts", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # Wakes the thread that accepts, which closing alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PRELOAD_TIMEOUT_SECONDS)
        self._listener.close()

    def _run(self) -> None:
        try:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                with suppress(OSError, ValueError):
                    self._serve(_Request.receive(connection))
        finally:
            for one in self._preloaded:
                one.put(None)
            for one in self._preloaded:
                one.join(PRELOAD_TIMEOUT_SECONDS)

    def _serve(self, request: _Request) -> None:
        environment = request.environment
        needed = read_by_imports(environment)
        for one in self._preloaded:
            if one.environment == needed:
                one.put(request)
                return
        if len(self._preloaded) == MAX_PRELOADED:
            # Nobody answers, so the start is a true one.
            request.__exit__()
            return
        one = _Preloaded(self._python, environment)
        one.put(request)
        one.start()
        self._preloaded.append(one)
