"""The workers of a gateway: starts them, also again, gives them sessions, ends them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import cloudpickle
from aiohttp import web

from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.gateway.options import ServingOptions
from torchrl_sglang.gateway.processes.addresses import ProcessAddresses
from torchrl_sglang.gateway.processes.channel import (
    Channel,
    ChannelClosedError,
    Part,
)
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
from torchrl_sglang.gateway.processes.process import (
    WorkerProcess,
    spawn,
    until_silent,
    wait_for_end,
)
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import to_row
from torchrl_sglang.support.log import torchrl_logger

START_SECONDS = 180.0
"""Timeout of the start of all workers, which import what they need."""

END_SECONDS = 5.0
"""Time for workers to end by themselves, before they are killed."""

WATCH_SECONDS = 10.0
"""Interval between questions whether a worker answers."""

ANSWER_SECONDS = 30.0
"""Timeout of such a question; a worker that misses two in a row is killed."""

SHORT_LIFE_SECONDS = 60.0
"""A worker that was started again and ends sooner is not started once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Substitute:
    """Where this process listens for a worker that has ended."""

    site: web.SockSite
    """What listens."""
    listener: socket.socket
    """Its socket, which shares the worker's port."""


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
                    setup = self._setup(number, self._addresses.reachable(port))
                    worker = await self._start(number, setup)
                    keep = self._keep_running(worker, setup, runner)
                    tasks.append(asyncio.create_task(keep))
                await self._started()
                self._set_up(None)
                self._ready.set()
                yield
            finally:
                await self._end()
                served = [each.served for each in self._workers if each.served]
                await asyncio.gather(*tasks, *served, return_exceptions=True)

    async def _start(self, number: int, setup: Setup) -> WorkerProcess:
        """Starts a worker in the place of one with its number, if there was one."""
        worker, end = spawn(number)
        self._workers = [each for each in self._workers if each.number != number]
        self._workers.append(worker)
        worker.channel = await Channel.over(end, self._handler(worker))
        worker.channel.tell(setup)
        worker.served = asyncio.create_task(self._serve(worker, worker.channel))
        return worker

    def _setup(self, number: int, owner_url: str) -> Setup:
        """Returns the first message to a worker."""
        return Setup(
            options=self._options,
            capabilities=self._owner.engine.capabilities,
            model_path=self._model_path,
            host=self._addresses.host,
            port=self._addresses.port_of(number),
            owner_url=owner_url,
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

    async def _serve(self, worker: WorkerProcess, channel: Channel) -> None:
        """Takes what a worker says until it ends."""
        serving = asyncio.create_task(channel.serve())
        watching = asyncio.create_task(self._watch(worker, channel))
        try:
            await serving
        finally:
            watching.cancel()
        if not worker.listens.done():
            code = await asyncio.to_thread(wait_for_end, worker.process, END_SECONDS)
            worker.started(f"it ended with {code}; standard error has its messages")

    async def _watch(self, worker: WorkerProcess, channel: Channel) -> None:
        """Kills a worker that does not answer any more."""
        with suppress(ChannelClosedError, ServerStartError):
            # A watch that is cancelled leaves the start to others.
            await asyncio.shield(worker.listens)
            await until_silent(channel, every=WATCH_SECONDS, within=ANSWER_SECONDS)
            self._kill_silent(worker)

    @staticmethod
    def _kill_silent(worker: WorkerProcess) -> None:
        torchrl_logger.error(
            f"Process {worker.number} of the gateway has not answered twice within "
            f"{ANSWER_SECONDS:g} s, and is killed."
        )
        worker.process.kill()

    async def _keep_running(
        self, worker: WorkerProcess, setup: Setup, runner: web.AppRunner
    ) -> None:
        """Sees to a worker's sessions when it ends, and starts it again."""
        # When it was last started again.
        begun = -SHORT_LIFE_SECONDS
        while True:
            assert worker.served is not None
            await worker.served
            with self._lock:
                if self._ending or not worker.is_serving:
                    return
                worker.is_serving = False
                lost = list(worker.sessions.values())
                worker.sessions.clear()
            code = await asyncio.to_thread(wait_for_end, worker.process, END_SECONDS)
            torchrl_logger.error(
                f"Process {worker.number} of the gateway ended with {code}. Its "
                f"{len(lost)} sessions go on in others; requests under way are lost."
            )
            self._owner.withdraw_unreceived(lost)
            self._set_up(lost)
            place = await self._take_over(worker.port, runner)
            if self._ending or time.monotonic() - begun < SHORT_LIFE_SECONDS:
                return
            begun = time.monotonic()
            setup = replace(setup, port=worker.port, shares_port=True)
            try:
                worker = await self._start(worker.number, setup)
            except ServerStartError as error:
                torchrl_logger.error(f"{error} The others go on without it.")
                return
            if not await self._began(worker):
                return
            if place is not None:
                await _hand_back(place, runner)

    async def _began(self, worker: WorkerProcess) -> bool:
        """Returns whether a worker that was started again serves."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker.listens
        except (ServerStartError, TimeoutError) as error:
            torchrl_logger.error(
                f"Process {worker.number} of the gateway was not started again; the "
                f"others go on without it. {error}"
            )
            worker.process.kill()
            return False
        torchrl_logger.info(
            f"Process {worker.number} of the gateway was started again, and takes new "
            f"sessions."
        )
        return True

    async def _take_over(self, port: int, runner: web.AppRunner) -> _Substitute | None:
        """Listens on the port of a worker that ended: clients still use its address."""
        try:
            listener = _listen(self._addresses.host, port)
            site = web.SockSite(runner, listener)
            await site.start()
        except OSError as error:
            torchrl_logger.warning(
                f"Clients of an ended process of the gateway are not answered: {error}"
            )
            return None
        return _Substitute(site=site, listener=listener)

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
            await asyncio.to_thread(wait_for_end, worker.process, left)

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


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return socket.create_server(address[:2], family=family, reuse_port=True)


async def _hand_back(place: _Substitute, runner: web.AppRunner) -> None:
    """Listens no more; connections that wait there would be reset."""
    waiting = list[socket.socket]()
    with suppress(BlockingIOError):
        while True:
            connection, _ = place.listener.accept()
            connection.setblocking(False)
            waiting.append(connection)
    await place.site.stop()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    for connection in waiting:
        await loop.connect_accepted_socket(server, connection)
