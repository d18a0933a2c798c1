"""One worker of a gateway: its start, whether it answers, and its end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Any

from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.errors import GatewayError, ServerStartError
from torchrl_sglang.gateway.processes.channel import Channel, ChannelClosedError
from torchrl_sglang.gateway.processes.messages import Synchronize
from torchrl_sglang.gateway.session import Session

MODULE = "torchrl_sglang.gateway.processes.worker"
"""The program of a worker."""


class WorkerProcess:
    """One process that serves sessions.

    Args:
        number: of the process, from 1.
        process: that was started.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number, self.process = number, process
        self.port = 0
        self.sessions: dict[str, Session] = {}
        """Sessions that it serves, by their keys."""
        self.is_serving = False
        self.channel: Channel | None = None
        self.served: asyncio.Task[None] | None = None
        """Ends with the connection to the process."""
        self.listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def started(self, problem: str | None) -> None:
        """The process listens, or there is a problem with it."""
        if self.listens.done():
            return
        if problem is None:
            self.listens.set_result(None)
        else:
            self.listens.set_exception(
                ServerStartError(
                    f"Process {self.number} of the gateway does not start: {problem}"
                )
            )

    def tell(self, message: Any) -> None:
        """Tells the process something, in any thread."""
        if self.channel is not None:
            self.channel.tell_soon(message)


def spawn(number: int) -> tuple[WorkerProcess, socket.socket]:
    """Starts a worker, and returns this end of the connection to it.

    Raises:
        ServerStartError: if no process can be started.
    """
    own, other = socket.socketpair()
    ends = str(other.fileno()), str(os.getpid())
    # Its search path is this process's, without the current folder before it.
    command = [sys.executable, "-P", "-m", MODULE, *ends]
    environment = inherited_environment(os.environ, own_python=False)
    folders = [str(each) or os.getcwd() for each in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    try:
        process = subprocess.Popen(
            command,
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C ends the owner, which ends its workers.
            start_new_session=True,
        )
    except OSError as error:
        own.close()
        raise ServerStartError(
            f"Process {number} of the gateway does not start: {error}"
        ) from error
    finally:
        other.close()
    return WorkerProcess(number, process), own


async def until_silent(channel: Channel, *, every: float, within: float) -> None:
    """Returns when a process has not answered twice in a row.

    One missed answer tells nothing: this machine may have been suspended meanwhile.

    Args:
        channel: to the process.
        every: seconds between two questions.
        within: seconds that an answer may take.

    Raises:
        ChannelClosedError: if the process ends.
    """
    missed = 0
    while missed < 2:
        await asyncio.sleep(every)
        try:
            await channel.call(Synchronize(), seconds=within)
            missed = 0
        except ChannelClosedError:
            raise
        except GatewayError:
            missed += 1


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Returns the exit code of a process, which is killed after so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
