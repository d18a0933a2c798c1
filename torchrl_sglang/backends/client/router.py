"""The worker list of a router: its target servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torchrl_sglang.backends.client.http import HttpClient, HttpResponse, Method
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
)
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.urls import address_hint, split_credentials

WORKER_TIMEOUT_SECONDS = 45.0
"""Default timeout for a change of the worker list; a router gives up after 30 s."""


class RouterClient:
    """Reads and changes the worker list of a router, on the background loop."""

    def __init__(
        self, url: str, api_key: str | None = None, http: HttpClient | None = None
    ) -> None:
        self._url = url
        self._api_key = api_key
        self._http = http or HttpClient(api_key)

    async def workers(self, *, timeout: float = 10.0) -> list[tuple[str, bool]]:
        """Returns the router's servers, and whether each is in rotation."""
        entries = await self._list(timeout)
        return [(entry["url"], bool(entry["is_healthy"])) for entry in entries]

    async def add_worker(
        self, url: str, *, timeout: float = WORKER_TIMEOUT_SECONDS
    ) -> None:
        """Adds a server, and returns when it is in rotation."""
        url = check_worker_url(url)
        async with self._change(f"adding {url}", timeout):
            entry = await self._find(url)
            if entry is None:
                # The router does not use its own key for later added servers.
                key = {} if self._api_key is None else {"api_key": self._api_key}
                answer = await self._call("POST", "/workers", {"url": url, **key})
                entry = {"id": answer.raise_for_status().json()["worker_id"]}
            while not entry.get("is_healthy"):
                job = entry.get("job_status") or {}
                if job.get("status") == "failed":
                    raise ServerUnavailableError(
                        f"The router at {self._url} could not add {url}: "
                        f"{job.get('message')}"
                    )
                await asyncio.sleep(0.05)
                answer = await self._call("GET", f"/workers/{entry['id']}")
                # Between the two lists of the router, it is in neither for a moment.
                if answer.status != 404:
                    entry = answer.raise_for_status().json()

    async def remove_worker(
        self, url: str, *, timeout: float = WORKER_TIMEOUT_SECONDS
    ) -> None:
        """Removes a server, which finishes its requests; ignores an unknown server."""
        url = check_worker_url(url)
        async with self._change(f"removing {url}", timeout):
            entry = await self._find(url)
            if entry is None:
                return
            answer = await self._call("DELETE", f"/workers/{entry['id']}")
            if answer.status != 404:
                answer.raise_for_status()
            while entry is not None:
                await asyncio.sleep(0.05)
                entry = await self._find(url)

    @asynccontextmanager
    async def _change(self, name: str, timeout: float) -> AsyncIterator[None]:
        """Raises an error after ``timeout`` seconds, in requests or between them."""
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError as error:
            raise ServerTimeoutError(
                f"The router at {self._url} did not finish {name} in time."
            ) from error

    async def _find(self, url: str) -> dict[str, Any] | None:
        entries = await self._list()
        return next((entry for entry in entries if entry["url"] == url), None)

    async def _list(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        answer = await self._call("GET", "/workers", timeout=timeout)
        content = answer.raise_for_status().json()
        try:
            return list(content["workers"])
        except (KeyError, TypeError):
            raise ServerUnavailableError(
                f"{answer.url} answered {content!r:.200}, as no router does."
            ) from None

    async def _call(
        self,
        method: Method,
        path: str,
        payload: Any = None,
        *,
        timeout: float = WORKER_TIMEOUT_SECONDS,
    ) -> HttpResponse:
        return await self._http.request(
            method, f"{self._url}{path}", payload, timeout=timeout
        )


async def find_workers(http: HttpClient, url: str) -> list[str]:
    """Returns the servers in a router's rotation, and closes ``http``."""
    try:
        workers = await RouterClient(url, http=http).workers()
    except (RequestRefusedError, KeyError, TypeError) as error:
        raise ServerUnavailableError(
            f"{url} does not answer like a router of SGLang's ({error})."
            f"{address_hint(url)}"
        ) from error
    finally:
        await http.close()
    urls = [worker for worker, healthy in workers if healthy]
    if not urls:
        raise ConfigurationError(
            f"The router at {url} has no server in rotation: {workers!r:.300}. Add "
            f"servers to it, or give urls=[...]."
        )
    return urls


def check_worker_url(url: str) -> str:
    """Returns the normalized address of a server; refuses addresses with a password."""
    shown, login = split_credentials(url)
    if login is not None:
        raise ConfigurationError(
            f"The router sends no user and password to {shown}; start the server with "
            f"an api_key, and give the router the same."
        )
    return shown


async def find_servers(
    url: str | None,
    urls: Sequence[str] | None,
    *,
    router_url: str | None,
    api_key: str | None,
    admin_api_key: str | None = None,
) -> tuple[list[str], str | None, HttpClient]:
    """Returns the servers' and the router's addresses, and the client for them."""
    place = None
    credentials: dict[str, str] = {}
    if router_url is not None:
        (place,) = _without_credentials([router_url], credentials)
        if url is None and urls is None:
            urls = await find_workers(HttpClient(api_key, credentials), place)
    if (url is None) == (urls is None):
        raise ConfigurationError(
            f"Give the address of one server or of several: "
            f"url={hide_passwords(repr(url))}, urls={hide_passwords(repr(urls))}."
        )
    if isinstance(urls, str):
        raise ConfigurationError(
            f"urls is a list of addresses, got {hide_passwords(urls)!r}."
        )
    addresses = _without_credentials([url] if url else urls or (), credentials)
    if (api_key or admin_api_key) is not None and credentials:
        raise ConfigurationError(
            f"Give {next(iter(credentials))} either an api_key or a user and a "
            f"password: a request carries one of them."
        )
    if not addresses or len(set(addresses)) != len(addresses):
        raise ConfigurationError(
            f"urls must name each server once, and at least one: {addresses}."
        )
    http = HttpClient(api_key, credentials, admin_api_key=admin_api_key)
    return addresses, place, http


def _without_credentials(urls: Sequence[str], headers: dict[str, str]) -> list[str]:
    """Returns addresses without credentials; adds their headers to ``headers``."""
    split = [split_credentials(url) for url in urls]
    headers |= {url: header for url, header in split if header}
    return [url for url, _ in split]
