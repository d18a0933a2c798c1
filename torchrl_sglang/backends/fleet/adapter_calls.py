"""Lists, loads and drops the LoRA adapters of servers.

Each engine object loads an adapter into all servers, so they hold the truth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TypeVar

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.actions import DropAdapter, LoadAdapter
from torchrl_sglang.backends.fleet.adapter_events import (
    AdapterDropped,
    AdapterSent,
    AdaptersListed,
)
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import RestartNoticed
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.errors import RequestRefusedError, SGLangError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import ServerCapabilities

MOST_ASKED = 16

UNLOAD_SECONDS = 60.0

T = TypeVar("T")


async def _answer(call: Awaitable[T], default: T) -> T:
    try:
        return await call
    except SGLangError as error:
        torchrl_logger.debug(f"A server did not answer: {error}")
        return default


class AdapterCalls:
    """Calls about adapters to the servers of a fleet, which it does not hold."""

    def __init__(self, http: HttpClient, capabilities: ServerCapabilities) -> None:
        self._http = http
        self.capabilities = capabilities
        self._looked_at = -math.inf
        # Position of the next server to poll.
        self._next = 0

    def _control(self, fleet: Fleet) -> ControlPlane:
        return ControlPlane(self._http, fleet, self.capabilities)

    # Looking.

    async def discover_changes(self, fleet: Fleet, *, after: float = 0.0) -> None:
        """Discovers adapters if any of a few servers, in turn, holds others.

        Skipped within ``after`` seconds of the last discovery. A request refused for a
        missing adapter triggers a discovery, too.
        """
        if time.monotonic() - self._looked_at < after:
            return
        serving = _serving(fleet)
        if len(serving) > MOST_ASKED:
            self._looked_at = time.monotonic()
            start = self._next % len(serving)
            self._next = start + MOST_ASKED
            held = await self.ask(fleet, [*serving, *serving][start : self._next])
            seen = fleet.state.adapters.seen
            if all(seen.get(rank) == names for rank, names in held.items()):
                return
        await self.discover(fleet)

    async def discover(self, fleet: Fleet) -> None:
        """Discovers the adapters of all engine objects."""
        self._looked_at = time.monotonic()
        previous = fleet.state.adapters
        held = await self.ask(fleet, _serving(fleet))
        for rank in [r for r in held if previous.names - previous.dropped - held[r]]:
            replica = fleet.state.find(rank)
            if replica is None or await self._is_restarted(fleet, replica):
                # Stale until its adapters are reloaded.
                del held[rank]
        version = ""
        loads = previous.find(held, fleet.weights.version) if held else previous.wanted
        if not previous.wanted.keys() <= loads.keys():
            urls = [r.url for r in fleet.replicas if r.rank in held]
            versions = self._control(fleet).weight_versions(urls=urls)
            version = max(["", *await _answer(versions, [])], key=version_order)
        fleet.apply(AdaptersListed(before=previous.wanted, held=held, version=version))

    async def ask(
        self, fleet: Fleet, replicas: Sequence[Replica]
    ) -> dict[int, frozenset[str]]:
        """Returns rank -> adapters on a server, without unreachable servers."""
        holdings: dict[int, frozenset[str]] = {}
        control = self._control(fleet)

        async def ask(replica: Replica) -> None:
            for names in await _answer(control.adapters(urls=[replica.url]), []):
                held = holdings[replica.rank] = frozenset(names)
                change = partial(Replica.holding, adapters=held, since=replica)
                fleet.learn(replica, change)

        await fan_out(ask, replicas)
        return holdings

    async def _is_restarted(self, fleet: Fleet, replica: Replica) -> bool:
        """Takes a restarted server without its adapters out of rotation."""
        start_id = await _answer(self._control(fleet).start_id(replica.url), "")
        restarted = bool(start_id and replica.start_id) and start_id != replica.start_id
        if restarted:
            fleet.apply(RestartNoticed(rank=replica.rank, start_id=start_id))
        return restarted

    # Acting.

    async def load(self, fleet: Fleet, action: LoadAdapter) -> None:
        """Loads an adapter into servers."""
        adapter, content = action.adapter.adapter, action.adapter.content
        targets = {replica.url: replica for replica in action.servers}
        outcomes: dict[str, SGLangError | None] = {}
        if content is not None:
            try:
                outcomes = await self._control(fleet).load_lora_adapter(
                    adapter.served_as,
                    content.path,
                    tensors=content.tensors,
                    config=content.config,
                    pinned=adapter.pinned,
                    timeout=action.timeout,
                    urls=list(targets),
                )
            except SGLangError as error:
                outcomes = dict.fromkeys(targets, error)
        fleet.notice_deaths()
        for url, target in targets.items():
            sent_as, answer = adapter.served_as, outcomes.get(url)
            fleet.apply(AdapterSent(asked=target, served_as=sent_as, error=answer))

    async def drop(self, fleet: Fleet, action: DropAdapter) -> None:
        """Has every server drop an adapter."""
        errors = await self.unload(fleet, action.served_as, UNLOAD_SECONDS)
        fleet.apply(AdapterDropped(served_as=action.served_as, kept=errors))

    async def unload(
        self, fleet: Fleet, served_as: str, timeout: float
    ) -> dict[str, SGLangError]:
        """Unloads an adapter from every server; returns the errors by address."""
        control = self._control(fleet)
        outcomes = await control.unload_lora_adapter(served_as, timeout=timeout)
        return {
            url: error
            for url, error in outcomes.items()
            # A refusing server does not hold it.
            if error is not None and not isinstance(error, RequestRefusedError)
        }


def _serving(fleet: Fleet) -> list[Replica]:
    return [replica for replica in fleet.replicas if replica.state == "serving"]
