"""Which request is handled where."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from torchrl_sglang.gateway.connections import STRANGERS, Strangers
from torchrl_sglang.gateway.routes.contract import (
    Elsewhere,
    Recorder,
    RequestHandler,
    SessionServer,
)
from torchrl_sglang.gateway.routes.management import GatewayRoutes
from torchrl_sglang.gateway.routes.sessions import SessionRoutes

MAX_REQUEST_BYTES = 64 << 20


def make_app(gateway: Recorder, elsewhere: Elsewhere | None = None) -> web.Application:
    """Returns all routes of a gateway.

    Args:
        gateway: to be served.
        elsewhere: answers for sessions that other processes serve.
    """
    routes = GatewayRoutes(gateway, elsewhere)
    app = web.Application(
        client_max_size=MAX_REQUEST_BYTES, middlewares=[routes.as_errors]
    )
    app[STRANGERS] = Strangers()
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
    otherwise: RequestHandler,
) -> web.Application:
    """Returns the routes of sessions alone, for one of several processes.

    Args:
        server: serves sessions.
        elsewhere: answers for other sessions.
        otherwise: answers what no route is for.
    """
    routes = SessionRoutes(server, elsewhere)
    app = web.Application(
        client_max_size=MAX_REQUEST_BYTES, middlewares=[routes.as_errors]
    )
    app[STRANGERS] = Strangers()
    _add_session_routes(app, routes)
    app.router.add_get("/health", routes.health)
    app.router.add_route("*", "/{path:.*}", otherwise)
    return app


def _add_session_routes(app: web.Application, routes: SessionRoutes) -> None:
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
