"""HTTP to SGLang: pooled connections, time budgets, and the one border for errors.

Everything that leaves this file is an answer (status and body) or an error of
:mod:`torchrl_sglang.errors`; no aiohttp exception passes it.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import io
import os
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

from torchrl_sglang.backends.support.checks import check_seconds
from torchrl_sglang.backends.support.event_loop import submit
from torchrl_sglang.backends.support.open_files import (
    lacks_open_files,
    open_files_limit,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)

__all__ = ["Answer", "HttpClient"]

KEEPALIVE_SECONDS = 3.0
"""Idle connections are let go after this; SGLang's uvicorn closes them after 5 s."""

CONNECT_TIMEOUT_SECONDS = 10.0
"""A server that does not accept a connection within this is taken for unreachable."""

NO_FILE_SECONDS = 0.05
"""How soon a request that found no file for its connection is tried again."""

EXIT_SECONDS = 2.0
"""Budget for connections to close when the interpreter exits."""

_CLOSING: collections.deque[concurrent.futures.Future[None]] = collections.deque(
    maxlen=64
)
"""The latest sessions that are being closed."""

STREAMED_BODY_BYTES = 1 << 20
"""A larger body is written in pieces, so that other requests get their turn between."""

EVENT_END = b"\n\n"
"""Ends each of the events that a server sends one after the other."""

LAST_EVENT = b"[DONE]"
"""What the last of them holds."""

ERROR_BODY_CHARACTERS = 2000
"""How much of an error's body a message quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server answered: the status and the raw body."""

    url: str
    """Server and path that answered."""
    status: int
    """HTTP status."""
    body: bytes
    """Body as received."""

    @property
    def ok(self) -> bool:
        """Whether the status is a success (2xx)."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Returns the decoded body.

        Raises:
            ServerUnavailableError: if the body is not JSON.
        """
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            raise ServerUnavailableError(
                f"{self.url} answered {self.status} with a body that is not JSON: "
                f"{self.body[:200]!r}. Is it an SGLang server?",
                status=self.status,
            ) from None

    def error_text(self) -> str:
        """Returns the message of an error answer, in whichever form it came."""
        text = self.body.decode("utf-8", "replace")[:ERROR_BODY_CHARACTERS].strip()
        try:
            content = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return text
        if isinstance(content, dict):
            inner = content.get("error", content)
            if isinstance(inner, dict):
                for name in ("message", "detail", "error_message"):
                    if inner.get(name):
                        return str(inner[name])[:ERROR_BODY_CHARACTERS]
            if isinstance(inner, str):
                return inner[:ERROR_BODY_CHARACTERS]
        return text

    def raise_for_status(self) -> Answer:
        """Returns itself if the status is a success.

        Raises:
            RequestRefusedError: for a status from 400 to 499.
            ServerUnavailableError: for any other failure.
        """
        if self.ok:
            return self
        if 400 <= self.status < 500:
            raise RequestRefusedError(
                f"{self.url} refused the request (HTTP {self.status}): "
                f"{self.error_text()}",
                status=self.status,
            )
        raise _transient(
            f"{self.url} failed (HTTP {self.status}): {self.error_text()}", self.status
        )


class _NoFileError(Exception):
    """This process cannot open one more file."""


def _transient(message: str, status: int | None = None) -> ServerUnavailableError:
    return ServerUnavailableError(message, transient=True, status=status)


