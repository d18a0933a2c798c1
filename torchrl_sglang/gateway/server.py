"""The gateway's HTTP routes: who may ask what, and in which dialect it is answered."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import select
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web
from torchrl._utils import logger as torchrl_logger
from yarl import URL

from torchrl_sglang.chat.repeated import LatestMessages
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
    Asked,
    Dialect,
    Endpoint,
    Failure,
    Lookup,
    Writer,
)
from torchrl_sglang.gateway.dialects.registry import find_dialect
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.policy import PromptTooLongError
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.request import Request, usage_of
from torchrl_sglang.gateway.retries import Answers
from torchrl_sglang.gateway.session import Session, Turn
from torchrl_sglang.support.urls import is_loopback
from torchrl_sglang.telemetry.tracing import continuing

MAX_REQUEST_BYTES = 64 << 20
NOT_FOUND, METHOD_NOT_ALLOWED, GONE = 404, 405, 410
FINAL = frozenset({403, 410})
"""Statuses after which clients need not repeat a request."""

IGNORED = "x-torchrl-sglang-ignored"
"""Header with the fields of a request that had no effect."""

REWARDED = ("turn", "agent", "branch")
"""Parts of a session that a reward may be of."""

REQUEST_IDS = ("x-request-id", "x-client-request-id")
"""Headers in which clients name a request."""

_REQUEST_ID = re.compile(r"[!-~]{1,512}")

ANSWERED_IDS = ("x-request-id", "request-id")
"""Headers in which clients of OpenAI and Anthropic look for a request's name."""

FIRST_SECONDS = 0.8
"""Time until a stream's first bytes, in seconds."""

DRAIN_SECONDS = 0.01
"""Interval between looks whether a slow client has taken its answer."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""Event of a hang-up, where the system has one."""

_SSE = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class SessionServer(Protocol):
    """Members of a process of a gateway that the routes of sessions need."""

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

    def session(self, name: str | None = None) -> Session:
        """Returns a session, a new one where there is none of that name."""

    def find(self, *, name: str | None = None, key: str | None = None) -> Session:
        """Returns a session that there is."""

    def read(self, read: Callable[[Any], Request], body: Mapping[str, Any]) -> Request:
        """Returns what a body asks for, and what of it has no effect."""

    async def respond(
        self, session: Session, request: Request, progress: Progress | None = None
    ) -> list[Turn]:
        """Generates and keeps responses."""

    async def keep(self, session: Session, turns: Sequence[Turn]) -> None:
        """Keeps responses that were withdrawn."""

    def withdraw(self, session: Session, turns: Sequence[Turn]) -> None:
        """Forgets responses that no client has seen."""

    async def written(self) -> None:
        """Returns when everything so far is kept."""

    async def unname(self, session: Session, turn: Turn) -> None:
        """Forgets the name of a turn's answer."""

    async def count(self, session: Session, request: Request) -> int:
        """Returns the number of tokens of a prompt."""

    def token_text(self, token: int) -> str:
        """Returns the text of a token."""


