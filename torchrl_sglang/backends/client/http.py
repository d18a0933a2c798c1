"""HTTP to SGLang: pooled connections, timeouts and the mapping of errors.

The only HTTP client of the package. Callers get a :class:`HttpResponse` or an error of
:mod:`torchrl_sglang.errors`, never an exception of aiohttp.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import errno
import io
import math
import os
import resource
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.support.checks import check_seconds
from torchrl_sglang.support.event_loop import run_sync, submit
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.texts import check_text

NO_FILE_SECONDS = 0.05
"""Delay before the retry of a request without a free file for its connection."""

STREAMED_BODY_BYTES = 1 << 20
"""A larger body is written in pieces, with other requests sent in between."""

OPEN_ROUTES = frozenset(
    {
        *("generate", "model_info", "server_info", "get_model_info", "get_server_info"),
        *("get_load", "openapi.json", "parse_function_call", "separate_reasoning"),
        *("health", "health_generate", "ready", "metrics", "workers"),
    }
)
"""Routes, beside those below ``/v1``, which accept the ``api_key`` even if there is an
``admin_api_key`` (``auth_level`` in ``sglang/srt/entrypoints/http_server.py``)."""

DENIED = (401, 403)
"""Statuses of a wrong or a missing key."""

EVENT_END = b"\n\n"
LAST_EVENT = b"[DONE]"
NOT_JSON = (ValueError, RecursionError)
"""Errors of decoding a body other than JSON."""

ERROR_BODY_CHARACTERS = 2000
"""Quoted characters of an error's body in a message."""

_CLOSING = collections.deque[concurrent.futures.Future[None]](maxlen=64)

Method = Literal["GET", "POST", "PUT", "DELETE"]
T = TypeVar("T")

OTHER_FILES = 256
"""Open files besides generation requests: control calls, aborts, libraries,
checkpoints, idle connections."""

FEWEST_IN_FLIGHT = 16
"""Least number of requests in flight, despite a low limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpResponse:
    """The status and the raw body of a server's response."""

    url: str
    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is a success (2xx)."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Returns the decoded body."""
        try:
            return msgspec.json.decode(self.body)
        except NOT_JSON:
            raise ServerUnavailableError(
                f"{self.url} answered {self.status} with a body that is not JSON: "
                f"{self.body[:200]!r}. Is it an SGLang server?",
                status=self.status,
            ) from None

    def error_text(self) -> str:
        """Returns the message of an error response, in any of SGLang's formats."""
        text = self.body.decode("utf-8", "replace").strip()
        try:
            content = msgspec.json.decode(self.body)
        except NOT_JSON:
            content = text
        inner = content.get("error", content) if isinstance(content, dict) else text
        if isinstance(inner, dict):
            named = (inner.get(name) for name in ("message", "detail", "error_message"))
            inner = next(filter(None, named), text)
        return str(inner or text)[:ERROR_BODY_CHARACTERS]

    def raise_for_status(self) -> HttpResponse:
        """Returns itself, or raises for 4xx (refused) and for other failures.

        A wrong key is no refusal, which some callers take for a server's answer.
        """
        if self.ok:
            return self
        status = self.status
        if status in DENIED:
            raise ConfigurationError(
                f"{self.url} asks for a key (HTTP {status}: {self.error_text()}); give "
                f"the server's as api_key=..., and if it has one for updates, aborts "
                f"and other control calls, that as admin_api_key=..."
            )
        if 400 <= status < 500:
            raise RequestRefusedError(
                f"{self.url} refused the request (HTTP {status}): {self.error_text()}",
                status=status,
            )
        raise ServerUnavailableError(
            f"{self.url} failed (HTTP {status}): {self.error_text()}",
            transient=True,
            status=status,
        )


def encode(payload: Any) -> bytes:
    """Returns a payload as JSON, for sharing between requests."""
    try:
        return msgspec.json.encode(payload)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, UnicodeEncodeError):
            check_text("A request", payload)
        raise ConfigurationError(
            f"A request cannot be encoded as JSON: {error}."
        ) from None


