"""Routes of sessions: endpoints of the dialects, lookups, models."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from torchrl_sglang.chat.repeated import LatestMessages
from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.connections import STRANGERS
from torchrl_sglang.gateway.dialects.base import (
    AnswerInfo,
    Asked,
    Control,
    Dialect,
    Endpoint,
    Lookup,
)
from torchrl_sglang.gateway.progress import Progress
from torchrl_sglang.gateway.request import Request
from torchrl_sglang.gateway.responder import Responder
from torchrl_sglang.gateway.retries import (
    KEPT_SECONDS,
    Answer,
    Answers,
    digest_of,
)
from torchrl_sglang.gateway.routes.access import Access
from torchrl_sglang.gateway.routes.content import (
    NOT_FOUND,
    failure_of,
    json_response,
    read_body,
    read_json,
)
from torchrl_sglang.gateway.routes.sending import Stream, send_answer
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import continuing

FINAL = frozenset({403, 410})
"""Statuses after which clients should not repeat a request."""

IGNORED = "x-torchrl-sglang-ignored"
"""Header with a request's fields without effect."""

REQUEST_IDS = ("x-request-id", "x-client-request-id")
"""Headers with the client's id of a request."""

_REQUEST_ID = re.compile(r"[!-~]{1,512}")

ANSWERED_IDS = ("x-request-id", "request-id")
"""Headers with a request's id, for clients of OpenAI and of Anthropic."""


