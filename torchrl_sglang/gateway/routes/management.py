"""Routes of the gateway itself: sessions are made, rewarded, shown and dropped."""

from __future__ import annotations

from aiohttp import web

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.routes.content import json_response, read_json
from torchrl_sglang.gateway.routes.sessions import SessionRoutes

REWARDED = ("turn", "agent", "branch")
"""Parts of a session that a reward may be of."""


class GatewayRoutes(SessionRoutes):
    """Handles all requests."""

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Answers with metrics, to the owner or to anybody on this machine."""
        self.access.check_may_read(request)
        kind, content = await self._gateway.metrics(request.headers.get("Accept", ""))
        return web.Response(body=content, headers={"Content-Type": kind})

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Makes a session."""
        self.access.check_owner(request)
        given = await read_json(request)
        session = self._gateway.session(given.get("name"), group=given.get("group"))
        url = session.url
        if self._gateway.public_url is None:
            # The client can reach the machine that it has reached.
            url = f"{request.scheme}://{request.host}/sessions/{session.name}"
        about = {"name": session.name, "key": session.key, "url": url}
        more = {"base_url": f"{url}/v1", "expires": session.expires}
        await self._gateway.written()
        return json_response({**about, **more})

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Answers with a session's trajectories."""
        session = self.access.own(request)
        return json_response(
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
        """Forgets a session."""
        self._gateway.drop(self.access.own(request))
        await self._gateway.written()
        return json_response({})

    async def reward(self, request: web.Request) -> web.StreamResponse:
        """Sets a reward of a session or a part of it."""
        session, given = self.access.own(request), await read_json(request)
        value = given.pop("reward", None)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigurationError(f"reward={value!r} must be a number.")
        turn, agent, branch = (given.pop(name, None) for name in REWARDED)
        if given:
            raise ConfigurationError(
                f"{', '.join(given)}: a reward is of the session, or of a "
                f"{', '.join(REWARDED)}."
            )
        self._gateway.set_reward(session, value, turn=turn, agent=agent, branch=branch)
        await self._gateway.written()
        return json_response({})
