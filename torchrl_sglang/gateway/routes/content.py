"""JSON of requests and answers, and formatted errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import web

from torchrl_sglang.errors import (
    ConfigurationError,
    GatewayError,
    NotFiniteError,
    RequestRefusedError,
    ServerTimeoutError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.gateway.connections import STRANGERS
from torchrl_sglang.gateway.dialects.base import Failure
from torchrl_sglang.gateway.policy import PromptTooLongError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.texts import half_character

NOT_FOUND, METHOD_NOT_ALLOWED, GONE = 404, 405, 410


async def read_body(request: web.Request) -> bytes:
    """Returns the body of a request."""
    if request.content.is_eof():
        # A timer costs more than the body.
        return await request.read()
    seconds = request.app[STRANGERS].timeouts.body
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError as error:
        raise GatewayError(
            f"The body of the request did not arrive within {seconds:g} seconds.",
            status=408,
        ) from error


async def read_json(request: web.Request) -> dict[str, Any]:
    """Returns the object in a request's body."""
    body = await read_body(request)
    try:
        content = msgspec.json.decode(body or b"{}")
    except (ValueError, RecursionError) as error:
        reason = _half_character(body) or str(error)
        raise ConfigurationError(f"The request is not JSON: {reason}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError("The request must be a JSON object.")
    return content


def _half_character(body: bytes) -> str:
    """Returns the location of an incomplete character; an empty text: none."""
    try:
        half = half_character(json.loads(body))
    except (ValueError, RecursionError):
        return ""
    if not half:
        return ""
    return f"it has half of a character in {half!r}; a text was cut within one"


def json_response(content: Any, **options: Any) -> web.Response:
    """Returns an answer of JSON; ``options`` are aiohttp's."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, content_type="application/json", **options)


def _status(error: SGLangError) -> int:
    if isinstance(error, GatewayError):
        return error.status
    if isinstance(error, NotFiniteError):
        # A property of the weights, for any request.
        return 503
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
    408: ("timeout_error", None),
    410: ("not_found_error", None),
    413: ("request_too_large", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def _routes(app: web.Application) -> str:
    """Returns the routes; those that sessions have as well, once."""
    routes = [
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]
    shared = {(method, f"/sessions/{{session}}{path}") for method, path in routes}
    return ", ".join(f"{m} {path}" for m, path in routes if (m, path) not in shared)


def failure_of(request: web.Request, error: Exception) -> Failure:
    """Returns the answer to a client for an error."""
    if isinstance(error, web.HTTPException):
        status, message = error.status, error.reason
        if status in (NOT_FOUND, METHOD_NOT_ALLOWED):
            message = (
                f"There is no {request.method} {request.path!r}; there are "
                f"{_routes(request.app)}, and most of them behind /sessions/NAME."
            )
    elif isinstance(error, SGLangError):
        status, message = _status(error), str(error)
    elif isinstance(error, RecursionError):
        status = 400
        message = "A tool or the arguments of a call are nested too deeply."
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
