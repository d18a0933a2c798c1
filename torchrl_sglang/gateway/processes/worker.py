"""The program of a worker: one process that serves sessions of a gateway.

Run by :class:`.WorkerPool`, with the number of an open socket and the id of the owner.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.options import ServingOptions
from torchrl_sglang.gateway.processes.channel import Channel, Part
from torchrl_sglang.gateway.processes.forward import FORWARDED, Forwarder
from torchrl_sglang.gateway.processes.messages import (
    AddSession,
    DropSession,
    Listening,
    OtherSession,
    Setup,
    Synchronize,
    WorkerFailed,
)
from torchrl_sglang.gateway.processes.remote import (
    CALL_SECONDS,
    OwnerStore,
    RemoteEngine,
)
from torchrl_sglang.gateway.responder import Responder
from torchrl_sglang.gateway.routes.app import make_session_app
from torchrl_sglang.gateway.runner import make_runner
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.store import from_row
from torchrl_sglang.support.log import torchrl_logger

SERVED_ELSEWHERE = "served_elsewhere"
"""Code of the error for a key of another process's session."""

WATCH_SECONDS = 1.0
"""Interval between looks whether the owner is there."""

LEFT_SECONDS = 3.0
"""Time for a worker whose owner has ended to end by itself."""


class SessionWorker(Responder):
    """Serves sessions that the owner gives it.

    Args:
        options: of the gateway.
        setup: of this process.
        channel: to the owner.
        forwarder: hands requests to the owner.
    """

    def __init__(
        self,
        options: ServingOptions,
        setup: Setup,
        channel: Channel,
        forwarder: Forwarder,
    ) -> None:
        engine = RemoteEngine(channel, setup.capabilities, setup.model_path)
        super().__init__(engine, options, OwnerStore(channel))
        self._owner_url = setup.owner_url
        self._channel, self._forwarder = channel, forwarder
        self._others: set[str] = set()

    def add(self, told: AddSession) -> None:
        """Serves a session from now on."""
        session = Session(told.name, key=told.key)
        session.began(told.created)
        session.expires = told.expires
        for row in told.rows:
            session.add(from_row(row, session.turn))
        with self._lock:
            self._others.discard(session.key)
            self._registry.add(session)

    def add_other(self, told: OtherSession) -> None:
        """Knows a session that another process serves."""
        self._others.add(told.key)

    def drop(self, told: DropSession) -> None:
        """Serves a session no more."""
        with self._lock:
            session = self._registry.keyed(told.key)
            if session is not None:
                self._registry.remove(session)
            else:
                self._others.discard(told.key)
                self._registry.add_dropped(told.key)

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns the session of this name or key.

        Raises:
            GatewayError: if this process does not serve it, or its key has expired.
        """
        if not name and key in self._others:
            raise GatewayError(
                "Another process serves the session of this key.", code=SERVED_ELSEWHERE
            )
        return super().find(name=name, key=key)

    def session(self, name: str | None = None) -> Session:
        """Raises :class:`GatewayError`: only the owner makes sessions."""
        raise GatewayError(f"There is no session {name!r} here.", status=404)

    async def elsewhere(
        self, request: web.Request, find: Callable[[], Session]
    ) -> web.StreamResponse | None:
        """Has the owner answer a request for a session that is not served here."""
        try:
            find()
        except GatewayError:
            # The owner may have told of it just now.
            await self._channel.call(Synchronize(), seconds=CALL_SECONDS)
        else:
            return None
        try:
            find()
        except GatewayError:
            if FORWARDED in request.headers:
                raise
            return await self.ask_owner(request)
        return None

    async def ask_owner(self, request: web.Request) -> web.StreamResponse:
        """Has the owner answer a request, once."""
        if FORWARDED in request.headers:
            raise GatewayError("This process does not serve that.", status=404)
        return await self._forwarder.send(request, self._owner_url)


async def serve(end: socket.socket) -> None:
    """Serves until the owner closes its end of the connection."""
    begun: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
    worker: SessionWorker | None = None

    def handle(message: Any, part: Part) -> None:
        if isinstance(message, Setup):
            begun.set_result(message)
        elif isinstance(message, AddSession):
            assert worker is not None
            worker.add(message)
        elif isinstance(message, OtherSession):
            assert worker is not None
            worker.add_other(message)
        elif isinstance(message, DropSession):
            assert worker is not None
            worker.drop(message)
        elif isinstance(message, Synchronize):
            # The owner wants to know whether this process answers.
            pass
        else:
            raise TypeError(f"The owner says {message!r}.")

    channel = await Channel.over(end, handle)
    serving = asyncio.create_task(channel.serve())
    try:
        async with Forwarder.open() as forwarder:
            setup = await begun
            worker = SessionWorker(
                pickle.loads(setup.options), setup, channel, forwarder
            )
            # What there is now stays until the end. Each full garbage collection would
            # look at it, and hold up all clients.
            gc.collect()
            gc.freeze()
            async with _listening(worker, setup) as port:
                channel.tell(Listening(port=port))
                await asyncio.shield(serving)
    except Exception as error:  # noqa: BLE001 - The owner raises it.
        torchrl_logger.exception("A process of the gateway cannot serve.")
        channel.tell(WorkerFailed(reason=f"{type(error).__name__}: {error}"))
    finally:
        channel.close()
        await serving


@asynccontextmanager
async def _listening(worker: SessionWorker, setup: Setup) -> AsyncIterator[int]:
    """Listens during the block, and yields the port."""
    app = make_session_app(worker, worker.elsewhere, worker.ask_owner)
    runner = make_runner(app)
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, setup.host, setup.port, reuse_port=setup.shares_port or None
        )
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _watch(owner: int) -> None:
    """Ends this process when its owner has ended, whatever it does.

    The connection alone does not tell: children of the owner may hold the other end.
    """
    while os.getppid() == owner:
        time.sleep(WATCH_SECONDS)
    time.sleep(LEFT_SECONDS)
    os._exit(1)


def main() -> None:
    """Serves until the owner has ended."""
    number, owner = map(int, sys.argv[1:])
    threading.Thread(
        target=_watch, args=(owner,), name="torchrl_sglang-owner", daemon=True
    ).start()
    asyncio.run(serve(socket.socket(fileno=number)))
    # Threads that tokenize are waited for by nobody.
    os._exit(0)


if __name__ == "__main__":
    main()
