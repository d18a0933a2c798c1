"""Routes of the gateway itself: creates, rewards, shows and drops sessions."""

from __future__ import annotations

from aiohttp import web

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.routes.content import json_response, read_json
from torchrl_sglang.gateway.routes.sessions import SessionRoutes

REWARDED = ("turn", "agent", "branch")
"""Parts of a session with a possible reward."""


class GatewayRoutes(SessionRoutes):
    """Handles all requests."""

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Returns metrics to the owner or to local clients."""
        self.access.check_may_read(request)
        kind, content = await self._gateway.metrics(request.headers.get("Accept", ""))
        return web.Response(body=content, headers={"Content-Type": kind})

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Creates a session."""
        self.access.check_owner(request)
        options = await read_json(request)
        session = self._gateway.session(options.get("name"), group=options.get("group"))
        url = session.url
        if self._gateway.public_url is None:
            # The client has already reached this machine under this name.
            url = f"{request.scheme}://{request.host}/sessions/{session.name}"
        about = {"name": session.name, "key": session.key, "url": url}
        links = {"base_url": f"{url}/v1", "expires": session.expires}
        await self._gateway.keeper.written()
        return json_response({**about, **links})

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
                        "token_ids": trajectory.token_ids,
                        "turns": [turn.number for turn in trajectory.turns],
                        "trained": list(trajectory.trained),
                        "branches": [turn.branch for turn in trajectory.turns],
                        "reward": trajectory.reward,
                        "rewards": list(trajectory.rewards),
                        "returns": trajectory.returns,
                        "messages": trajectory.messages,
                    }
                    for trajectory in session.trajectories()
                ],
            }
        )

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Drops a session."""
        self._gateway.drop(self.access.own(request))
        await self._gateway.keeper.written()
        return json_response({})

    async def reward(self, request: web.Request) -> web.StreamResponse:
        """Sets a reward of a session or a part of it."""
        session, fields = self.access.own(request), await read_json(request)
        value = fields.pop("reward", None)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigurationError(f"reward={value!r} must be a number.")
        turn, agent, branch = (fields.pop(name, None) for name in REWARDED)
        if fields:
            raise ConfigurationError(
                f"{', '.join(fields)}: a reward is of the session, or of a "
                f"{', '.join(REWARDED)}."
            )
        self._gateway.set_reward(session, value, turn=turn, agent=agent, branch=branch)
        await self._gateway.keeper.written()
        return json_response({})

    async def discard(self, request: web.Request) -> web.StreamResponse:
        """Removes the turns of an agent from a session."""
        session = self.access.own(request)
        self._gateway.discard(session, request.match_info["agent"])
        await self._gateway.keeper.written()
        return json_response({})
