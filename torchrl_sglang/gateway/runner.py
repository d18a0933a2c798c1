"""Serves an application in a dedicated thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from torchrl_sglang.errors import ConfigurationError, SGLangError
from torchrl_sglang.gateway.connections import STRANGERS, BoundedSite, LoopErrors


class Runner:
    """Serves an application in a dedicated thread, once."""

    def __init__(
        self,
        make_app: Callable[[], web.Application],
        host: str,
        port: int,
    ) -> None:
        self._make_app = make_app
        self._host = host
        self._wanted = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0
        """0 while it does not listen."""
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the endpoint; returns when it listens."""
        if self._thread is not None:
            raise ConfigurationError(
                "The gateway has been started already, which it can be once; make "
                "another one."
            )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()),
            name="torchrl_sglang-gateway",
            daemon=True,
        )
        self._thread.start()
        try:
            is_ready = self._ready.wait(30.0)
        except BaseException:
            # Ctrl-C: stops the partial start.
            self.stop()
            raise
        if not is_ready or self._error is not None:
            self.stop()
            if isinstance(self._error, SGLangError):
                raise self._error
            raise ConfigurationError(
                f"The gateway cannot listen on {self._host}:{self._wanted}: "
                f"{self._error or 'it took too long'}."
            ) from self._error

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._task = asyncio.current_task()
        self._loop.set_exception_handler(LoopErrors())
        app = self._make_app()
        runner = web.AppRunner(
            app,
            # A disconnect of the client frees the server.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
        )
        try:
            await runner.setup()
            site = BoundedSite(runner, self._host, self._wanted, app[STRANGERS])
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._end.wait()
        except asyncio.CancelledError:
            # It was stopped while it started.
            pass
        except Exception as error:  # noqa: BLE001 - start() raises it.
            self._error = error
            self._ready.set()
        finally:
            await runner.cleanup()
            self.port = 0

    def stop(self) -> None:
        """Stops the endpoint, and waits until it does not listen."""
        if self._thread is None or self._loop is None:
            return
        if self._thread.is_alive():
            with suppress(RuntimeError):
                # It has just ended.
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(10.0)

    def _stop(self) -> None:
        """Ends the application, or its start."""
        assert self._end is not None
        assert self._task is not None
        self._end.set()
        if not self._ready.is_set():
            self._task.cancel()
