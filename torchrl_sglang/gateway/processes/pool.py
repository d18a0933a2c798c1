"""The workers of a gateway: starts them, gives them sessions, and ends them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import cloudpickle
from aiohttp import web
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.gateway.options import ServingOptions
from torchrl_sglang.gateway.processes.addresses import ProcessAddresses
from torchrl_sglang.gateway.processes.channel import Channel, Part
from torchrl_sglang.gateway.processes.forward import Forwarder
from torchrl_sglang.gateway.processes.messages import (
    AddSession,
    DropSession,
    Listening,
    OtherSession,
    Setup,
    WorkerFailed,
)
from torchrl_sglang.gateway.processes.owner import Owner
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import to_row

START_SECONDS = 180.0
"""Timeout of the start of all workers, which import what they need."""

END_SECONDS = 5.0
"""Time for workers to end by themselves, before they are killed."""

POLL_SECONDS = 0.02
"""Interval between looks whether a worker has ended."""

MODULE = "torchrl_sglang.gateway.processes.worker"
"""The program of a worker."""


def pickle_options(options: ServingOptions) -> bytes:
    """Returns arguments of a gateway for its workers.

    Classes and functions of the user's script travel as what they are.

    Raises:
        ConfigurationError: if one of them cannot be pickled.
    """
    # Token columns are read where the engine is.
    sent = replace(options, token_columns=())
    for each in fields(sent):
        value = getattr(sent, each.name)
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise ConfigurationError(
                f"{each.name} cannot be given to other processes: "
                f"{type(error).__name__}: {error}. Give one that can be pickled, or "
                f"leave num_processes at 1."
            ) from error
    content: bytes = cloudpickle.dumps(sent)
    return content


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


class WorkerPool:
    """The workers of a gateway. Used from the gateway's event loop, where not noted.

    Args:
        owner: takes what workers say.
        options: of the gateway.
        addresses: of its processes.
        model_path: name of the model.
        set_up: gives workers to sessions, to all of the gateway with ``None``.
        lock: held while sessions begin or end.
    """

    def __init__(
        self,
        owner: Owner,
        options: bytes,
        addresses: ProcessAddresses,
        *,
        model_path: str,
        set_up: Callable[[Sequence[Session] | None], object],
        lock: threading.Lock,
    ) -> None:
        self._owner, self._addresses = owner, addresses
        self._options, self._model_path = options, model_path
        self._set_up, self._lock = set_up, lock
        self._workers: list[WorkerProcess] = []
        self._ready = asyncio.Event()
        self._forwarder: Forwarder | None = None
        self._ending = False

    @asynccontextmanager
    async def running(self, runner: web.AppRunner) -> AsyncIterator[None]:
        """Starts the workers, and ends them after the block.

        Args:
            runner: of the gateway's own application.

        Raises:
            ServerStartError: if one does not start.
        """
        tasks: list[asyncio.Task[None]] = []
        async with Forwarder.open() as self._forwarder:
            try:
                port = runner.addresses[0][1]
                for number in range(1, self._addresses.num_workers + 1):
                    worker, end = self._spawn(number)
                    worker.channel = await Channel.over(end, self._handler(worker))
                    worker.channel.tell(self._setup(number, port))
                    serve = self._serve(worker, worker.channel, runner)
                    tasks.append(asyncio.create_task(serve))
                await self._started()
                self._set_up(None)
                self._ready.set()
                yield
            finally:
                await self._end()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, number: int) -> tuple[WorkerProcess, socket.socket]:
        """Starts a process, and returns this end of the connection to it."""
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
        worker = WorkerProcess(number, process)
        self._workers.append(worker)
        return worker, own

    def _setup(self, number: int, port: int) -> Setup:
        """Returns the first message to a worker."""
        return Setup(
            options=self._options,
            capabilities=self._owner.engine.capabilities,
            model_path=self._model_path,
            host=self._addresses.host,
            port=self._addresses.port_of(number),
            owner_url=self._addresses.reachable(port),
        )

    def _handler(self, worker: WorkerProcess) -> Callable[[Any, Part], Any]:
        def handle(message: Any, part: Part) -> Any:
            if isinstance(message, Listening):
                worker.port, worker.is_serving = message.port, True
                worker.started(None)
            elif isinstance(message, WorkerFailed):
                worker.started(message.reason)
            else:
                return self._owner.handle(message, part)
            return None

        return handle

    async def _started(self) -> None:
        """Returns when all workers listen."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(each.listens for each in self._workers))
        except TimeoutError:
            raise ServerStartError(
                f"Processes of the gateway did not listen within {START_SECONDS:g} s."
            ) from None

    async def _serve(
        self, worker: WorkerProcess, channel: Channel, runner: web.AppRunner
    ) -> None:
        """Takes what a worker says until it ends, and sees to its sessions then."""
        await channel.serve()
        if not worker.listens.done():
            code = await asyncio.to_thread(_wait, worker.process, END_SECONDS)
            worker.started(f"it ended with {code}; standard error has its messages")
        with self._lock:
            if self._ending or not worker.is_serving:
                return
            worker.is_serving = False
            lost = list(worker.sessions.values())
            worker.sessions.clear()
        code = await asyncio.to_thread(_wait, worker.process, END_SECONDS)
        torchrl_logger.error(
            f"Process {worker.number} of the gateway ended with {code}. Its "
            f"{len(lost)} sessions go on in others; requests under way are lost."
        )
        self._set_up(lost)
        await self._take_over(worker.port, runner)

    async def _take_over(self, port: int, runner: web.AppRunner) -> None:
        """Listens on the port of a worker that ended: clients still use its address."""
        try:
            site = web.TCPSite(runner, self._addresses.host, port)
            await site.start()
        except OSError as error:
            torchrl_logger.warning(
                f"Clients of an ended process of the gateway are not answered: {error}"
            )

    async def _end(self) -> None:
        """Ends all workers."""
        with self._lock:
            self._ending = True
            for worker in self._workers:
                worker.is_serving = False
        for worker in self._workers:
            if worker.channel is not None:
                worker.channel.close()
            if not worker.port:
                # It does not listen yet, and would notice late.
                worker.process.kill()
            # Its error may be one of several, of which the first is raised.
            if not worker.listens.cancel() and not worker.listens.cancelled():
                worker.listens.exception()
        deadline = time.monotonic() + END_SECONDS
        for worker in self._workers:
            left = max(deadline - time.monotonic(), 0.0)
            await asyncio.to_thread(_wait, worker.process, left)

    # Sessions.

    def place(self, session: Session) -> str | None:
        """Gives a session to a worker, in any thread; returns the worker's address.

        The worker with fewest sessions takes it. ``None``: no worker serves. The caller
        holds the lock of the sessions.
        """
        serving = [worker for worker in self._workers if worker.is_serving]
        worker = self._worker_of(session)
        if worker is None and serving:
            worker = min(serving, key=lambda each: len(each.sessions))
            self._give(session, worker, serving)
        if worker is None:
            return None
        return self._addresses.base(worker.number, worker.port)

    def _give(
        self, session: Session, worker: WorkerProcess, serving: Sequence[WorkerProcess]
    ) -> None:
        """Tells a worker all of a session, and the others its key."""
        worker.sessions[session.key] = session
        worker.tell(
            AddSession(
                name=session.name,
                key=session.key,
                created=session.created,
                expires=session.expires,
                rows=[to_row(turn) for turn in session.turns],
            )
        )
        for other in serving:
            if other is not worker:
                other.tell(OtherSession(key=session.key))

    def drop(self, session: Session) -> None:
        """Has the workers forget a session, in any thread.

        The caller holds the lock of the sessions.
        """
        for worker in self._workers:
            worker.sessions.pop(session.key, None)
            worker.tell(DropSession(key=session.key))

    def _worker_of(self, session: Session) -> WorkerProcess | None:
        having = (each for each in self._workers if session.key in each.sessions)
        return next(having, None)

    async def elsewhere(
        self, request: web.Request, find: Callable[[], Session]
    ) -> web.StreamResponse | None:
        """Has the worker of a session answer a request; ``None``: it is served here."""
        await self._ready.wait()
        worker = self._worker_of(find())
        if worker is None:
            return None
        assert self._forwarder is not None
        url = self._addresses.reachable(worker.port)
        return await self._forwarder.send(request, url)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Returns the exit code of a process, which is killed after so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
