"""The gateway's HTTP routes: who may ask what, and in which dialect it is answered."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import select
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web
from torchrl._utils import logger as torchrl_logger
from yarl import URL

from torchrl_sglang.errors import (
    ConfigurationError,
    GatewayError,
    RequestRefusedError,
    ServerTimeoutError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.gateway.dialects.base import (
    AnswerInfo,
    Dialect,
    Endpoint,
    Failure,
    Writer,
)
from torchrl_sglang.gateway.dialects.registry import find_dialect
from torchrl_sglang.gateway.policy import PromptTooLongError
from torchrl_sglang.gateway.request import Request, Usage
from torchrl_sglang.gateway.retries import Answers
from torchrl_sglang.gateway.session import Session, Turn
from torchrl_sglang.support.urls import is_loopback

MAX_REQUEST_BYTES = 64 << 20
NOT_FOUND, METHOD_NOT_ALLOWED, GONE = 404, 405, 410
FINAL = frozenset({403, 410})
"""Statuses after which clients need not repeat a request."""

IGNORED = "x-torchrl-sglang-ignored"
"""Header with the fields of a request that had no effect."""

DRAIN_SECONDS = 0.01
"""Interval between looks whether a slow client has taken its answer."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""Event of a hang-up, where the system has one."""

_SSE = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Recorder(Protocol):
    """Members of a gateway that the routes need."""

    models: list[str]
    """Names of the models that clients are told."""
    api_key: str
    """Key that opens every session."""
    dialects: Sequence[Dialect]
    """Dialects that clients may speak."""
    open: bool
    """Whether a session's path is enough to use the session."""
    keep_alive_seconds: float
    """Interval between comments in a stream without content."""

    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns a session, a new one where there is none of that name."""

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns a session that there is."""

    def drop(self, session: Session) -> None:
        """Forgets a session."""

    def set_reward(
        self, session: Session, reward: float, *, turn: int | None = None
    ) -> None:
        """Sets a reward."""

    def read(self, read: Callable[[Any], Request], body: Mapping[str, Any]) -> Request:
        """Returns what a body asks for, and what of it has no effect."""

    async def respond(self, session: Session, request: Request) -> list[Turn]:
        """Generates and keeps responses."""

    async def keep(self, session: Session, turns: Sequence[Turn]) -> None:
        """Keeps responses that were withdrawn."""

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Forgets responses that no client has seen."""

    async def written(self) -> None:
        """Returns when everything so far is kept."""

    def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt."""

    def token_text(self, token: int) -> str:
        """Returns the text of a token."""


def make_app(gateway: Recorder) -> web.Application:
    """Returns the routes of a gateway."""
    routes = _Routes(gateway)
    endpoints = [each for dialect in gateway.dialects for each in dialect.endpoints]
    app = web.Application(
        client_max_size=MAX_REQUEST_BYTES, middlewares=[routes.as_errors]
    )
    for prefix in ("", "/sessions/{session}"):
        for endpoint in endpoints:
            handler = routes.count if endpoint.write is None else routes.answer
            app.router.add_post(f"{prefix}{endpoint.path}", partial(handler, endpoint))
        app.router.add_get(f"{prefix}/v1/models", routes.models)
        app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", routes.model)
    app.router.add_get("/health", routes.health)
    app.router.add_post("/sessions", routes.create)
    app.router.add_get("/sessions/{session}", routes.show)
    app.router.add_delete("/sessions/{session}", routes.delete)
    app.router.add_post("/sessions/{session}/reward", routes.reward)
    return app


