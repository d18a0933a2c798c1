"""Imports all that a kind of program needs, and forks a program for each request.

Run by the Python of the programs::

    python preloaded.py <number of the control socket> <file of the kind> ...

The file has three names: ``load(...)`` imports everything, ``run(arguments)`` is a
program, and ``ENDS_AS_A_TREE`` says whether its whole process group ends with it and at
any signal. The process imports and does nothing else: a fork of a process with threads,
or of one that has computed something, need not work. When it has imported all it says
``+``.

Each request is a line of JSON behind its length, and comes with the connection to the
process that the program's owner knows, with its streams, and with a pipe that is closed
when the program may begin. The connection gets the program's process id when it has
been forked and its exit status when it has ended. It brings the numbers of signals, and
the program is killed when the other side of it is closed.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from namespaces import enter_namespaces_of

DESCRIPTORS = 4

GONE_TIMEOUT_SECONDS = 5.0
"""How long killed processes may take to give their memory back."""


def import_file(path: str, name: str) -> Any:
    """Imports a file as a module of a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns the next request and its descriptors; ``None`` after the last one."""
    head, fds, _, _ = socket.recv_fds(control, 8, 1 + DESCRIPTORS)
    if not head:
        return None
    length = int.from_bytes(head, "big")
    content = b""
    while len(content) < length:
        content += control.recv(length - len(content))
    return json.loads(content), list(fds)


class Program:
    """A forked program, by its process id and the connection to its owner."""

    def __init__(self, pid: int, connection: socket.socket, *, tree: bool) -> None:
        self.pid = pid
        self.connection = connection
        self._tree = tree

    def pass_signals(self) -> None:
        """Passes on the signals that the owner sends, or that it was killed."""
        numbers = b""
        with suppress(ConnectionError):
            numbers = self.connection.recv(64)
        if self._tree or not numbers:
            self.kill()
        else:
            for number in numbers:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Begins to end the program."""
        with suppress(ProcessLookupError):
            if self._tree:
                # Also what the launcher leaves behind: the group holds the tree.
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def ended(self, status: int) -> None:
        """Tells the owner, once the program's tree is gone."""
        if self._tree:
            self.kill()
            self._wait_gone()
        self.tell(status)
        self.connection.close()

    def _wait_gone(self) -> None:
        """Waits until the killed processes are gone, those that others reap too."""
        deadline = time.monotonic() + GONE_TIMEOUT_SECONDS
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.005)

    def tell(self, number: int) -> None:
        """Tells the owner the process id, and later the exit status."""
        with suppress(OSError):
            self.connection.sendall(number.to_bytes(4, "big", signed=True))


def serve(control: socket.socket, *, tree: bool) -> list[str] | None:
    """Forks until nobody asks; returns the arguments in each fork, ``None`` here."""
    programs: dict[int, Program] = {}
    # A child that ends wakes select.
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        lines = {program.connection: program for program in programs.values()}
        readable, _, _ = select.select([control, wake, *lines], [], [])
        if wake in readable:
            wake.recv(4096)
        for line in lines.keys() & set(readable):
            lines[line].pass_signals()
        reap(programs)
        if control not in readable:
            continue
        request = receive(control)
        if request is None:
            for program in programs.values():
                program.kill()
            return None
        content, (number, *descriptors) = request
        connection = socket.socket(fileno=number)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (control, wake, waker, connection, *lines):
                one.close()
            become(content, descriptors)
            return list(content["arguments"])
        for descriptor in descriptors:
            os.close(descriptor)
        programs[pid] = Program(pid, connection, tree=tree)
        programs[pid].tell(pid)


def reap(programs: dict[int, Program]) -> None:
    """Tells the owners of programs that have ended."""
    while programs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        program = programs.pop(pid, None)
        if program is not None:
            program.ended(os.waitstatus_to_exitcode(status))


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this process what a process that is started anew has from its starter."""
    *streams, pipe = descriptors
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    enter_namespaces_of(request["pid"])
    os.chdir(request["folder"])
    os.read(pipe, 1)
    os.close(pipe)


def follow_environment() -> None:
    """Does what imports have done with another environment, and draws new seeds."""
    import tempfile

    import numpy as np
    import torch

    tempfile.tempdir = None
    np.random.seed()  # noqa: NPY002 - It is what SGLang draws from.
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))


def main(number: int, file: str, arguments: list[str]) -> None:
    """Imports, says so, and forks."""
    control = socket.socket(fileno=number)
    control.set_inheritable(False)
    kind = import_file(file, "kind")
    kind.load(*arguments)
    # A fork does not look for garbage in what was imported.
    gc.freeze()
    control.sendall(b"+")
    program = serve(control, tree=kind.ENDS_AS_A_TREE)
    if program is None:
        # There is nothing to clean up, which would take a second.
        os._exit(0)
    follow_environment()
    kind.run(program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