_RequestHandler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Recorder(SessionServer, Protocol):
    """Members of a gateway that all routes need."""

    public_url: str | None
    """Address by which clients reach the gateway, if it is not the one they used."""

    def session(self, name: str | None = None, *, group: str | None = None) -> Session:
        """Returns a session, a new one where there is none of that name."""

    def drop(self, session: Session) -> None:
        """Forgets a session."""

    def set_reward(
        self,
        session: Session,
        reward: float,
        *,
        turn: int | str | None = None,
        agent: str | None = None,
        branch: int | str | None = None,
    ) -> None:
        """Sets a reward."""

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns the content type and the text of the metrics."""


class Elsewhere(Protocol):
    """Has other processes of a gateway answer requests for their sessions."""

    async def __call__(
        self, request: web.Request, find: Callable[[], Session]
    ) -> web.StreamResponse | None:
        """Returns the answer; ``None`` if this process serves the session."""


def make_app(gateway: Recorder, elsewhere: Elsewhere | None = None) -> web.Application:
    """Returns all routes of a gateway.

    Args:
        gateway: to be served.
        elsewhere: answers for sessions that other processes serve.
    """
    routes = _GatewayRoutes(gateway, elsewhere)
    app = web.Application(
        client_max_size=MAX_REQUEST_BYTES, middlewares=[routes.as_errors]
    )
    _add_session_routes(app, routes)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_post("/sessions", routes.create)
    app.router.add_get("/sessions/{session}", routes.show)
    app.router.add_delete("/sessions/{session}", routes.delete)
    app.router.add_post("/sessions/{session}/reward", routes.reward)
    return app


def make_session_app(
    server: SessionServer,
    elsewhere: Elsewhere,
    otherwise: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> web.Application:
    """Returns the routes of sessions alone, for one of several processes.

    Args:
        server: serves sessions.
        elsewhere: answers for other sessions.
        otherwise: answers what no route is for.
    """
    routes = _SessionRoutes(server, elsewhere)
    app = web.Application(
        client_max_size=MAX_REQUEST_BYTES, middlewares=[routes.as_errors]
    )
    _add_session_routes(app, routes)
    app.router.add_get("/health", routes.health)
    app.router.add_route("*", "/{path:.*}", otherwise)
    return app


def _add_session_routes(app: web.Application, routes: _SessionRoutes) -> None:
    dialects = routes.dialects
    endpoints = [each for dialect in dialects for each in dialect.endpoints]
    lookups = [each for dialect in dialects for each in dialect.lookups]
    for prefix in ("", "/sessions/{session}"):
        for endpoint in endpoints:
            handler = routes.count if endpoint.write is None else routes.answer
            add_post = partial(app.router.add_post, f"{prefix}{endpoint.path}")
            add_post(routes.here(partial(handler, endpoint)))
        for lookup in lookups:
            add = app.router.add_delete if lookup.forgets else app.router.add_get
            look_up = routes.here(partial(routes.look_up, lookup))
            add(f"{prefix}{lookup.path}", look_up)
        app.router.add_get(f"{prefix}/v1/models", routes.here(routes.models))
        app.router.add_get(
            f"{prefix}/v1/models/{{model:.+}}", routes.here(routes.model)
        )


class _SessionRoutes:
    """Handles requests for sessions."""

    def __init__(self, gateway: SessionServer, elsewhere: Elsewhere | None) -> None:
        self._gateway, self._elsewhere = gateway, elsewhere
        # The answers of a session are forgotten with it.
        self._answers: WeakKeyDictionary[Session, Answers] = WeakKeyDictionary()
        self._latest: WeakKeyDictionary[Session, LatestMessages] = WeakKeyDictionary()

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

    @property
    def dialects(self) -> Sequence[Dialect]:
        """Dialects that clients may speak."""
        return self._gateway.dialects

    def here(self, handler: _RequestHandler) -> _RequestHandler:
        """Returns a handler for requests that other processes may have to answer."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if self._elsewhere is not None:
                find = partial(self._session, request)
                answer = await self._elsewhere(request, find)
                if answer is not None:
                    return answer
            return await handler(request)

        return handle

    async def count(
        self, endpoint: Endpoint, request: web.Request
    ) -> web.StreamResponse:
        session = self._session(request)
        parsed = await self._read(endpoint, request, session)
        number = await self._gateway.count(session, parsed)
        assert endpoint.count is not None
        return _json_response(endpoint.count(number), headers=_headers(parsed))

    async def _read(
        self, endpoint: Endpoint, request: web.Request, session: Session
    ) -> Request:
        read = endpoint.read
        if endpoint.recalls:
            read = partial(read, recall=session.answered)
        latest = self._latest.setdefault(session, LatestMessages())
        return self._gateway.read(read, latest.share(await _json(request)))

    async def look_up(self, lookup: Lookup, request: web.Request) -> web.StreamResponse:
        """Answers with an earlier answer of a session."""
        session, given = self._session(request), request.match_info["id"]
        turn = lookup.find(given, session.answered)
        content = lookup.tell(
            Asked(
                id=given,
                turn=turn,
                query=request.query,
                token_text=self._gateway.token_text,
            )
        )
        if lookup.forgets:
            await self._gateway.unname(session, turn)
        return _json_response(content)

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

    def _session_of(self, key: str | None) -> Session | None:
        try:
            return self._gateway.find(key=key)
        except GatewayError as error:
            # The key of a session, but it opens that no more.
            if error.status == GONE or error.code is not None:
                raise
            return None

    def _is_owner(self, key: str | None) -> bool:
        own = self._gateway.api_key
        return hmac.compare_digest(_bytes(key or ""), _bytes(own))

    def _dialect(self, request: web.Request) -> Dialect:
        return find_dialect(self._gateway.dialects, request.path)

    def _key(self, request: web.Request) -> str | None:
        return self._dialect(request).key(request.headers)

    async def answer(
        self, endpoint: Endpoint, request: web.Request
    ) -> web.StreamResponse:
        session = self._session(request)
        content = await request.read()
        parsed = await self._read(endpoint, request, session)
        assert endpoint.write is not None
        info = AnswerInfo(
            name=secrets.token_hex(12),
            created=int(time.time()),
            token_text=self._gateway.token_text,
        )
        parsed = replace(parsed, request_id=_request_id(request, info))
        if parsed.keep:
            about = {**parsed.about, "created_at": info.created}
            parsed = replace(parsed, name=info.name, about=about)

        answers = self._answers.setdefault(session, Answers())
        progress = Progress() if parsed.stream else None
        try:
            async with answers.to(
                request.headers,
                request.path.encode() + content,
                continuing(
                    request.headers,
                    partial(self._gateway.respond, session, parsed, progress),
                ),
                keep=partial(self._gateway.keep, session),
                withdraw=partial(self._gateway.withdraw, session),
                request_id=str(parsed.request_id),
                info=info,
            ) as answer:
                write = endpoint.write(parsed, answer.info)
                # A repeated request is known by the first one's.
                headers = _headers(replace(parsed, request_id=answer.request_id))
                if progress is not None:
                    stream = _Stream(
                        request,
                        answer,
                        write,
                        progress,
                        dialect=self._dialect(request),
                        seconds=self._gateway.keep_alive_seconds,
                    )
                    return await stream.send(headers)
                return await _send(request, answer, write, headers)
        except ConnectionResetError:
            torchrl_logger.debug("A client has hung up.")
            return web.Response()


