"""Serves an application on the background event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.gateway.connections import STRANGERS, BoundedSite, LoopErrors
from torchrl_sglang.support.event_loop import get_loop, run_sync

START_SECONDS, END_SECONDS = 30.0, 10.0


class Runner:
    """Serves an application on the background event loop, once.

    Requests reach the engine in the same thread: two busy threads would wait for
    Python's lock at each system call.
    """

    def __init__(
        self,
        make_app: Callable[[], web.Application],
        host: str,
        port: int,
    ) -> None:
        self._make_app = make_app
        self._host = host
        self._wanted = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._running: set[asyncio.Task[Any] | None] = set()
        self.port = 0
        """0 while it does not listen."""

    def start(self) -> None:
        """Starts the endpoint; returns when it listens."""
        if self._loop is not None:
            raise ConfigurationError(
                "The gateway has been started already, which it can be once; make "
                "another one."
            )
        self._loop = get_loop()
        try:
            # Without the caller's span, in which each request would be otherwise.
            contextvars.Context().run(lambda: run_sync(self._serve()))
        except BaseException as error:
            # Ctrl-C, too: ends the partial start.
            self.stop()
            if isinstance(error, SGLangError) or not isinstance(error, Exception):
                raise
            raise ConfigurationError(
                f"The gateway cannot listen on {self._host}:{self._wanted}: "
                f"{str(error) or 'it took too long'}."
            ) from error

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        app = self._make_app()
        app.middlewares.insert(0, self._follow)
        self._runner = runner = web.AppRunner(
            app,
            # A disconnect of the client frees the server.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
        )
        async with asyncio.timeout(START_SECONDS):
            await runner.setup()
            site = BoundedSite(runner, self._host, self._wanted, app[STRANGERS])
            await site.start()
        self.port = runner.addresses[0][1]

    @web.middleware
    async def _follow(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Knows a request until it has ended, which is after its connection's end."""
        task = asyncio.current_task()
        self._running.add(task)
        try:
            return await handler(request)
        finally:
            self._running.discard(task)

    def stop(self) -> None:
        """Stops the endpoint, and waits until it does not listen."""
        # A fork of the process has another loop, and none of the connections.
        if self._runner is not None and self._loop is get_loop():
            run_sync(self._end())

    async def _end(self) -> None:
        """Stops listening, and waits for the ends of the aborted requests."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if running := [task for task in self._running if task is not None]:
            await asyncio.wait(running, timeout=END_SECONDS)
        self.port = 0
