"""Asks servers what they are and what they hold, and takes them back.

Several engine objects use the same servers: a trainer's, collectors', copies in other
processes. Any of them may send weights or load adapters, and the owner restarts
servers. So the servers hold the truth: each engine object polls those that are out of
rotation or where a request failed. Servers that work are not polled.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.capabilities import check_same
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.weights_state import WeightsState, version_order
from torchrl_sglang.errors import (
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.support.checks import some_of
from torchrl_sglang.types import ServerCapabilities, ServerStats

POLL_TIMEOUT_SECONDS = 5.0
"""Timeout for each answer; a process in front of the scheduler gives it."""

Find = Callable[[str], Awaitable[ServerCapabilities]]
"""Asks the server at an address what it can do."""


async def discover(fleet: Fleet, find: Find) -> ServerCapabilities:
    """Finds out what servers can do and hold; ours, and at least one, must answer."""
    answers = await _ask_all(fleet.replicas, find)
    found: dict[Replica, ServerCapabilities] = {}
    away: dict[Replica, ServerError] = {}
    for replica, answer in zip(fleet.replicas, answers, strict=True):
        if isinstance(answer, ServerError) and replica.handle is None:
            away[replica] = answer
        elif isinstance(answer, Exception):
            raise answer
        else:
            found[replica] = answer
    if not found:
        raise next(iter(away.values()))
    (first, known), *others = found.items()
    for replica, capabilities in others:
        check_same(known, first.url, capabilities, replica.url)
    newest = max((c.weight_version for c in found.values()), key=version_order)
    fleet.weights_state = WeightsState(newest)
    for replica, error in away.items():
        fleet.mark_down(replica, str(error))
    for line in some_of(map(_out_of_rotation, away, away.values())):
        torchrl_logger.warning(line)
    for replica, capabilities in found.items():
        held = set(capabilities.adapters)
        fleet.change(replica, start_id=capabilities.start_id, held_adapters=held)
        fleet.report_version(replica, capabilities.weight_version)
    return known


async def _ask_all(
    replicas: Sequence[Replica], find: Find
) -> list[ServerCapabilities | Exception]:
    """Returns what each server can do, or its error."""
    fewest = len(replicas)

    async def ask(pair: tuple[int, Replica]) -> ServerCapabilities | Exception:
        nonlocal fewest
        index, replica = pair
        try:
            answer = await find(replica.url)
        except Exception as error:  # noqa: BLE001 - Raised below, unless one is enough.
            return error
        if index > fewest:
            # Only those of the first one are needed, and they are large.
            return replace(answer, server_args={})
        fewest = index
        return answer

    return await fan_out(ask, enumerate(replicas))


def _out_of_rotation(replica: Replica, error: SGLangError) -> str:
    return f"The server at {replica.url} gets no requests until it answers: {error}"


def _lose(fleet: Fleet, replica: Replica, error: SGLangError) -> None:
    torchrl_logger.warning(_out_of_rotation(replica, error))
    fleet.mark_down(replica, str(error))


class AdapterReloader(Protocol):
    """Loads LoRA adapters again into servers that were started again."""

    @property
    def can_reload(self) -> bool:
        """Whether this engine object has loaded adapters that it can load again."""

    async def discover(self) -> None:
        """Finds the adapters that any engine object has loaded."""

    async def discover_changes(self) -> None:
        """Finds them where one of a few servers tells of a change."""

    def reload(self, replica: Replica) -> None:
        """Begins to load the wanted adapters that a server lacks."""


class ServerPoller:
    """Polls the servers of a fleet, which it does not hold."""

    def __init__(
        self,
        http: HttpClient,
        capabilities: ServerCapabilities,
        adapters: AdapterReloader,
        find: Find,
    ) -> None:
        self._http = http
        self._capabilities = capabilities
        self._find = find
        # They hold the fleet.
        self._adapters = weakref.ref(adapters)

    @property
    def adapters(self) -> AdapterReloader | None:
        """The adapters of the engine object, if they can be loaded again."""
        adapters = self._adapters()
        return adapters if adapters is not None and adapters.can_reload else None

    async def poll(self, fleet: Fleet) -> None:
        """Polls the servers that are out of rotation or suspected."""
        look = _Look(lambda replica: self._poll(fleet, replica, look))
        replicas = fleet.to_poll
        for replica in replicas:
            # Those that wait for their turn are not polled by another round.
            fleet.change(replica, suspected=False)
        await fan_out(lambda each: self._poll(fleet, each, look), replicas)

    async def _poll(self, fleet: Fleet, replica: Replica, look: _Look) -> None:
        fleet.change(replica, suspected=False)
        adapters, asked = self._adapters(), replica.url
        try:
            if replica.state == "down":
                found = await self._find(asked)
                if replica.url != asked:
                    return
                known = fleet.replicas[0].url
                check_same(self._capabilities, known, found, replica.url)
                fleet.is_back(replica, found.start_id)
            version = await self._ask(fleet, replica)
            if replica.restarted and self._capabilities.has_lora and adapters:
                # The other servers hold what other engine objects have loaded.
                await adapters.discover()
            waits = replica.state == "stale" and not fleet.misses_adapters(replica)
            if waits and version == fleet.weights.version:
                # Another engine object may have sent the others newer weights.
                await look.at_serving(fleet)
        except SGLangError as error:
            if replica.url == asked:
                self._no_answer(fleet, replica, error)
            return
        if replica.url != asked:
            # It was started again elsewhere, and is polled there.
            return
        fleet.report_version(replica, version)
        if adapters is not None and fleet.misses_adapters(replica):
            adapters.reload(replica)

    async def _ask(self, fleet: Fleet, replica: Replica) -> str:
        """Records the adapters that a server holds, and returns its weight version."""
        control = ControlPlane(self._http, fleet, self._capabilities)
        urls, timeout = [replica.url], POLL_TIMEOUT_SECONDS
        if self._capabilities.has_lora:
            before = set(replica.held_adapters)
            (held,) = await control.adapters(timeout=timeout, urls=urls)
            fleet.report_adapters(replica, held, before)
            if not replica.start_id:
                start_id = await control.start_id(replica.url)
                fleet.change(replica, start_id=start_id)
        (version,) = await control.weight_versions(timeout=timeout, urls=urls)
        return version

    def _no_answer(self, fleet: Fleet, replica: Replica, error: SGLangError) -> None:
        unreachable = isinstance(error, (ServerUnavailableError, ServerTimeoutError))
        last = fleet.serving == [replica.url]
        stays = replica.state == "serving" and (last or not unreachable)
        if fleet.owns(replica) or (stays and not unreachable):
            # The supervisor restarts owned servers.
            torchrl_logger.debug(f"A server did not answer a poll: {error}")
        elif stays:
            # The outcome of its requests says more than that no server is left.
            if fleet.does_not_answer(replica, str(error)):
                torchrl_logger.warning(
                    f"The server at {replica.url}, the only one that serves, does not "
                    f"answer; requests fail until it does: {error}"
                )
        elif replica.state != "down":
            _lose(fleet, replica, error)
        else:
            fleet.change(replica, reason=str(error))


class _Look:
    """Polls the servers that serve, once for all of a round that need it."""

    def __init__(self, poll: Callable[[Replica], Awaitable[None]]) -> None:
        self._poll = poll
        self._lock = asyncio.Lock()
        self._began_at = -math.inf

    async def at_serving(self, fleet: Fleet) -> None:
        """Returns when all have been polled since this call."""
        since = time.monotonic()
        async with self._lock:
            if self._began_at >= since:
                return
            self._began_at = time.monotonic()
            serving = [each for each in fleet.replicas if each.state == "serving"]
            await fan_out(self._poll, serving)


async def ask_stats(fleet: Fleet, control: ControlPlane) -> tuple[ServerStats, ...]:
    """Asks each server what it does."""

    async def one(replica: Replica) -> ServerStats:
        running = queued = version = None
        if replica.runs:
            urls, timeout = [replica.url], POLL_TIMEOUT_SECONDS
            try:
                ((running, queued),) = await control.loads(timeout=timeout, urls=urls)
                (version,) = await control.weight_versions(timeout=timeout, urls=urls)
            except SGLangError as error:
                torchrl_logger.debug(f"No statistics of a server: {error}")
        return ServerStats(
            url=replica.url,
            state=replica.status,
            running=running,
            queued=queued,
            weight_version=version,
            restarts=replica.restarts,
            reason=replica.reason,
        )

    return tuple(await fan_out(one, fleet.replicas))