class _GatewayRoutes(_SessionRoutes):
    """Handles all requests."""

    _gateway: Recorder

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Answers with metrics, to the owner or to anybody on this machine."""
        if self._gateway.open and self._key(request) is None:
            _check_local(request)
        else:
            self._check_owner(request)
        kind, content = await self._gateway.metrics(request.headers.get("Accept", ""))
        return web.Response(body=content, headers={"Content-Type": kind})

    async def create(self, request: web.Request) -> web.StreamResponse:
        self._check_owner(request)
        given = await _json(request)
        session = self._gateway.session(given.get("name"), group=given.get("group"))
        url = session.url
        if self._gateway.public_url is None:
            # The client can reach the machine that it has reached.
            host = request.host if self._elsewhere is None else _host(request, url)
            url = f"{request.scheme}://{host}/sessions/{session.name}"
        about = {"name": session.name, "key": session.key, "url": url}
        more = {"base_url": f"{url}/v1", "expires": session.expires}
        await self._gateway.written()
        return _json_response({**about, **more})

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
                        "branches": [turn.branch for turn in each.turns],
                        "reward": each.reward,
                        "rewards": list(each.rewards),
                        "returns": each.returns,
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
        value = given.pop("reward", None)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigurationError(f"reward={value!r} must be a number.")
        turn, agent, branch = (given.pop(name, None) for name in REWARDED)
        if given:
            raise ConfigurationError(
                f"{', '.join(given)}: a reward is of the session, or of a "
                f"{', '.join(REWARDED)}."
            )
        self._gateway.set_reward(
            session, float(value), turn=turn, agent=agent, branch=branch
        )
        await self._gateway.written()
        return _json_response({})

    def _own(self, request: web.Request) -> Session:
        """Returns a session to somebody who has its key."""
        name, key = request.match_info["session"], self._key(request)
        if self._is_owner(key):
            return self._gateway.find(name=name)
        belongs = self._session_of(key)
        if belongs is None or belongs.name != name:
            raise _wrong_key(name, key)
        return belongs

    def _check_owner(self, request: web.Request) -> None:
        key = self._key(request)
        if not self._is_owner(key):
            raise GatewayError(
                "Sessions are made with the gateway's own key.",
                status=401 if key is None else 403,
            )


def _headers(request: Request) -> dict[str, str]:
    """Returns the headers with a request's name, and its fields without effect."""
    headers = {IGNORED: ", ".join(request.ignored)} if request.ignored else {}
    if request.request_id is not None:
        headers |= dict.fromkeys(ANSWERED_IDS, request.request_id)
    return headers