class HttpClient:
    """A connection pool for the background loop; pickles to its settings.

    ``credentials``: server's address -> ``Authorization`` header. No key is shown.
    ``admin_api_key``: for control calls, by default ``api_key``.
    """

    def __init__(
        self,
        api_key: str | None = None,
        credentials: Mapping[str, str] | None = None,
        *,
        admin_api_key: str | None = None,
    ) -> None:
        self.api_key = api_key
        self._admin_api_key = admin_api_key
        self._credentials = dict(credentials or {})
        self._session: aiohttp.ClientSession | None = None
        self._session_pid: int | None = None
        # Of each request in flight: its address, and when it began.
        self._in_flight: dict[asyncio.Timeout, tuple[str, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        reset: dict[str, Any] = {"_session": None, "_session_pid": None}
        return {**self.__dict__, **reset, "_in_flight": {}}

    def _get_session(self) -> aiohttp.ClientSession:
        # A forked child must not touch its parent's sockets, so it opens its own.
        is_own = self._session_pid == os.getpid()
        if self._session is None or self._session.closed or not is_own:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    # SGLang's uvicorn closes idle connections after 5 s.
                    keepalive_timeout=3.0,
                    socket_factory=make_socket,
                ),
                headers={"Content-Type": "application/json"},
            )
            self._session_pid = os.getpid()
            self._in_flight = {} if not is_own else self._in_flight
            # The finalizer keeps the session alive until it is closed, also when it is
            # collected with the client or the interpreter exits.
            weakref.finalize(self, _close_session, self._session, os.getpid())
        return self._session

    async def request(
        self,
        method: Method,
        url: str,
        payload: Any = None,
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Sends a request with a JSON body and reads the response, of any status."""

        async def read(response: aiohttp.ClientResponse) -> HttpResponse:
            return HttpResponse(
                url=url, status=response.status, body=await response.read()
            )

        headers = headers or {}
        answer = await self._send(method, url, payload, timeout, headers, read)
        if answer.status in DENIED and self.api_key and self._admin_api_key:
            # Generations of SGLang differ in which key a route takes.
            other = {"Authorization": f"Bearer {self.api_key}", **headers}
            return await self._send(method, url, payload, timeout, other, read)
        return answer

    async def stream(
        self,
        url: str,
        payload: Any,
        on_event: Callable[[HttpResponse], None],
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Calls a function with each event of a stream; raises if it does not end."""

        async def read(response: aiohttp.ClientResponse) -> None:
            status = response.status
            if not 200 <= status < 300:
                body = await response.read()
                HttpResponse(url=url, status=status, body=body).raise_for_status()
            buffer, searched = bytearray(), 0
            async for chunk in response.content.iter_any():
                buffer += chunk
                # An event can be as long as thousands of chunks.
                while (end := buffer.find(EVENT_END, searched)) >= 0:
                    content = bytes(buffer[:end]).removeprefix(b"data:").strip()
                    if content == LAST_EVENT:
                        # The connection is reusable after the end of the body.
                        with suppress(aiohttp.ClientError, TimeoutError):
                            async with asyncio.timeout(1.0):
                                await response.read()
                        return
                    on_event(HttpResponse(url=url, status=status, body=content))
                    del buffer[: end + len(EVENT_END)]
                    searched = 0
                searched = max(len(buffer) - len(EVENT_END) + 1, 0)
            raise ServerUnavailableError(
                f"{url} stopped in the middle of its answer: {bytes(buffer[:200])!r}.",
                transient=True,
                status=status,
            )

        await self._send("POST", url, payload, timeout, headers or {}, read)

    async def _send(
        self,
        method: Method,
        url: str,
        payload: Any,
        timeout: float,
        headers: Mapping[str, str],
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T:
        """Sends a request and reads its response; maps aiohttp's errors."""
        check_seconds("timeout", timeout)
        if payload is None or isinstance(payload, bytes):
            data = payload
        else:
            data = encode(payload)
        deadline = time.monotonic() + timeout
        headers = {**self.login_of(url), **headers}
        status = None
        while True:
            remaining = max(deadline - time.monotonic(), 1e-3)
            limits = aiohttp.ClientTimeout(
                total=remaining, sock_connect=min(remaining, 10.0)
            )
            # aiohttp writes bytes at once, and a buffer in pieces.
            large = data is not None and len(data) > STREAMED_BODY_BYTES
            body = io.BytesIO(data) if data is not None and large else data
            session, given_up = self._get_session(), asyncio.timeout(None)
            try:
                async with given_up:
                    self._in_flight[given_up] = url, time.monotonic()
                    async with session.request(
                        method, url, data=body, timeout=limits, headers=headers
                    ) as response:
                        status = response.status
                        return await read(response)
            except SGLangError:
                # Some of them are also built-in errors of the kinds below.
                raise
            except aiohttp.ConnectionTimeoutError:
                raise ServerUnavailableError(
                    f"{method} {url} failed: no connection within "
                    f"{limits.sock_connect:g} s. Check that the server is running and "
                    f"that the address is right.",
                    transient=True,
                ) from None
            except TimeoutError:
                if given_up.expired():
                    raise ServerUnavailableError(
                        f"{method} {url} failed: the server is gone.", transient=True
                    ) from None
                raise ServerTimeoutError(
                    f"{method} {url} had no answer within "
                    f"{round(timeout, 1) or timeout:g} s."
                ) from None
            # An invalid host name is a UnicodeError, a bad header a ValueError.
            except (aiohttp.ClientError, OSError, ValueError) as error:
                connecting = isinstance(error, aiohttp.ClientConnectorError)
                if not (connecting and lacks_open_files(error)):
                    raise ServerUnavailableError(
                        f"{method} {url} failed: {type(error).__name__}: {error}. "
                        f"Check that the server is running and that the address is "
                        f"right.",
                        transient=True,
                        status=status,
                    ) from None
            finally:
                self._in_flight.pop(given_up, None)
                # The future holds the task, which holds an error, which holds this
                # frame.
                del given_up
            if time.monotonic() + NO_FILE_SECONDS > deadline:
                raise ServerTimeoutError(
                    f"{method} {url} was not sent within {timeout:.3g} s: this process "
                    f"has too many files open for one more connection "
                    f"({open_files_limit()} are allowed). Raise the limit (ulimit -n), "
                    f"or lower max_in_flight."
                )
            # Nothing was sent. Connections become free when others end.
            await asyncio.sleep(NO_FILE_SECONDS)

    def login_of(self, url: str) -> dict[str, str]:
        """Returns the authorization header of a request to a URL."""
        place = url if self._credentials else ""
        while place:
            if place in self._credentials:
                return {"Authorization": self._credentials[place]}
            # An address may have a path, which is a prefix of the request's.
            place = place.rpartition("/")[0]
        path = url.partition("?")[0]
        is_open = "/v1/" in path or path.rpartition("/")[2] in OPEN_ROUTES
        key = None if is_open else self._admin_api_key
        key = self.api_key if key is None else key
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def give_up(self, server: str, *, before: float = math.inf) -> None:
        """Fails the requests to a server begun ``before``, as if it hung up.

        A dead machine closes no connection. Call it on the background loop.
        """
        now = asyncio.get_running_loop().time()
        for request, (url, begun) in self._in_flight.items():
            is_target = begun < before and url.startswith(f"{server}/")
            if is_target and not request.expired():
                request.reschedule(now)

    async def close(self) -> None:
        """Closes the pool; the next request opens a new pool."""
        session, self._session = self._session, None
        if session is not None and self._session_pid == os.getpid():
            await session.close()


def make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Returns a socket whose connection breaks when the remote machine is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A machine without acknowledgements is gone: after 10 s without a packet the kernel
    # sends five probes, every 3 s. Busy and stopped servers acknowledge them, and links
    # that come back within 20 s.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    return made


def get(
    url: str, *, timeout: float, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Sends a GET request and waits for it, in threads watching a server's start."""

    async def ask() -> HttpResponse:
        http = HttpClient()
        try:
            return await http.request("GET", url, timeout=timeout, headers=headers)
        finally:
            await http.close()

    return run_sync(ask())


def _close_session(session: aiohttp.ClientSession, pid: int) -> None:
    """Closes the session of a collected client without waiting."""
    if pid == os.getpid() and not session.closed:
        _CLOSING.append(submit(session.close()))


@atexit.register
def _wait_for_closing() -> None:
    concurrent.futures.wait(_CLOSING, 2.0)


def open_files_limit() -> int:
    """Returns the limit of open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def limit_in_flight(wanted: int, servers: int = 1) -> int:
    """Returns the possible number of requests in flight; raises the limit if necessary.

    After a call to all servers, the connection to each is open for a while.
    """
    other_files = _count_open_files() + OTHER_FILES + servers
    needed = other_files + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = min(wanted, max(soft - other_files, FEWEST_IN_FLIGHT))
    if allowed < wanted:
        torchrl_logger.warning(
            f"This process may have {soft} files open (ulimit -Hn), so {allowed} "
            f"requests of an engine are in flight at once, and not "
            f"max_in_flight={wanted}."
        )
    return allowed


def lacks_open_files(error: BaseException) -> bool:
    """Returns whether a call failed for lack of open files."""
    if _is_lack(error):
        return True
    # Resolving a host name fails without an errno.
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as failure:
        return _is_lack(failure)
    return False


def _is_lack(error: BaseException) -> bool:
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def _count_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
