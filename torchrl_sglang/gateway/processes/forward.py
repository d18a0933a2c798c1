"""Hands requests to the process of a gateway that serves them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

import aiohttp
from aiohttp import web

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.support.log import torchrl_logger

FORWARDED = "x-torchrl-sglang-forwarded"
"""Header of a request that another process has handed on; it is not handed back."""

CONNECT_SECONDS = 10.0

_OWN_HEADERS = frozenset(
    {
        *("connection", "content-encoding", "content-length", "expect", "keep-alive"),
        *("proxy-authenticate", "proxy-authorization", "trailer"),
        *("transfer-encoding", "upgrade"),
    }
)
"""Headers that are of one connection, or of how a body is sent in it."""


class Forwarder:
    """Hands requests on, and their answers back, as they come.

    Args:
        client: connections to other processes.
    """

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """Yields one, and closes its connections afterwards."""
        # A response takes as long as its own process lets it.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=limits,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as client:
            yield cls(client)

    async def send(self, request: web.Request, url: str) -> web.StreamResponse:
        """Returns the answer of another process, which has been sent to the client.

        Args:
            request: of a client; it is cancelled there when the client hangs up.
            url: of the other process.

        Raises:
            GatewayError: if the other process has ended.
        """
        headers = [*_passed(request.headers), (FORWARDED, "1")]
        response: web.StreamResponse | None = None
        try:
            async with self._client.request(
                request.method,
                f"{url}{request.rel_url.raw_path_qs}",
                data=await request.read(),
                headers=headers,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers=_passed(answer.headers)
                )
                if answer.content_length is not None:
                    response.content_length = answer.content_length
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            if response is None or not response.prepared:
                raise GatewayError(
                    f"The process of the gateway that serves this ended: {error}. Ask "
                    f"again.",
                    status=503,
                ) from error
            torchrl_logger.debug(f"A process ended in the middle of an answer: {error}")
            # The client must not take what it has for the whole answer.
            if request.transport is not None:
                request.transport.abort()
            return response


def _passed(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the headers that are passed on."""
    return [each for each in headers.items() if each[0].lower() not in _OWN_HEADERS]
