"""A proxy in front of a server, to break selected requests.

It forwards everything else, so that a test can show the effect on an engine, on a
trainer and on the weights when a call is refused, delayed, or cut off before or after
the server has processed it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, get_args

import aiohttp
from aiohttp import web
from yarl import URL

from torchrl_sglang.support.event_loop import run_sync

__all__ = ["Fault", "FaultyProxy", "Injection"]

Fault: TypeAlias = Literal["refuse", "fail", "stall", "late", "cut", "lose"]
"""Kinds of broken requests:

- ``"refuse"``: the response is HTTP 400, and the server never sees the request;
- ``"fail"``: the same with HTTP 500;
- ``"stall"``: no response until the client gives up; the server never sees the request;
- ``"late"``: the server processes it; no response until the client gives up;
- ``"cut"``: the connection breaks; the server never sees the request;
- ``"lose"``: the server processes it; the connection breaks before its response.
"""

STATUS = {"refuse": 400, "fail": 500}
HOP_HEADERS = {"connection", "content-length", "host", "transfer-encoding"}


@dataclass(kw_only=True)
class Injection:
    """A fault of a proxy."""

    path: str
    """Path of the requests."""
    fault: Fault | Callable[[], object]
    """Fault of the requests, or a function to call before they are forwarded."""
    first: int
    """The first broken request, counted from 1."""
    times: int
    """Number of consecutive broken requests."""
    happened: threading.Event = field(default_factory=threading.Event)
    """Set when the first of them has arrived."""
    seen: int = 0
    """Number of requests for this path since."""


class FaultyProxy:
    """Forwards requests to a server, and breaks selected requests.

    Args:
        target: address of the server.

    Examples:
        >>> from torchrl_sglang.errors import RequestRefusedError
        >>> from torchrl_sglang.testing.faults import FaultyProxy
        >>> with FaultyProxy(engine.server_url) as proxy:
        ...     with AsyncSGLang.connect(proxy.url) as through:
        ...         fault = proxy.inject("/generate", "refuse")
        ...         try:
        ...             through.generate(input_ids=[5, 6])
        ...         except RequestRefusedError:
        ...             print(fault.happened.is_set())
        True
    """

    def __init__(self, target: str) -> None:
        self.counts: Counter[str] = Counter()
        """Number of requests for each path."""
        self.refusal = "This fault was injected."
        """The message of refused and failed responses."""
        self._target = URL(target).origin()
        self._injections: list[Injection] = []
        self._runner: web.AppRunner | None = run_sync(self._start())
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        """Address of the proxy, to use instead of the server's."""

    def inject(
        self,
        path: str,
        fault: Fault | Callable[[], object],
        *,
        first: int = 1,
        times: int = 1,
    ) -> Injection:
        """Breaks requests from now on.

        Args:
            path: path of the requests, such as ``"/end_weight_update"``.
            fault (str | Callable): kind of the fault, a name in ``Fault``, or a
                function called in another thread before each request is forwarded.
            first: the first broken request; 1 for the next request.
            times: number of consecutive broken requests.

        Returns:
            The injection; its ``happened`` is set when the first request arrives.

        Raises:
            ValueError: if there is no such fault.
        """
        if not callable(fault) and fault not in get_args(Fault):
            raise ValueError(
                f"fault must be one of {', '.join(get_args(Fault))} or a function, "
                f"got {fault!r}."
            )
        injection = Injection(path=path, fault=fault, first=first, times=times)
        self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """Removes all faults; stalled requests remain so until their client leaves."""
        self._injections.clear()

    def close(self) -> None:
        """Closes the proxy and its connections. Safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            run_sync(runner.cleanup())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        fault = self._next(request.path)
        if isinstance(fault, str) and fault in STATUS:
            error = {"error": {"message": self.refusal}}
            return web.json_response(error, status=STATUS[fault])
        if callable(fault):
            await asyncio.to_thread(fault)
        response = None
        if fault not in ("stall", "cut"):
            response = await self._forward(request, body)
        while fault in ("stall", "late") and request.transport:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # aiohttp has no event for it.
        if request.transport and (response is None or isinstance(fault, str)):
            request.transport.close()
        return response or web.Response()

    def _next(self, path: str) -> Fault | Callable[[], object] | None:
        """Counts a request; returns its fault."""
        self.counts[path] += 1
        faults = []
        for injection in [c for c in self._injections if c.path == path]:
            injection.seen += 1
            if 0 <= injection.seen - injection.first < injection.times:
                injection.happened.set()
                faults.append(injection.fault)
        return faults[0] if faults else None

    async def _forward(self, request: web.Request, body: bytes) -> web.Response | None:
        """Returns the server's response; None if it hung up."""
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS
        }
        url = self._target.join(URL(request.raw_path, encoded=True))
        timeout = aiohttp.ClientTimeout(total=600.0)
        options: Any = {"data": body or None, "headers": headers, "timeout": timeout}
        try:
            async with aiohttp.request(request.method, url, **options) as response:
                content = await response.read()
                kind = {"Content-Type": response.headers.get("Content-Type", "")}
                return web.Response(body=content, status=response.status, headers=kind)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
