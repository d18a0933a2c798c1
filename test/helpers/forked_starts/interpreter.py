"""Stands in for Python: has programs forked, and leaves the rest to Python.

Run in place of ``python launch.py --model-path ...`` or ``python -c ...`` by whatever
starts a program; see the package for why. The first line is put there by the function
that makes it executable.
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
    """Returns a connection to the forking process, once it has forked; or ``None``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(FOLDER, "socket"))
        request = {
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "pid": os.getpid(),
        }
        content = json.dumps(request).encode()
        # The program begins when the pipe is closed.
        closed, open_end = os.pipe()
        fds = array.array("i", [0, 1, 2, closed])
        length = len(content).to_bytes(8, "big")
        connection.sendmsg(
            [length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        )
        connection.sendall(content)
        pid = receive_number(connection)
        # Tells who looks for the program's processes.
        with open("/proc/self/comm", "w") as name:
            name.write(f"forked {pid}")
        os.close(open_end)
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
    """Lives as long as the program, and ends as it did."""

    def pass_on(number: int, frame: object) -> None:
        connection.sendall(bytes([number]))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
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
    if sys.argv[1:]:
        connection = ask(sys.argv[1:])
        if connection is not None:
            stay(connection)
    # Its own name, not the link's: Python finds its packages by it.
    python = os.readlink(os.path.join(FOLDER, "python"))
    os.execv(python, [python, *sys.argv[1:]])
