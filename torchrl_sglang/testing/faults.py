"""A proxy in front of a server that breaks the requests it is told to break.

It forwards everything else, so that a test can show what becomes of an engine, of a
trainer and of the weights when a call is refused, delayed, or cut off before or after
the server has processed it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

__all__ = ["Fault", "FaultyProxy", "Injection"]

Fault: TypeAlias = Literal["refuse", "fail", "stall", "late", "cut", "lose"]
"""How a request is broken:

- ``"refuse"``: the response is HTTP 400, and the server never sees the request;
- ``"fail"``: the same with HTTP 500;
- ``"stall"``: no response until the client gives up; the server never sees the request;
- ``"late"``: the server processes it; no response until the client gives up;
- ``"cut"``: the connection breaks; the server never sees the request;
- ``"lose"``: the server processes it; the connection breaks before its response.
"""

FORWARD_SECONDS = 600.0
POLL_SECONDS = 0.05
STATUS = {"refuse": 400, "fail": 500}
SEEN_BY_SERVER = ("late", "lose")
HOP_HEADERS = {"connection", "content-length", "host", "transfer-encoding"}


@dataclass(kw_only=True)
class Injection:
    """One fault of a proxy."""

    path: str
    """Path of the requests."""
    fault: Fault | Callable[[], object]
    """How they are broken, or what is called before they are forwarded."""
    first: int
    """The first request that is broken, counted from 1."""
    times: int
    """How many requests in a row are broken."""
    happened: threading.Event = field(default_factory=threading.Event)
    """Set when the first of them has arrived."""
    seen: int = 0
    """How many requests for this path have arrived since."""

    def matches(self) -> bool:
        """Counts a request for its path; returns whether it is to be broken."""
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


class FaultyProxy:
    """Forwards requests to a server, and breaks those that it is told to break.

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
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._injections: list[Injection] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.counts: Counter[str] = Counter()
        """How many requests have arrived for each path."""
        self.refusal = "This fault was injected."
        """The message of refused and failed responses."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(POLL_SECONDS,),
            name="torchrl_sglang-faulty-proxy",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the proxy, to use instead of the server's."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

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
            fault: how they are broken, or a function that a thread of the proxy calls
                before it forwards each of them.
            first: the first of them that is broken; 1 for the next one.
            times: how many in a row are broken.

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
        with self._lock:
            self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """Removes all faults; stalled requests stay so until their client leaves."""
        with self._lock:
            self._injections.clear()

    def close(self) -> None:
        """Closes the proxy and its connections. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next(self, path: str) -> Fault | Callable[[], object] | None:
        with self._lock:
            self.counts[path] += 1
            found = [i for i in self._injections if i.path == path and i.matches()]
        for injection in found:
            injection.happened.set()
        return found[0].fault if found else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # Its threads may wait for a server.

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: connections are meant to break here."""


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments: Any) -> None:
        """Prints nothing."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner._next(urlsplit(self.path).path)
        if isinstance(fault, str):
            self._break(fault, body)
            return
        if fault is not None:
            fault()
        response = self._forward_request(body)
        if response is None:
            self._hang_up()
        else:
            self._respond(*response)

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - The names of http.server.

    def _break(self, fault: Fault, body: bytes) -> None:
        if fault in STATUS:
            text = json.dumps({"error": {"message": self.owner.refusal}})
            self._respond(STATUS[fault], "application/json", text.encode())
            return
        if fault in SEEN_BY_SERVER:
            self._forward_request(body)
        if fault in ("stall", "late"):
            self._wait_for_client()
        self._hang_up()

    def _forward_request(self, body: bytes) -> tuple[int, str, bytes] | None:
        """Returns the server's status, content type and body; None if it hung up."""
        target = http.client.HTTPConnection(
            *self.owner._target, timeout=FORWARD_SECONDS
        )
        headers = {
            k: v for k, v in self.headers.items() if k.lower() not in HOP_HEADERS
        }
        hang_ups = (OSError, http.client.HTTPException)
        with contextlib.suppress(*hang_ups), contextlib.closing(target):
            target.request(self.command, self.path, body, headers)
            response = target.getresponse()
            kind = response.headers.get("Content-Type", "application/json")
            return response.status, kind, response.read()
        return None

    def _respond(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _wait_for_client(self) -> None:
        while not self.owner._closed.is_set():
            if select.select([self.connection], [], [], POLL_SECONDS)[0]:
                return

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):  # The client may have done so first.
            self.connection.shutdown(socket.SHUT_RDWR)