def _request_id(request: web.Request, info: AnswerInfo) -> str:
    """Returns the name of a request: the client's own, or a new one."""
    given = (request.headers.get(name, "") for name in REQUEST_IDS)
    return next(filter(_REQUEST_ID.fullmatch, given), f"req_{info.name}")


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
    content = write.answer(turns, usage_of(turns))
    response = _json_response(content, headers=headers)
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


class _Stream:
    """Streams an answer: what is certain of it as it comes, and in the end the rest.

    Args:
        request: of a client.
        answer: to it.
        write: writes it.
        progress: is told of what is certain.
        dialect: spells an error.
        seconds: most time without a sign of life.
    """

    def __init__(
        self,
        request: web.Request,
        answer: Awaitable[list[Turn]],
        write: Writer,
        progress: Progress,
        *,
        dialect: Dialect,
        seconds: float,
    ) -> None:
        self._request, self._write, self._progress = request, write, progress
        self._dialect, self._seconds = dialect, seconds
        self._task = asyncio.ensure_future(answer)
        self._has_begun = False
        self._told: dict[int, Draft] = {}

    async def send(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Sends the answer, and returns when the connection has taken it.

        Raises:
            ConnectionResetError: if the client has hung up, or was told of an error.
        """
        request = self._request
        response = web.StreamResponse(headers={**_SSE, **headers})
        try:
            # A request that is refused at once gets the status of its error.
            await self._wait(min(self._seconds, FIRST_SECONDS))
            if self._task.done():
                self._task.result()
            async with _delivery(request):
                await response.prepare(request)
                async for content in self._contents():
                    await response.write(content)
            with suppress(ConnectionError):
                # Clients hang up when they have read the last event, before this.
                await response.write_eof()
        finally:
            self._task.cancel()
        return response

    async def _wait(self, seconds: float) -> None:
        """Waits for the answer, or for more of it."""
        changed = asyncio.ensure_future(self._progress.changed())
        try:
            await asyncio.wait(
                [self._task, changed],
                timeout=seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()

    async def _contents(self) -> AsyncIterator[bytes]:
        """Yields signs of life and what is certain, then the rest or an error."""
        failure = None
        try:
            while not self._task.done():
                yield b"".join(self._new()) or self._write.waiting()
                await self._wait(self._seconds)
            turns = self._task.result()
            yield b"".join(self._write.events(turns, usage_of(turns)))
        except GeneratorExit:
            raise
        except Exception as error:  # noqa: BLE001 - The status has been sent already.
            failure = _failure(self._request, error)
        if failure is not None:
            yield self._write.failed(failure, self._dialect.error(failure))
            if self._task.done() and self._task.exception() is None:
                raise ConnectionResetError("The answer is not what was told of it.")

    def _new(self) -> Iterator[bytes]:
        """Yields the events of what has become certain."""
        progress = self._progress
        if progress.prompt_tokens is None:
            return
        if not self._has_begun:
            self._has_begun = True
            yield from self._write.begin(progress.prompt_tokens)
        for number, draft in progress.drafts.items():
            if self._told.get(number) != draft:
                self._told[number] = draft
                yield from self._write.grow(number, draft)


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


def _host(request: web.Request, url: str) -> str:
    """Returns the host that a request was sent to, with the port of an address."""
    place = URL.build(scheme="http", host=request.url.host or "", port=URL(url).port)
    return place.authority


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
    too_long, param = None, None
    if isinstance(error, GatewayError):
        code, param = error.code or code, error.param
    if isinstance(error, PromptTooLongError):
        code, too_long = "context_length_exceeded", (error.tokens, error.longest)
    return Failure(
        status=status,
        message=message,
        kind=kind,
        code=code,
        param=param,
        too_long=too_long,
    )