class SessionRoutes:
    """Handles requests for sessions."""

    def __init__(self, gateway: Responder) -> None:
        self._gateway = gateway
        self.access = Access(gateway)
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
            response = await handler(request)
        except Exception as error:  # noqa: BLE001 - No defect ends a connection silently.
            failure = failure_of(request, error)
            headers = {"x-should-retry": "false"} if failure.status in FINAL else {}
            content = self.access.dialect(request).error(failure)
            response = json_response(content, status=failure.status, headers=headers)
        if request in request.app[STRANGERS]:
            # The next request may have a key, on another connection.
            response.force_close()
        return response

    @property
    def dialects(self) -> Sequence[Dialect]:
        """Accepted dialects."""
        return self._gateway.dialects

    async def count(
        self, endpoint: Endpoint, request: web.Request
    ) -> web.StreamResponse:
        """Answers with the number of tokens of a prompt."""
        session = self.access.session(request)
        parsed = await self._read(endpoint, request, session)
        number = await self._gateway.count(session, parsed)
        assert endpoint.count is not None
        return json_response(
            endpoint.count(number), headers=_headers(parsed, parsed.request_id)
        )

    async def _read(
        self, endpoint: Endpoint, request: web.Request, session: Session
    ) -> Request:
        read = endpoint.read
        if endpoint.recalls:
            read = partial(read, recall=session.answered)
        body = await read_json(request)
        if session.name:
            latest = self._latest.setdefault(session, LatestMessages())
            body = latest.share(body)
        return self._gateway.read(read, body)

    async def look_up(self, lookup: Lookup, request: web.Request) -> web.StreamResponse:
        """Returns an earlier answer of a session."""
        session, answer_id = self.access.session(request), request.match_info["id"]
        turn = lookup.find(answer_id, session.answered)
        content = lookup.tell(
            Asked(
                id=answer_id,
                turn=turn,
                query=request.query,
                token_text=self._gateway.token_text,
            )
        )
        if lookup.forgets:
            await self._gateway.keeper.unname(session, turn)
        return json_response(content)

    async def control(
        self, control: Control, request: web.Request
    ) -> web.StreamResponse:
        """Answers a call that controls the engine."""
        self.access.check_may_control(request)
        content = await control.call(request.query, await read_json(request))
        if isinstance(content, str):
            return web.Response(text=content)
        return json_response(content)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Returns the list of the single model."""
        self.access.session(request)
        names = self._gateway.models
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        context = self._gateway.engine.capabilities.max_context
        rows = [_about_model(name, context) for name in names]
        return json_response({"object": "list", "data": rows, **ends})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Returns the description of a model."""
        self.access.session(request)
        name = request.match_info["model"]
        if name not in self._gateway.models:
            raise GatewayError(
                f"There is no model {name!r}, but {', '.join(self._gateway.models)}; "
                f"requests may name any, as there is one policy.",
                status=NOT_FOUND,
            )
        context = self._gateway.engine.capabilities.max_context
        return json_response(_about_model(name, context))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Reports this process as serving."""
        return json_response({"status": "ok"})

    async def answer(
        self, endpoint: Endpoint, request: web.Request
    ) -> web.StreamResponse:
        """Returns responses, whole or as a stream."""
        session = self.access.session(request)
        parsed = await self._read(endpoint, request, session)
        info = AnswerInfo(
            name=secrets.token_hex(12),
            created=int(time.time()),
            token_text=self._gateway.token_text,
        )
        parsed = replace(
            parsed,
            request_id=_request_id(parsed.request_id, request, info),
            name=info.name,
            about={**parsed.about, "created_at": info.created},
        )
        progress = Progress() if parsed.stream else None
        recorded = bool(session.name)
        send = partial(
            self._send, endpoint, request, parsed, progress, recorded=recorded
        )
        try:
            if not recorded:
                # Nothing is kept of it, so that no later request can repeat it.
                answer = self._respond(request, session, parsed, progress)()
                return await send(answer, info)
            content = request.path.encode() + await read_body(request)
            digest = digest_of(request.headers, content)
            parsed = replace(parsed, digest=digest)
            answers = self._answers.setdefault(session, Answers())
            async with answers.to(
                request.headers,
                digest,
                self._respond(request, session, parsed, progress),
                keep=partial(self._gateway.keeper.keep, session),
                withdraw=partial(self._gateway.keeper.withdraw, session),
                recorded=partial(self._recorded, session, digest),
                is_continued=session.is_continued,
                request_id=str(parsed.request_id),
                info=info,
            ) as answer:
                # A repeated request has the id of the first.
                return await send(answer, answer.info, request_id=answer.request_id)
        except ConnectionResetError:
            torchrl_logger.debug("A client has hung up.")
            return web.Response()

    def _respond(
        self,
        request: web.Request,
        session: Session,
        parsed: Request,
        progress: Progress | None,
    ) -> Callable[[], Awaitable[list[Turn]]]:
        """Returns a call that generates the responses, within the client's trace."""
        respond = partial(self._gateway.respond, session, parsed, progress)
        return continuing(request.headers, respond)

    async def _send(
        self,
        endpoint: Endpoint,
        request: web.Request,
        parsed: Request,
        progress: Progress | None,
        answer: Awaitable[list[Turn]],
        info: AnswerInfo,
        *,
        recorded: bool,
        request_id: str | None = None,
    ) -> web.StreamResponse:
        """Sends an answer, whole or as a stream."""
        assert endpoint.write is not None
        write = endpoint.write(parsed, info)
        headers = _headers(parsed, request_id or parsed.request_id)
        if progress is None:
            return await send_answer(request, answer, write, headers, recorded=recorded)
        stream = Stream(
            request,
            answer,
            write,
            progress,
            dialect=self.access.dialect(request),
            seconds=self._gateway.keep_alive_seconds,
        )
        return await stream.send(headers)

    def _recorded(self, session: Session, digest: str) -> list[Answer]:
        """Returns a session's latest answers to equal requests."""
        since = time.time() - KEPT_SECONDS
        return [
            Answer.recorded(
                turns,
                request_id=str(turns[0].request_id),
                info=AnswerInfo(
                    name=turns[0].answer_name,
                    created=int(turns[0].created),
                    token_text=self._gateway.token_text,
                ),
            )
            for turns in session.answers_to(digest)
            if turns[0].created >= since
        ]


def _headers(request: Request, request_id: str | None) -> dict[str, str]:
    """Returns the headers with a request's id, and its fields without effect."""
    headers = {IGNORED: ", ".join(request.ignored)} if request.ignored else {}
    if request_id is not None:
        headers |= dict.fromkeys(ANSWERED_IDS, request_id)
    return headers


def _request_id(given: str | None, request: web.Request, info: AnswerInfo) -> str:
    """Returns the id of a request: the client's own, or a new id."""
    ids = (given or "", *(request.headers.get(name, "") for name in REQUEST_IDS))
    return next(filter(_REQUEST_ID.fullmatch, ids), f"req_{info.name}")


def _about_model(name: str, context: int) -> dict[str, Any]:
    """Returns a model's description, in OpenAI's, Anthropic's and vLLM's fields."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "sglang"}
    born = "1970-01-01T00:00:00Z"
    anthropic = {"type": "model", "display_name": name, "created_at": born}
    return {**openai, **anthropic, "max_model_len": context}