class _Routes:
    """Handles requests."""

    def __init__(self, gateway: Recorder) -> None:
        self._gateway = gateway
        # The answers of a session are forgotten with it.
        self._answers: WeakKeyDictionary[Session, Answers] = WeakKeyDictionary()

    @web.middleware
    async def as_errors(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Answers errors in the client's dialect."""
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - No defect ends a connection silently.
            failure = _failure(request, error)
            headers = {"x-should-retry": "false"} if failure.status in FINAL else {}
            content = self._dialect(request).error(failure)
            return _json_response(content, status=failure.status, headers=headers)

    async def count(
        self, endpoint: Endpoint, request: web.Request
    ) -> web.StreamResponse:
        session = self._session(request)
        parsed = self._gateway.read(endpoint.read, await _json(request))
        number = self._gateway.count(session, parsed)
        assert endpoint.count is not None
        return _json_response(endpoint.count(number), headers=_headers(parsed))

    async def models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        names = self._gateway.models
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        rows = [_about_model(name) for name in names]
        return _json_response({"object": "list", "data": rows, **ends})

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        name = request.match_info["model"]
        if name not in self._gateway.models:
            raise GatewayError(
                f"There is no model {name!r}, but {', '.join(self._gateway.models)}; "
                f"requests may name any, as there is one policy.",
                status=NOT_FOUND,
            )
        return _json_response(_about_model(name))

    async def health(self, request: web.Request) -> web.StreamResponse:
        return _json_response({"status": "ok"})

    async def create(self, request: web.Request) -> web.StreamResponse:
        self._check_owner(request)
        given = await _json(request)
        session = self._gateway.session(given.get("name"), group=given.get("group"))
        url = f"{request.scheme}://{request.host}/sessions/{session.name}"
        about = {"name": session.name, "key": session.key, "url": url}
        await self._gateway.written()
        return _json_response({**about, "base_url": f"{url}/v1"})

    async def show(self, request: web.Request) -> web.StreamResponse:
        session = self._own(request)
        return _json_response(
            {
                "name": session.name,
                "group": session.group,
                "reward": session.reward,
                "turns": len(session.turns),
                "trajectories": [
                    {
                        "token_ids": each.token_ids,
                        "turns": [turn.number for turn in each.turns],
                        "trained": list(each.trained),
                        "reward": each.reward,
                        "messages": each.messages,
                    }
                    for each in session.trajectories()
                ],
            }
        )

    async def delete(self, request: web.Request) -> web.StreamResponse:
        self._gateway.drop(self._own(request))
        await self._gateway.written()
        return _json_response({})

    async def reward(self, request: web.Request) -> web.StreamResponse:
        session, given = self._own(request), await _json(request)
        value, turn = given.get("reward"), given.get("turn")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigurationError(f"reward={value!r} must be a number.")
        if turn is not None and type(turn) is not int:
            raise ConfigurationError(f"turn={turn!r} must be the number of a turn.")
        self._gateway.set_reward(session, float(value), turn=turn)
        await self._gateway.written()
        return _json_response({})

    def _session(self, request: web.Request) -> Session:
        """Returns the session that a request belongs to."""
        name, key = request.match_info.get("session"), self._key(request)
        owner = self._is_owner(key)
        if name is None:
            if key is None or owner:
                raise GatewayError(
                    "No session is named: use a session's own key, or its base URL.",
                    status=401,
                )
            return self._gateway.find(key=key)
        if owner:
            return self._open(name)
        belongs = self._session_of(key)
        if belongs is not None and belongs.name == name:
            return belongs
        if belongs is not None or not self._gateway.open:
            raise _wrong_key(name, key)
        _check_local(request)
        return self._gateway.find(name=name)

    def _open(self, name: str) -> Session:
        """Returns a session to the owner, a new one where there was none."""
        try:
            return self._gateway.find(name=name)
        except GatewayError as error:
            if error.status != NOT_FOUND:
                raise
        return self._gateway.session(name)

    def _own(self, request: web.Request) -> Session:
        """Returns a session to somebody who has its key."""
        name, key = request.match_info["session"], self._key(request)
        if self._is_owner(key):
            return self._gateway.find(name=name)
        belongs = self._session_of(key)
        if belongs is None or belongs.name != name:
            raise _wrong_key(name, key)
        return belongs

    def _session_of(self, key: str | None) -> Session | None:
        try:
            return self._gateway.find(key=key)
        except GatewayError as error:
            if error.status == GONE:
                raise
            return None

    def _is_owner(self, key: str | None) -> bool:
        own = self._gateway.api_key
        return hmac.compare_digest(_bytes(key or ""), _bytes(own))

    def _check_owner(self, request: web.Request) -> None:
        key = self._key(request)
        if not self._is_owner(key):
            raise GatewayError(
                "Sessions are made with the gateway's own key.",
                status=401 if key is None else 403,
            )

    def _dialect(self, request: web.Request) -> Dialect:
        return find_dialect(self._gateway.dialects, request.path)

    def _key(self, request: web.Request) -> str | None:
        return self._dialect(request).key(request.headers)

    async def answer(
        self, endpoint: Endpoint, request: web.Request
    ) -> web.StreamResponse:
        session = self._session(request)
        content = await request.read()
        parsed = self._gateway.read(endpoint.read, await _json(request))
        assert endpoint.write is not None
        info = AnswerInfo(
            name=secrets.token_hex(12),
            created=int(time.time()),
            token_text=self._gateway.token_text,
        )
        write = endpoint.write(parsed, info)

        answers = self._answers.setdefault(session, Answers())
        seconds = self._gateway.keep_alive_seconds
        try:
            async with answers.to(
                request.headers,
                request.path.encode() + content,
                partial(self._gateway.respond, session, parsed),
                keep=partial(self._gateway.keep, session),
                withdraw=partial(self._gateway.withdraw, session),
            ) as answer:
                headers = _headers(parsed)
                if parsed.stream:
                    dialect = self._dialect(request)
                    return await _stream(
                        request, answer, write, dialect, seconds, headers
                    )
                return await _send(request, answer, write, headers)
        except ConnectionResetError:
            torchrl_logger.debug("A client has hung up.")
            return web.Response()


def _headers(request: Request) -> dict[str, str]:
    """Returns the headers that say which fields of a request had no effect."""
    return {IGNORED: ", ".join(request.ignored)} if request.ignored else {}


async def _send(
    request: web.Request,
    answer: Awaitable[list[Turn]],
    write: Writer,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Sends an answer, and returns when the connection has taken it.

    Raises:
        ConnectionResetError: if the client has hung up.
    """
    turns = await answer
    response = _json_response(write.answer(turns, _usage(turns)), headers=headers)
    async with _delivery(request):
        await response.prepare(request)
        await response.write_eof()
    return response


@asynccontextmanager
async def _delivery(request: web.Request) -> AsyncIterator[None]:
    """Raises ``ConnectionResetError`` if the client has hung up, before or within.

    Ends when the connection has taken all that was written.
    """
    _check_open(request.transport, _HUNG_UP)
    yield
    # A client that has read everything may hang up.
    _check_open(request.transport, 0)
    while request.transport and request.transport.get_write_buffer_size():
        await asyncio.sleep(DRAIN_SECONDS)
        _check_open(request.transport, 0)


def _check_open(transport: asyncio.Transport | None, events: int) -> None:
    """Raises ``ConnectionResetError`` if a connection is broken, or has seen events.

    The loop may not know it yet.
    """
    number = -1 if transport is None else transport.get_extra_info("socket").fileno()
    if number >= 0:
        poll = select.poll()
        poll.register(number, events)
        if not poll.poll(0):
            return
    raise ConnectionResetError("The client has hung up.")


async def _stream(
    request: web.Request,
    answer: Awaitable[list[Turn]],
    write: Writer,
    dialect: Dialect,
    seconds: float,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Streams an answer, which comes when it is complete.

    Tool calls and reasoning are found in whole responses only.

    Raises:
        ConnectionResetError: if the client has hung up.
    """
    task = asyncio.ensure_future(answer)
    response = web.StreamResponse(headers={**_SSE, **headers})
    try:
        # A request that is refused at once gets the status of its error.
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            task.result()
        async with _delivery(request):
            await response.prepare(request)
            async for content in _events(request, task, write, dialect, seconds):
                await response.write(content)
        with suppress(ConnectionError):
            # Clients hang up when they have read the last event, before this.
            await response.write_eof()
    finally:
        task.cancel()
    return response


async def _events(
    request: web.Request,
    task: asyncio.Task[list[Turn]],
    write: Writer,
    dialect: Dialect,
    seconds: float,
) -> AsyncIterator[bytes]:
    """Yields the content of a stream: signs of life, then the answer or an error."""
    while not task.done():
        yield b": waiting\n\n"
        await asyncio.wait([task], timeout=seconds)
    try:
        turns = task.result()
        content = b"".join(write.events(turns, _usage(turns)))
    except Exception as error:  # noqa: BLE001 - The status has been sent already.
        failure = msgspec.json.encode(dialect.error(_failure(request, error)))
        content = b"event: error\ndata: " + failure + b"\n\n"
    yield content


def _usage(turns: list[Turn]) -> Usage:
    first = turns[0]
    return Usage(
        prompt=first.prompt.num_tokens,
        cached=first.completion.cached_tokens,
        response=sum(len(turn.completion.token_ids) for turn in turns),
    )


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"The request is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError("The request must be a JSON object.")
    return content


def _about_model(name: str) -> dict[str, Any]:
    """Returns what clients are told of a model, in OpenAI's words and Anthropic's."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "sglang"}
    born = "1970-01-01T00:00:00Z"
    return {**openai, "type": "model", "display_name": name, "created_at": born}


def _json_response(content: Any, **options: Any) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, content_type="application/json", **options)


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _check_local(request: web.Request) -> None:
    """Raises :class:`GatewayError` for a request that a page of another host may send.

    A browser runs on this machine, too, and sends what any page tells it to. Its pages
    cannot set these headers.
    """
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    for name, url in (("Host", host and f"http://{host}"), ("Origin", origin)):
        if url is not None and not _is_local(url):
            raise GatewayError(
                f"{name}: {request.headers[name]!r} is another host; from there, a "
                f"session opens with its key."
            )


def _is_local(url: str) -> bool:
    try:
        return is_loopback(URL(url).host or "")
    except ValueError:
        return False


def _wrong_key(name: str, key: str | None) -> GatewayError:
    return GatewayError(
        f"This key does not open the session {name!r}."
        if key
        else f"The session {name!r} opens with its key.",
        status=403 if key else 401,
    )


def _status(error: SGLangError) -> int:
    if isinstance(error, GatewayError):
        return error.status
    if isinstance(
        error, (ConfigurationError, UnsupportedByServerError, RequestRefusedError)
    ):
        return 400
    return 504 if isinstance(error, ServerTimeoutError) else 503


_KINDS = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    410: ("not_found_error", None),
    413: ("request_too_large", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def _routes(app: web.Application) -> str:
    """Returns the routes, without those that each session has, too."""
    found = (
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    )
    return ", ".join(each for each in found if "}/v1/" not in each)


def _failure(request: web.Request, error: Exception) -> Failure:
    """Returns the answer to a client for an error."""
    if isinstance(error, web.HTTPException):
        status, message = error.status, error.reason
        if status in (NOT_FOUND, METHOD_NOT_ALLOWED):
            message = (
                f"There is no {request.method} {request.path!r}; there are "
                f"{_routes(request.app)}, and each /v1/... behind /sessions/NAME."
            )
    elif isinstance(error, SGLangError):
        status, message = _status(error), str(error)
    else:
        torchrl_logger.error("The gateway failed.", exc_info=error)
        status, message = 500, f"{type(error).__name__}: {error}"
    kind, code = _KINDS.get(status, ("api_error", None))
    too_long = None
    if isinstance(error, PromptTooLongError):
        code, too_long = "context_length_exceeded", (error.tokens, error.longest)
    return Failure(
        status=status, message=message, kind=kind, code=code, too_long=too_long
    )
