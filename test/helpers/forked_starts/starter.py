"""Hands requests for starts to preloaded processes, and starts those."""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Kind", "Starter"]

PRELOAD_TIMEOUT_SECONDS = 300.0
"""Timeout for all imports; they take 20 s on a quiet machine."""

DESCRIPTORS = 4
"""Standard input, output and error travel with a request, and a pipe."""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kind:
    """Programs that are forked from processes with the same imports."""

    python: Path
    """The interpreter that runs them."""
    module: str
    """File of this folder that imports what they need and runs them."""
    module_arguments: tuple[str, ...] = ()
    """Arguments of the file's ``load``."""
    accepts: Callable[[list[str]], bool]
    """Whether arguments of Python, at least one, start such a program."""
    read_by_imports: tuple[str, ...]
    """How variables begin that imports may read: a fork has those of its import."""
    applied_later: frozenset[str]
    """Variables of that kind that a fork follows all the same."""
    added_later: frozenset[str] = frozenset()
    """Folders of ``PYTHONPATH`` that a fork adds itself."""
    environments: tuple[Mapping[str, str], ...] = ()
    """Environments of the first preloaded processes; requests bring further ones."""
    most: int
    """Processes with everything imported, of 700 MB each; further starts are true."""

    def fixed(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables on which the outcome of an import may depend. Pure."""
        fixed = {
            name: value
            for name, value in environment.items()
            if name.startswith(self.read_by_imports) and name not in self.applied_later
        }
        if "PYTHONPATH" in fixed:
            folders = fixed["PYTHONPATH"].split(os.pathsep)
            kept = [folder for folder in folders if folder not in self.added_later]
            fixed["PYTHONPATH"] = os.pathsep.join(kept)
        return fixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A program's start, as ``interpreter.py`` sends it."""

    content: bytes
    connection: socket.socket
    descriptors: list[int]
    arguments: list[str]
    environment: dict[str, str]

    @classmethod
    def receive(cls, connection: socket.socket) -> Self:
        """Reads a request. Raises ``OSError`` if its sender has ended."""
        head, descriptors, _, _ = socket.recv_fds(connection, 8, DESCRIPTORS)
        length = int.from_bytes(head, "big")
        content = b""
        while len(content) < length:
            part = connection.recv(length - len(content))
            if not part:
                raise OSError("The sender has ended.")
            content += part
        fields = json.loads(content)
        return cls(
            content=content,
            connection=connection,
            descriptors=list(descriptors),
            arguments=fields["arguments"],
            environment=fields["environment"],
        )

    def forward(self, control: socket.socket) -> None:
        """Sends the request on to a preloaded process."""
        fds = [self.connection.fileno(), *self.descriptors]
        socket.send_fds(control, [len(self.content).to_bytes(8, "big")], fds)
        control.sendall(self.content)

    def close(self) -> None:
        """Lets go of it; unless it was forwarded, its sender starts truly."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.connection.close()


class Preloaded(threading.Thread):
    """A process with everything imported, and the thread that started it.

    Both start with the first request. The process ends with its thread, which hands it
    one request after another. Until everything is imported, requests wait.

    Args:
        kind: what it forks.
        environment: all its variables.
    """

    def __init__(self, kind: Kind, environment: Mapping[str, str]) -> None:
        super().__init__(name="preloaded", daemon=True)
        self.fixed = kind.fixed(environment)
        self._kind = kind
        self._inherited = {**environment, **self.fixed}
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()

    def put(self, request: Request) -> None:
        """Adds a request; the first one starts process and thread."""
        self._requests.put(request)
        if self.ident is None:
            self.start()

    def end(self) -> None:
        """Ends process and thread, if they were started."""
        if self.ident is not None:
            self._requests.put(None)
            self.join(PRELOAD_TIMEOUT_SECONDS)

    def run(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [
                        str(self._kind.python),
                        str(_FOLDER / "preloaded.py"),
                        str(theirs.fileno()),
                        str(_FOLDER / self._kind.module),
                        *self._kind.module_arguments,
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
                with suppress(OSError):
                    request.forward(ours)
                request.close()
        process.wait()


class Starter:
    """Hands each request to a process that was preloaded in such an environment.

    Args:
        kinds: folders of the interpreters, where it listens, and what they run.
    """

    def __init__(self, kinds: Mapping[Path, Kind]) -> None:
        self._preloaded = {
            kind: [Preloaded(kind, environment) for environment in kind.environments]
            for kind in kinds.values()
        }
        self._selector = selectors.DefaultSelector()
        for folder, kind in kinds.items():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(folder / "socket"))
            listener.listen(64)
            self._selector.register(listener, selectors.EVENT_READ, kind)
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name="forked-starts", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._wake.close()
        self._thread.join(PRELOAD_TIMEOUT_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    assert isinstance(key.fileobj, socket.socket)
                    connection, _ = key.fileobj.accept()
                    with suppress(OSError, ValueError):
                        self._serve(key.data, Request.receive(connection))
        finally:
            self._end()

    def _end(self) -> None:
        """Ends the preloaded processes, and listens no more."""
        for some in self._preloaded.values():
            for one in some:
                one.end()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _serve(self, kind: Kind, request: Request) -> None:
        some = self._preloaded[kind]
        fixed = kind.fixed(request.environment)
        found = next((one for one in some if one.fixed == fixed), None)
        if not kind.accepts(request.arguments) or (
            found is None and len(some) == kind.most
        ):
            # Nobody answers, so the start is a true one.
            request.close()
            return
        if found is None:
            found = Preloaded(kind, request.environment)
            some.append(found)
        found.put(request)