class HttpClient:
    """A pool of connections, used from the background loop only.

    It pickles to its settings: the pool belongs to the process that opened it.

    Args:
        api_key: sent as a bearer token; never shown.
        credentials: server's address -> ``Authorization`` header, for those that were
            given with a user and a password; never shown.
    """

    def __init__(
        self,
        api_key: str | None = None,
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        self._api_key = api_key
        self._credentials = dict(credentials or {})
        self._session: aiohttp.ClientSession | None = None
        self._session_pid: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_session_pid": None}

    def _get_session(self) -> aiohttp.ClientSession:
        # A forked child must not touch its parent's sockets, so it opens its own.
        if (
            self._session is None
            or self._session.closed
            or self._session_pid != os.getpid()
        ):
            headers = {"Content-Type": "application/json"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=KEEPALIVE_SECONDS
                ),
                headers=headers,
                auto_decompress=True,
                trust_env=False,
            )
            self._session_pid = os.getpid()
            # The registry of finalizers keeps the session alive for its own close, also
            # when the client is collected together with it or the interpreter exits.
            weakref.finalize(self, _close_session, self._session, os.getpid())
        return self._session

    async def request(
        self,
        method: Literal["GET", "POST", "DELETE"],
        url: str,
        payload: Any = None,
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends one request and reads the whole answer, whatever its status.

        Args:
            method: HTTP method.
            url: full address.
            payload: content of the body, encoded as JSON; ``None`` for no body.
            timeout: budget for the whole exchange, in seconds.
            headers: to send beside the usual ones.

        Raises:
            ConfigurationError: if the payload or the budget makes no sense.
            ServerTimeoutError: if the budget is used up, also by waiting until this
                process has a file left for a connection.
            ServerUnavailableError: if the server cannot be reached or hangs up.
        """
        async with self._answered(method, url, payload, timeout, headers) as response:
            return Answer(url=url, status=response.status, body=await response.read())

    async def events(
        self,
        url: str,
        payload: Any,
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Posts a request and yields each server-sent event of the answer, decoded.

        Args:
            url: full address.
            payload: content of the body, encoded as JSON.
            timeout: budget for the whole exchange, in seconds.
            headers: to send beside the usual ones.

        Raises:
            RequestRefusedError: for a status from 400 to 499.
            ServerUnavailableError: as :meth:`request` and :meth:`Answer.json` do, and
                if the events end without the one that says that they are complete.
            ServerTimeoutError: if the budget is used up.
        """
        async with self._answered("POST", url, payload, timeout, headers) as response:
            if not 200 <= response.status < 300:
                body = await response.read()
                Answer(url=url, status=response.status, body=body).raise_for_status()
            rest = bytearray()
            async for chunk in response.content.iter_any():
                rest += chunk
                *whole, rest = rest.split(EVENT_END)
                for event in whole:
                    content = bytes(event).removeprefix(b"data:").strip()
                    if content == LAST_EVENT:
                        return
                    answer = Answer(url=url, status=response.status, body=content)
                    yield answer.json()
            raise _transient(
                f"{url} stopped in the middle of its answer: {bytes(rest[:200])!r}.",
                response.status,
            )

    @asynccontextmanager
    async def _answered(
        self,
        method: str,
        url: str,
        payload: Any,
        timeout: float,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request and yields the answer, of which the head has been read."""
        check_seconds("timeout", timeout)
        try:
            data = None if payload is None else orjson.dumps(payload)
        except orjson.JSONEncodeError as error:
            raise ConfigurationError(
                f"What was to be sent to {url} has no form in JSON: {error}."
            ) from None
        deadline = time.monotonic() + timeout
        headers = {**self._login(url), **(headers or {})}
        stack = AsyncExitStack()
        while True:
            try:
                left = max(deadline - time.monotonic(), 1e-3)
                sent = self._exchange(method, url, data, headers, left, timeout)
                response = await stack.enter_async_context(sent)
                break
            except _NoFileError:
                if time.monotonic() + NO_FILE_SECONDS > deadline:
                    raise ServerTimeoutError(
                        f"{method} {url} was not sent within {timeout:.3g} s: this "
                        f"process has too many files open for one more connection "
                        f"({open_files_limit()} are allowed). Raise the limit "
                        f"(ulimit -n), or lower max_in_flight."
                    ) from None
                # Nothing was sent. Connections become free as others are answered.
                await asyncio.sleep(NO_FILE_SECONDS)
        async with stack:
            yield response

    def _login(self, url: str) -> dict[str, str]:
        for server, header in self._credentials.items():
            if url == server or url.startswith(f"{server}/"):
                return {"Authorization": header}
        return {}

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str],
        left: float,
        timeout: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request once; errors of aiohttp leave as those of this package.

        Raises:
            _NoFileError: if there is no file left for a connection.
        """
        # aiohttp writes bytes in one go, and a buffer in pieces.
        body = io.BytesIO(data) if data and len(data) > STREAMED_BODY_BYTES else data
        budget = aiohttp.ClientTimeout(
            total=left, sock_connect=min(left, CONNECT_TIMEOUT_SECONDS)
        )
        status = None
        try:
            async with self._get_session().request(
                method, url, data=body, timeout=budget, headers=headers
            ) as response:
                status = response.status
                yield response
        except SGLangError:
            # Some of them are errors of the kinds below, too.
            raise
        except aiohttp.ConnectionTimeoutError:
            raise _transient(
                f"{method} {url} failed: no connection within "
                f"{budget.sock_connect:g} s. Check that the server is running and that "
                f"the address is right."
            ) from None
        except TimeoutError:
            raise ServerTimeoutError(
                f"{method} {url} had no answer within "
                f"{round(timeout, 1) or timeout:g} s."
            ) from None
        # A host name that is none is a UnicodeError, a bad header a ValueError.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and lacks_open_files(
                error
            ):
                raise _NoFileError from None
            raise _transient(
                f"{method} {url} failed: {type(error).__name__}: {error}. Check that "
                f"the server is running and that the address is right.",
                status,
            ) from None

    async def close(self) -> None:
        """Closes the pool; the next request opens a new one."""
        session, self._session = self._session, None
        if session is not None and self._session_pid == os.getpid():
            await session.close()


def _close_session(session: aiohttp.ClientSession, pid: int) -> None:
    """Closes what a client left open; never waits, for it may run anywhere."""
    if pid == os.getpid() and not session.closed:
        _CLOSING.append(submit(session.close()))


@atexit.register
def _wait_for_closing() -> None:
    concurrent.futures.wait(_CLOSING, EXIT_SECONDS)
