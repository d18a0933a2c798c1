"""Stands in for SGLang's Python: has servers forked, and leaves the rest to Python.

Run in place of ``python launch.py --model-path ...`` by whatever starts a server; see
the package for why. The first line is put there by who makes it executable.
"""

import array
import json
import os
import signal
import socket
import sys
from typing import NoReturn

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))


def ask(arguments: list[str]) -> socket.socket | None:
    """Returns a connection to who forks, once the server runs; ``None`` for nobody."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(FOLDER, "socket"))
        request = {
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        content = json.dumps(request).encode()
        fds = array.array("i", [0, 1, 2])
        length = len(content).to_bytes(8, "big")
        connection.sendmsg(
            [length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        )
        connection.sendall(content)
        pid = receive_number(connection)
        # Tells who looks for the server's processes.
        with open("/proc/self/comm", "w") as name:
            name.write(f"forked {pid}")
        return connection
    except OSError:
        return None


def receive_number(connection: socket.socket) -> int:
    """Returns a number of four bytes."""
    content = b""
    while len(content) < 4:
        part = connection.recv(4 - len(content))
        if not part:
            raise OSError("The other side has ended.")
        content += part
    return int.from_bytes(content, "big", signed=True)


def stay(connection: socket.socket) -> NoReturn:
    """Lives as long as the server, and ends as it did."""

    def end(number: int, frame: object) -> None:
        # What is asked to end has half a second, and a fork keeps nothing to save.
        connection.shutdown(socket.SHUT_WR)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    try:
        status = receive_number(connection)
    except OSError:
        sys.exit(1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if len(sys.argv) > 1 and os.path.basename(sys.argv[1]) == "launch.py":
        connection = ask(sys.argv[1:])
        if connection is not None:
            stay(connection)
    python = os.path.join(FOLDER, "python")
    # Its own name, not the link's: Python finds its packages by it.
    python = os.readlink(python)
    os.execv(python, [python, *sys.argv[1:]])
