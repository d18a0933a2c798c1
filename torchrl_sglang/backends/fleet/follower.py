"""Follows servers: what each says of itself decides whether it gets requests.

Several engine objects use the same servers: a trainer's, collectors', copies in other
processes. Any of them can send weights or load adapters, and the owner starts servers
again. So the servers hold the truth: every engine object asks those that are out of
rotation, or where a request failed, for their weight version and their adapters.
Servers that work are not asked.
"""

from __future__ import annotations

import asyncio
import weakref

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client import capabilities as capabilities_module
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet, Replica
from torchrl_sglang.backends.lora.registry import Adapters
from torchrl_sglang.errors import (
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import ServerCapabilities

__all__ = ["Follower"]

ANSWER_SECONDS = 5.0
"""Budget for a server to say what it has; a process in front of its scheduler tells."""


class Follower:
    """Looks at the servers of an engine. It holds nothing that owns servers.

    Args:
        http: connections.
        capabilities: what the servers can do; one that comes back must be alike.
        adapters: loads what a server lacks.
        model: see :func:`.capabilities.find_out`.
        trust_remote_code: see the same.
    """

    def __init__(
        self,
        http: HttpClient,
        capabilities: ServerCapabilities,
        adapters: Adapters,
        *,
        model: str | None,
        trust_remote_code: bool = False,
    ) -> None:
        self._http = http
        self._capabilities = capabilities
        # They hold the fleet.
        self._adapters = weakref.ref(adapters)
        self._model = model
        self._trust_remote_code = trust_remote_code

    async def look(self, fleet: Fleet) -> None:
        """Looks at the replicas that are out of rotation or suspected."""
        await asyncio.gather(*(self._look_at(fleet, each) for each in fleet.unsettled))

    async def look_at_adapters(self) -> None:
        """Has what servers lack loaded again that were started again meanwhile."""
        adapters = self._adapters()
        if adapters is not None:
            await adapters.find()

    @property
    def keeps_adapters(self) -> bool:
        """Whether this engine object has loaded adapters and can do so again."""
        adapters = self._adapters()
        return adapters is not None and adapters.keeps_any

    async def _look_at(self, fleet: Fleet, replica: Replica) -> None:
        fleet.suspects.discard(replica.url)
        try:
            if replica.state == "down":
                fleet.is_back(replica, await self._ask_again(fleet, replica))
            version = await self._ask(fleet, replica)
            if replica.restarted and self._capabilities.has_lora:
                # What others have loaded is on the servers that were not.
                await self.look_at_adapters()
            waits = replica.state == "stale" and not fleet.lacks_adapters(replica)
            if waits and version == fleet.weight_version:
                # What the others have is newer, if another engine object has sent it.
                await self._ask_others(fleet)
        except SGLangError as error:
            self._does_not_answer(fleet, replica, error)
            return
        fleet.has_version(replica, version)
        adapters = self._adapters()
        if adapters is not None and fleet.lacks_adapters(replica):
            adapters.equip(replica)

    async def _ask(self, fleet: Fleet, replica: Replica) -> str:
        control = ControlPlane(self._http, fleet, self._capabilities)
        urls, before = [replica.url], set(replica.adapters)
        if self._capabilities.has_lora:
            (held,) = await control.adapters(timeout=ANSWER_SECONDS, urls=urls)
            fleet.holds(replica, held, before)
            if not replica.start_id:
                replica.start_id = await control.start_id(replica.url)
        (version,) = await control.weight_versions(timeout=ANSWER_SECONDS, urls=urls)
        return version

    async def _ask_others(self, fleet: Fleet) -> None:
        async def one(replica: Replica) -> None:
            try:
                fleet.has_version(replica, await self._ask(fleet, replica))
            except SGLangError as error:
                self._does_not_answer(fleet, replica, error)

        serving = [each for each in fleet.replicas if each.state == "serving"]
        await asyncio.gather(*map(one, serving))

    async def _ask_again(self, fleet: Fleet, replica: Replica) -> str:
        """Checks that a server that was away is still alike, and returns its start."""
        found = await capabilities_module.find_out(
            self._http,
            replica.url,
            model=self._model,
            trust_remote_code=self._trust_remote_code,
        )
        known = fleet.replicas[0].url
        capabilities_module.check_same(self._capabilities, known, found, replica.url)
        return found.start_id

    def _does_not_answer(
        self, fleet: Fleet, replica: Replica, error: SGLangError
    ) -> None:
        unreachable = isinstance(error, (ServerUnavailableError, ServerTimeoutError))
        last = fleet.serving == [replica.url]
        if fleet.owns(replica) or (
            replica.state == "serving" and (last or not unreachable)
        ):
            # The supervisor sees to what is owned, and the last one that serves stays:
            # what its requests come to tells more.
            torchrl_logger.debug(f"A server does not tell what it has: {error}")
            return
        if replica.state != "down":
            torchrl_logger.warning(
                f"The server at {replica.url} gets no requests until it answers: "
                f"{error}"
            )
            fleet.mark_down(replica, str(error))
        replica.reason = str(error)
