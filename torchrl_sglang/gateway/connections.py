"""Limits on connections whose clients have not presented a key."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from torchrl_sglang.support.log import torchrl_logger

MOST_STRANGERS = 4096
"""Most connections without a key; a new connection replaces the oldest. Agents that
begin at once are without one until their first requests are read."""

SHARE_OF_FILES = 0.25
"""Largest share of the process's open files for connections without a key: the trainer
needs files, too."""

_TURNS_TO_ACCEPT = 3
"""Iterations of asyncio's loop before an application knows an accepted connection."""

_NO_FILES = "socket.accept() out of system resource"
"""Message of asyncio for an unacceptable connection, once a second."""


@dataclass(frozen=True, kw_only=True)
class ClientTimeouts:
    """Timeouts of a gateway's clients, in seconds."""

    headers: float = 30.0
    """Timeout of a new connection for the headers of a request with a key."""
    body: float = 120.0
    """Timeout of the body of a request."""


class Strangers:
    """Connections whose clients have not presented a key, for an event loop."""

    def __init__(self, timeouts: ClientTimeouts = ClientTimeouts()) -> None:
        self.timeouts = timeouts
        # Time at which each was accepted.
        self._accepted: dict[web.RequestHandler, float] = {}

    def accept(self, server: web.Server) -> web.RequestHandler:
        """Returns the protocol of a new connection."""
        loop = asyncio.get_running_loop()
        connection = server()
        self._accepted[connection] = loop.time()
        loop.call_later(self.timeouts.headers, self._close, connection)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = min(MOST_STRANGERS, int(files * SHARE_OF_FILES))
        if len(self._accepted) > limit:
            self._make_room(loop.time(), limit)
        return connection

    def know(self, request: web.Request) -> None:
        """Removes a connection whose client has a key or needs none."""
        self._accepted.pop(request.protocol, None)

    def __contains__(self, request: web.Request) -> bool:
        return request.protocol in self._accepted

    def _make_room(self, now: float, most: int) -> None:
        for connection, accepted in list(self._accepted.items()):
            # A newly accepted connection has no transport yet.
            if connection.transport is None and now - accepted > 1:
                del self._accepted[connection]
        for connection in list(self._accepted)[: max(len(self._accepted) - most, 0)]:
            if connection.transport is not None:
                del self._accepted[connection]
                connection.force_close()

    def _close(self, connection: web.RequestHandler) -> None:
        """Closes a connection still without a key."""
        if self._accepted.pop(connection, None) is not None:
            connection.force_close()


STRANGERS = web.AppKey("strangers", Strangers)
"""Key of an application's strangers."""


class BoundedSite(web.BaseSite):
    """Listens, and limits an application's connections without a key."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, strangers: Strangers
    ) -> None:
        super().__init__(runner)
        self._address, self._strangers = (host, port), strangers

    @property
    def name(self) -> str:
        """URL of the site."""
        host, port = self._address
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Listens from now on."""
        await super().start()
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        self._server = await loop.create_server(
            lambda: self._strangers.accept(server), *self._address, backlog=128
        )

    async def stop(self) -> None:
        """Stops listening; the runner then closes its connections.

        asyncio loses the socket of a connection whose server closes between its
        ``accept()`` and its transport, so accepting ends first.
        """
        if self._server is not None:
            assert isinstance(self._server, asyncio.Server)
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
            for _ in range(_TURNS_TO_ACCEPT):
                await asyncio.sleep(0)
        await super().stop()


class LoopErrors:
    """Handles errors of an event loop: a lack of files is logged once."""

    def __init__(self) -> None:
        self._has_logged = False

    def __call__(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Handles an error, in the signature of ``loop.set_exception_handler``."""
        if context.get("message") != _NO_FILES:
            loop.default_exception_handler(context)
        elif not self._has_logged:
            self._has_logged = True
            torchrl_logger.warning(
                "The gateway cannot accept connections: this process has as many open "
                "files as it may have. `ulimit -n` raises that number. Clients wait "
                "meanwhile; this is logged once."
            )
