"""Imports all that a server needs, and forks a server for each request.

Run by SGLang's own Python::

    python preloaded.py <number of the control socket> <path of launch.py>

It imports and does nothing else: a fork of a process with threads, or of one that has
computed something, need not work. When it has imported all it says ``+``.

Each request is a line of JSON behind its length, and comes with the connection to the
process that the server's owner knows, and with its streams. The connection gets the
server's process id when it has been forked and its exit status when it has ended; the
server is killed when the other side of it is closed.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

STREAMS = 3

GONE_TIMEOUT_SECONDS = 5.0
"""How long killed processes may take to give their memory back."""


def import_all(launcher: str) -> Any:
    """Imports what a server imports until it is ready; returns its entry module."""
    spec = importlib.util.spec_from_file_location("launch", launcher)
    assert spec is not None
    assert spec.loader is not None
    launch = importlib.util.module_from_spec(spec)
    sys.modules["launch"] = launch
    spec.loader.exec_module(launch)
    launch.prepare_process()
    for name in (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
    ):
        importlib.import_module(name)
    return launch


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns the next request and its descriptors; ``None`` after the last one."""
    head, fds, _, _ = socket.recv_fds(control, 8, 1 + STREAMS)
    if not head:
        return None
    length = int.from_bytes(head, "big")
    content = b""
    while len(content) < length:
        content += control.recv(length - len(content))
    return json.loads(content), list(fds)


class Server:
    """A forked server, by its process group and the connection to its owner."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection

    def kill(self) -> None:
        """Begins to end the process tree."""
        # Also what the launcher leaves behind: the group holds the tree.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait_gone(self) -> None:
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


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks until nobody asks; returns the request in each fork, and ``None`` here."""
    servers: dict[int, Server] = {}
    # A child that ends wakes select.
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        lines = {server.connection: server for server in servers.values()}
        readable, _, _ = select.select([control, wake, *lines], [], [])
        if wake in readable:
            wake.recv(4096)
        for line in lines.keys() & set(readable):
            lines[line].kill()
        reap(servers)
        if control not in readable:
            continue
        request = receive(control)
        if request is None:
            for server in servers.values():
                server.kill()
            return None
        content, (number, *streams) = request
        connection = socket.socket(fileno=number)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (control, wake, waker, connection, *lines):
                one.close()
            become(content, streams)
            return content
        for stream in streams:
            os.close(stream)
        servers[pid] = Server(pid, connection)
        servers[pid].tell(pid)


def reap(servers: dict[int, Server]) -> None:
    """Tells the owners of servers that have ended."""
    while servers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        server = servers.pop(pid, None)
        if server is not None:
            server.kill()
            server.wait_gone()
            server.tell(os.waitstatus_to_exitcode(status))
            server.connection.close()


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Gives this process what a process that is started anew has from its starter."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    # What is spawned after all imports the launcher.
    sys.modules["__main__"].__file__ = request["arguments"][0]


def start(launch: Any) -> None:
    """Runs the server as its launcher does, with forks in place of further imports."""
    import tempfile

    import numpy as np
    import torch

    tempfile.tempdir = None
    np.random.seed()  # noqa: NPY002 - It is what SGLang draws from.
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))
    multiprocessing.set_start_method("fork", force=True)
    # Its value was read by the import.
    name = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    sampler = importlib.import_module("sglang.srt.layers.sampler")
    setattr(sampler, name, os.environ.get(name, "").lower() in ("true", "1"))
    # SGLang asks for "spawn".
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    os.register_at_fork(after_in_child=launch.die_with_parent)
    launch.die_with_parent()
    launch.main(sys.argv[1:])


def main(number: int, launcher: str) -> None:
    """Imports, says so, and forks."""
    control = socket.socket(fileno=number)
    control.set_inheritable(False)
    launch = import_all(launcher)
    control.sendall(b"+")
    request = serve(control)
    if request is not None:
        start(launch)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
