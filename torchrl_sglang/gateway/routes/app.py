"""Assignment of routes to handlers."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from torchrl_sglang.gateway.connections import STRANGERS, ClientTimeouts, Strangers
from torchrl_sglang.gateway.responder import Responder
from torchrl_sglang.gateway.routes.management import GatewayRoutes

MAX_REQUEST_BYTES = 64 << 20


def make_app(gateway: Responder, timeouts: ClientTimeouts) -> web.Application:
    """Returns all routes of a gateway."""
    routes = GatewayRoutes(gateway)
    app = web.Application(
        client_max_size=MAX_REQUEST_BYTES, middlewares=[routes.as_errors]
    )
    app[STRANGERS] = Strangers(timeouts)
    _add_session_routes(app, routes)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_post("/sessions", routes.create)
    app.router.add_get("/sessions/{session}", routes.show)
    app.router.add_delete("/sessions/{session}", routes.delete)
    app.router.add_post("/sessions/{session}/reward", routes.reward)
    app.router.add_delete("/sessions/{session}/agents/{agent}", routes.discard)
    return app


def _add_session_routes(app: web.Application, routes: GatewayRoutes) -> None:
    dialects = routes.dialects
    endpoints = [endpoint for dialect in dialects for endpoint in dialect.endpoints]
    lookups = [lookup for dialect in dialects for lookup in dialect.lookups]
    controls = [control for dialect in dialects for control in dialect.controls]
    for prefix in ("", "/sessions/{session}"):
        for endpoint in endpoints:
            handler = routes.count if endpoint.write is None else routes.answer
            add_post = partial(app.router.add_post, f"{prefix}{endpoint.path}")
            add_post(partial(handler, endpoint))
        for lookup in lookups:
            add = app.router.add_delete if lookup.forgets else app.router.add_get
            add(f"{prefix}{lookup.path}", partial(routes.look_up, lookup))
        for control in controls:
            handle = partial(routes.control, control)
            app.router.add_route(control.method, f"{prefix}{control.path}", handle)
        app.router.add_get(f"{prefix}/health", routes.health)
        app.router.add_get(f"{prefix}/v1/models", routes.models)
        app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", routes.model)
