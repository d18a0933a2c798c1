"""Polls servers that are out of rotation for what they hold, and takes them back.

Several engine objects use the same servers: a trainer's, collectors', copies in other
processes. Any of them may send weights or load adapters, and the owner restarts
servers. So the servers hold the truth: each engine object polls those that are out of
rotation or where a request failed. Servers that work are not polled.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client import capabilities as capabilities_module
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.errors import (
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.types import ServerCapabilities

__all__ = ["AdapterReloader", "ServerPoller"]

POLL_TIMEOUT_SECONDS = 5.0
"""Timeout for each answer; a process in front of the scheduler gives it."""


class AdapterReloader(Protocol):
    """Loads LoRA adapters again into servers that were started again."""

    @property
    def can_reload(self) -> bool:
        """Whether this engine object has loaded adapters that it can load again."""

    async def discover(self) -> None:
        """Finds the adapters that any engine object has loaded."""

    def reload(self, replica: Replica) -> None:
        """Begins to load the wanted adapters that a server lacks."""


class ServerPoller:
    """Polls the servers of a fleet, which it does not hold."""

    def __init__(
        self,
        http: HttpClient,
        capabilities: ServerCapabilities,
        adapters: AdapterReloader,
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

    @property
    def can_reload_adapters(self) -> bool:
        """Whether this engine object has loaded adapters that it can load again."""
        adapters = self._adapters()
        return adapters is not None and adapters.can_reload

    async def discover_adapters(self) -> None:
        """Finds the adapters that are loaded, and the servers that lack some."""
        adapters = self._adapters()
        if adapters is not None:
            await adapters.discover()

    async def poll(self, fleet: Fleet) -> None:
        """Polls the servers that are out of rotation or suspected."""
        await asyncio.gather(*(self._poll(fleet, each) for each in fleet.to_poll))

    async def _poll(self, fleet: Fleet, replica: Replica) -> None:
        fleet.suspects.discard(replica.url)
        try:
            if replica.state == "down":
                fleet.is_back(replica, await self._check_same(fleet, replica))
            version = await self._ask(fleet, replica)
            if replica.restarted and self._capabilities.has_lora:
                # The other servers hold what other engine objects have loaded.
                await self.discover_adapters()
            waits = replica.state == "stale" and not fleet.misses_adapters(replica)
            if waits and version == fleet.weights.version:
                # Another engine object may have sent the others newer weights.
                serving = [each for each in fleet.replicas if each.state == "serving"]
                await asyncio.gather(*(self._poll_version(fleet, r) for r in serving))
        except SGLangError as error:
            self._no_answer(fleet, replica, error)
            return
        fleet.report_version(replica, version)
        adapters = self._adapters()
        if adapters is not None and fleet.misses_adapters(replica):
            adapters.reload(replica)

    async def _poll_version(self, fleet: Fleet, replica: Replica) -> None:
        try:
            fleet.report_version(replica, await self._ask(fleet, replica))
        except SGLangError as error:
            self._no_answer(fleet, replica, error)

    async def _ask(self, fleet: Fleet, replica: Replica) -> str:
        """Records the adapters that a server holds, and returns its weight version."""
        control = ControlPlane(self._http, fleet, self._capabilities)
        urls, before = [replica.url], set(replica.held_adapters)
        timeout = POLL_TIMEOUT_SECONDS
        if self._capabilities.has_lora:
            (held,) = await control.adapters(timeout=timeout, urls=urls)
            fleet.report_adapters(replica, held, before)
            if not replica.start_id:
                start_id = await control.start_id(replica.url)
                fleet.change(replica, start_id=start_id)
        (version,) = await control.weight_versions(timeout=timeout, urls=urls)
        return version

    async def _check_same(self, fleet: Fleet, replica: Replica) -> str:
        """Checks that a server still serves the same, and returns its start id."""
        found = await capabilities_module.find_out(
            self._http,
            replica.url,
            model=self._model,
            trust_remote_code=self._trust_remote_code,
        )
        known = fleet.replicas[0].url
        capabilities_module.check_same(self._capabilities, known, found, replica.url)
        return found.start_id

    def _no_answer(self, fleet: Fleet, replica: Replica, error: SGLangError) -> None:
        unreachable = isinstance(error, (ServerUnavailableError, ServerTimeoutError))
        last = fleet.serving == [replica.url]
        if fleet.owns(replica) or (
            replica.state == "serving" and (last or not unreachable)
        ):
            # The supervisor restarts owned servers. The last one that serves stays:
            # the outcome of its requests says more.
            torchrl_logger.debug(f"A server did not answer a poll: {error}")
        elif replica.state != "down":
            torchrl_logger.warning(
                f"The server at {replica.url} gets no requests until it answers: "
                f"{error}"
            )
            fleet.mark_down(replica, str(error))
        else:
            fleet.change(replica, reason=str(error))
