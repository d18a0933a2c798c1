"""A server that fails when it is told to: a proxy in front of a real one.

Between an engine and its server, it passes everything on but the requests that it was
told to break. So it can be tested what becomes of an engine, of a trainer and of the
weights when a call is refused, is late, or is cut off before or after the server did
what it was asked.
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
"""What becomes of a request:

- ``"refuse"``: the answer is HTTP 400; the server has not seen it;
- ``"fail"``: the same with HTTP 500;
- ``"stall"``: there is no answer until the client gives up; the server has not seen it;
- ``"late"``: the server has done it; there is no answer until the client gives up;
- ``"cut"``: the connection breaks; the server has not seen it;
- ``"lose"``: the server has done it; the connection breaks before its answer.
"""

FORWARD_SECONDS = 600.0
"""Budget for the server to answer."""

LOOK_SECONDS = 0.05
"""How often a proxy that waits for a client looks whether it is closed itself."""

_STATUS = {"refuse": 400, "fail": 500}
_SEEN_BY_SERVER = ("late", "lose")
_NOT_PASSED_ON = {"connection", "content-length", "host", "transfer-encoding"}


@dataclass(kw_only=True)
class Injection:
    """One fault that a proxy was told of."""

    path: str
    """Path whose requests it is about."""
    fault: Fault | Callable[[], object]
    """What becomes of them, or what is called before they are passed on."""
    first: int
    """The first of these requests that it meets, from now on; counts from 1."""
    times: int
    """How many one after the other it meets."""
    happened: threading.Event = field(default_factory=threading.Event)
    """Set when the first of them has come."""
    seen: int = 0
    """How many requests for this path have come since."""

    def meets(self) -> bool:
        """Counts a request for its path, and tells whether it is to be broken."""
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


class FaultyProxy:
    """Passes requests on to a server, and breaks those that it is told to.

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
        """How many requests have come for each path."""
        self.refusal = "This fault was injected."
        """What the answer to a request says that is refused or fails."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(LOOK_SECONDS,),
            name="torchrl_sglang-faulty-proxy",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the proxy, to be used instead of the server's."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def inject(
        self,
        path: str,
        fault: Fault | Callable[[], object],
        *,
        first: int = 1,
        times: int = 1,
    ) -> Injection:
        """Has requests broken.

        Args:
            path: of these requests, such as ``"/end_weight_update"``.
            fault: what becomes of them; or what is called, on a thread of the proxy,
                before each is passed on.
            first: the first of them that it meets, from now on; 1 for the next one.
            times: how many one after the other it meets.

        Returns:
            The fault; its ``happened`` is set when the first such request has come.

        Raises:
            ValueError: if there is no such fault.
        """
        if not callable(fault) and fault not in get_args(Fault):
            raise ValueError(
                f"fault={fault!r} is not one of {', '.join(get_args(Fault))}, nor can "
                f"it be called."
            )
        injection = Injection(path=path, fault=fault, first=first, times=times)
        with self._lock:
            self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """Forgets every fault; what is stalled stays so until its client gives up."""
        with self._lock:
            self._injections.clear()

    def close(self) -> None:
        """Ends the proxy and its connections. Safe to call twice."""
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
            found = [i for i in self._injections if i.path == path and i.meets()]
        for injection in found:
            injection.happened.set()
        return found[0].fault if found else None

    def _forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection(*self._target, timeout=FORWARD_SECONDS)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            kind = answer.headers.get("Content-Type", "application/json")
            return answer.status, kind, answer.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads that wait for a server must not be waited for.
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: connections are meant to break here."""


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner._next(urlsplit(self.path).path)
        if isinstance(fault, str):
            self._break(fault, body)
            return
        if fault is not None:
            fault()
        answer = self._pass_on(body)
        if answer is None:
            self._hang_up()
        else:
            self._answer(*answer)

    def _break(self, fault: Fault, body: bytes) -> None:
        if fault in _STATUS:
            text = json.dumps({"error": {"message": self.owner.refusal}})
            self._answer(_STATUS[fault], "application/json", text.encode())
            return
        if fault in _SEEN_BY_SERVER:
            self._pass_on(body)
        if fault in ("stall", "late"):
            self._wait_for_client_to_leave()
        self._hang_up()

    def _pass_on(self, body: bytes) -> tuple[int, str, bytes] | None:
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in _NOT_PASSED_ON
        }
        try:
            return self.owner._forward(self.command, self.path, body, headers)
        except (OSError, http.client.HTTPException):
            # The server hung up, and so does the proxy.
            return None

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _wait_for_client_to_leave(self) -> None:
        while not self.owner._closed.is_set():
            if select.select([self.connection], [], [], LOOK_SECONDS)[0]:
                return

    def _hang_up(self) -> None:
        self.close_connection = True
        # Unless the client did so first.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
