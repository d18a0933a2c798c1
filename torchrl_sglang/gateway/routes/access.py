"""Access control: keys of sessions, and the gateway's own."""

from __future__ import annotations

import hmac
from functools import lru_cache, partial

from aiohttp import web
from yarl import URL

from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.connections import STRANGERS
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.dialects.registry import find_dialect
from torchrl_sglang.gateway.responder import Responder
from torchrl_sglang.gateway.routes.content import GONE, NOT_FOUND
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.support.urls import is_loopback


class Access:
    """Finds a request's session."""

    def __init__(self, gateway: Responder) -> None:
        self._gateway = gateway
        # Paths with names of sessions are many, and each is repeated.
        self._find_dialect = lru_cache(maxsize=1024)(
            partial(find_dialect, gateway.dialects)
        )

    def dialect(self, request: web.Request) -> Dialect:
        """Returns the dialect of a request."""
        return self._find_dialect(request.path)

    def key(self, request: web.Request) -> str | None:
        """Returns the key of a request."""
        return self.dialect(request).key(request.headers)

    def session(self, request: web.Request) -> Session:
        """Returns the session of a request."""
        session = self._session(request)
        request.app[STRANGERS].know(request)
        return session

    def _session(self, request: web.Request) -> Session:
        name, key = request.match_info.get("session"), self.key(request)
        if name is None and self._gateway.sessionless:
            session = self._session_of(key) if key else None
            return session or self._anonymous(request)
        is_owner = self._is_owner(key)
        if name is None:
            if key is None or is_owner:
                raise GatewayError(
                    "No session is named: use a session's own key, or its base URL.",
                    status=401,
                )
            return self._gateway.find(key=key)
        if is_owner:
            return self._open(name)
        session = self._session_of(key)
        if session is None and self._gateway.open:
            _check_local(request)
            return self._gateway.find(name=name)
        return _check_name(session, name, key)

    def own(self, request: web.Request) -> Session:
        """Returns a session for its key."""
        name, key = request.match_info["session"], self.key(request)
        if self._is_owner(key):
            session = self._gateway.find(name=name)
        else:
            session = _check_name(self._session_of(key), name, key)
        request.app[STRANGERS].know(request)
        return session

    def check_owner(self, request: web.Request) -> None:
        """Raises :class:`GatewayError` without the gateway's own key."""
        key = self.key(request)
        if not self._is_owner(key):
            raise GatewayError(
                "Sessions are made with the gateway's own key.",
                status=401 if key is None else 403,
            )
        request.app[STRANGERS].know(request)

    def check_may_read(self, request: web.Request) -> None:
        """Allows reads by the owner, and by local clients if sessions are open."""
        if self._gateway.open and self.key(request) is None:
            _check_local(request)
            request.app[STRANGERS].know(request)
        else:
            self.check_owner(request)

    def check_may_control(self, request: web.Request) -> None:
        """Allows control calls by the owner, and locally if sessions are open."""
        if self._gateway.open:
            _check_local(request)
            request.app[STRANGERS].know(request)
        else:
            self.check_owner(request)

    def _anonymous(self, request: web.Request) -> Session:
        """Returns a session of one request, of which nothing is kept."""
        self.check_may_control(request)
        return Session("")

    def _open(self, name: str) -> Session:
        """Returns a session for the owner, a new session if there is none."""
        try:
            return self._gateway.find(name=name)
        except GatewayError as error:
            if error.status != NOT_FOUND:
                raise
        return self._gateway.session(name)

    def _session_of(self, key: str | None) -> Session | None:
        try:
            return self._gateway.find(key=key)
        except GatewayError as error:
            # An expired session key.
            if error.status == GONE or error.code is not None:
                raise
            return None

    def _is_owner(self, key: str | None) -> bool:
        expected = self._gateway.api_key
        return hmac.compare_digest(_bytes(key or ""), _bytes(expected))


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _check_local(request: web.Request) -> None:
    """Raises :class:`GatewayError` for a request from a web page of another host.

    A browser runs on this machine, too, and sends requests for any page. Pages cannot
    set these headers.
    """
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    for name, url in (("Host", host and f"http://{host}"), ("Origin", origin)):
        if url is not None and not _is_local(url):
            raise GatewayError(
                f"{name}: {request.headers[name]!r} is another host; from there, a "
                f"session opens with its key."
            )


@lru_cache
def _is_local(url: str) -> bool:
    try:
        return is_loopback(URL(url).host or "")
    except ValueError:
        return False


def _check_name(session: Session | None, name: str, key: str | None) -> Session:
    """Returns the session of a key; raises :class:`GatewayError` for another name."""
    if session is not None and session.name == name:
        return session
    raise GatewayError(
        f"This key does not open the session {name!r}."
        if key
        else f"The session {name!r} opens with its key.",
        status=403 if key else 401,
    )
