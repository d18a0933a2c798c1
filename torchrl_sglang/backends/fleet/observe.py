"""Polls servers for their versions and adapters; a response is an observation.

Several engine objects use the same servers: a trainer's, collectors', copies in other
processes. Any of them may send weights or load adapters, and the owner restarts
servers. So the servers hold the truth: each engine object polls servers out of rotation
and servers with a failed request. Working servers are not polled.

Neither a hanging nor a paused server generates a token, and a server is paused during a
weight update of any engine object. So a missing token counts only if the server
reports, before and after, that it generates; see :func:`hangs`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from torchrl_sglang.backends.client.capabilities import check_same
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.actions import Action, Confirm, Tell
from torchrl_sglang.backends.fleet.adapter_calls import AdapterCalls
from torchrl_sglang.backends.fleet.adapters import newest_loads
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import Answered, Silent
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.weights_state import ServedWeights, version_order
from torchrl_sglang.errors import (
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.support.checks import some_of
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import ServerCapabilities, ServerStats

POLL_TIMEOUT_SECONDS = 5.0
"""Timeout for a response, which a process in front of the scheduler sends."""

RETURN_SECONDS = 2.0
"""Timeout for the first response of a server that is down, which updates wait for."""

_REFUSED = {
    "input_ids": [0],
    "sampling_params": {"temperature": -1.0, "max_new_tokens": 1},
}
"""An invalid request: a server refuses it, or lets it wait while it is paused."""

Find = Callable[[str], Awaitable[ServerCapabilities]]
"""Queries the capabilities of the server at an address."""


async def discover(fleet: Fleet, find: Find) -> ServerCapabilities:
    """Queries capabilities and adapters; all owned servers must respond, else any."""
    answers = await _ask_all(fleet.replicas, find)
    answered: dict[int, ServerCapabilities] = {}
    events: list[Answered | Silent] = []
    for replica, answer in zip(fleet.replicas, answers, strict=True):
        if isinstance(answer, ServerCapabilities):
            answered[replica.rank] = answer
        elif isinstance(answer, ServerError) and replica.handle is None:
            events.append(Silent(asked=replica, reason=str(answer)))
        else:
            raise answer
    if not answered:
        raise next(error for error in answers if isinstance(error, ServerError))
    (first, capabilities_of_first), *others_answered = answered.items()
    urls = [replica.url for replica in fleet.replicas]
    for rank, capabilities in others_answered:
        check_same(capabilities_of_first, urls[first], capabilities, urls[rank])
    newest = max(
        (capabilities.weight_version for capabilities in answered.values()),
        key=version_order,
    )
    fleet.change_weights(lambda weights: ServedWeights.reported(newest))
    events += (
        Answered(
            asked=fleet.replicas[rank],
            version=capabilities.weight_version,
            start_id=capabilities.start_id,
            held=frozenset(capabilities.adapters),
        )
        for rank, capabilities in answered.items()
    )
    _tell([action for event in events for action in fleet.apply(event)])
    adapters = newest_loads(capabilities_of_first.adapters, newest)
    fleet.change_adapters(lambda now: now.adopt(adapters))
    return capabilities_of_first


def _tell(actions: Sequence[Action]) -> None:
    for text in some_of(action.text for action in actions if isinstance(action, Tell)):
        torchrl_logger.warning(text)


async def _ask_all(
    replicas: Sequence[Replica], find: Find
) -> list[ServerCapabilities | Exception]:
    fewest = len(replicas)

    async def ask(replica: Replica) -> ServerCapabilities | Exception:
        nonlocal fewest
        try:
            answer = await find(replica.url)
        except Exception as error:  # noqa: BLE001 - Raised below, unless one is enough.
            return error
        if replica.rank > fewest:
            # Only the first server's arguments are used, and they are large.
            return replace(answer, server_args={})
        fewest = replica.rank
        return answer

    return await fan_out(ask, replicas)


class ServerPoller:
    """Polls the servers of a fleet, which it does not hold."""

    def __init__(
        self,
        http: HttpClient,
        capabilities: ServerCapabilities,
        adapters: AdapterCalls,
        find: Find,
    ) -> None:
        self._http = http
        self._capabilities = capabilities
        self.adapters = adapters
        """Lists the LoRA adapters of servers."""
        self._find = find

    async def poll(self, fleet: Fleet) -> None:
        """Polls servers out of rotation, and suspected servers."""
        look = _Look(lambda rank: self._poll(fleet, rank))
        ranks = [replica.rank for replica in fleet.state.to_poll]
        # Servers in this round are not polled by another round.
        fleet.change(lambda now: now.without_suspicion(ranks))
        await fan_out(lambda rank: self._poll(fleet, rank, look), ranks)

    async def _poll(self, fleet: Fleet, rank: int, look: _Look | None = None) -> None:
        fleet.change(lambda now: now.without_suspicion([rank]))
        replica = fleet.state.find(rank)
        if replica is None:
            return
        event = await self.observe(fleet, replica)
        actions = fleet.apply(event)
        if isinstance(event, Answered) and Confirm(rank=rank) in actions:
            if look is None:
                # This poll was to confirm others; the next round polls the server
                # again.
                return
            await self._confirm(fleet, event, look)
            fleet.apply(replace(event, confirmed=True))

    async def _confirm(self, fleet: Fleet, event: Answered, look: _Look) -> None:
        """Polls the other servers before a server counts as current."""
        rank = event.asked.rank
        replica = fleet.state.find(rank)
        if event.held is not None and replica is not None and replica.restarted:
            # The other servers hold the loads of other engine objects.
            await self.adapters.discover(fleet)
        state = fleet.state
        replica = state.find(rank)
        if replica is None:
            return
        if (
            not state.misses_adapters(replica)
            and event.version == state.weights.version
        ):
            # Another engine object may have sent the others newer weights.
            await look.at_serving(fleet)

    async def observe(self, fleet: Fleet, asked: Replica) -> Answered | Silent:
        """Polls a server for its version, start and adapters."""
        try:
            return await self._ask(fleet, asked)
        except SGLangError as error:
            torchrl_logger.debug(f"A server did not answer a poll: {error}")
            gone = isinstance(error, (ServerUnavailableError, ServerTimeoutError))
            return Silent(asked=asked, reason=str(error), unreachable=gone)

    async def _ask(self, fleet: Fleet, asked: Replica) -> Answered:
        capabilities, start_id, held = self._capabilities, "", None
        control = ControlPlane(self._http, fleet, capabilities)
        urls, timeout = [asked.url], POLL_TIMEOUT_SECONDS
        if asked.state == "down":
            await control.weight_versions(timeout=RETURN_SECONDS, urls=urls)
            current = await self._find(asked.url)
            check_same(capabilities, fleet.replicas[0].url, current, asked.url)
            start_id = current.start_id
        if capabilities.has_lora:
            (names,) = await control.adapters(timeout=timeout, urls=urls)
            held = frozenset(names)
            lacks = not fleet.state.wanted_adapters <= held
            if not start_id and (lacks or not asked.start_id):
                start_id = await control.start_id(asked.url)
        (version,) = await control.weight_versions(timeout=timeout, urls=urls)
        return Answered(asked=asked, version=version, start_id=start_id, held=held)


class _Look:
    """Polls the serving servers, once for all callers of a round."""

    def __init__(self, poll: Callable[[int], Awaitable[None]]) -> None:
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
            serving = (r for r in fleet.replicas if r.state == "serving")
            await fan_out(self._poll, [replica.rank for replica in serving])


async def ask_stats(fleet: Fleet, control: ControlPlane) -> tuple[ServerStats, ...]:
    """Returns each server's load and weight version."""

    async def one(replica: Replica) -> ServerStats:
        running = queued = usage = version = None
        # A sleeping server does nothing, and is about to be woken up.
        if replica.runs and not replica.released:
            urls, timeout = [replica.url], POLL_TIMEOUT_SECONDS
            try:
                running, queued, usage = await control.load_of(*urls, timeout=timeout)
                (version,) = await control.weight_versions(timeout=timeout, urls=urls)
            except SGLangError as error:
                torchrl_logger.debug(f"No statistics of a server: {error}")
        replica = fleet.state.find(replica.rank) or replica
        return ServerStats(
            url=replica.url,
            state=replica.status,
            running=running,
            queued=queued,
            cache_usage=usage,
            weight_version=version,
            restarts=replica.restarts,
            reason=replica.reason,
        )

    return tuple(await fan_out(one, fleet.replicas))


async def hangs(
    http: HttpClient,
    capabilities: ServerCapabilities,
    url: str,
    *,
    timeout: float = 15.0,
    probe: float = 5.0,
) -> bool:
    """Returns whether a server gives no token although nobody has paused it.

    After 20 s without a token, SGLang reports itself as unhealthy, and no longer
    whether it is paused.
    """
    probe = min(timeout, probe)

    async def is_paused() -> bool:
        if capabilities.tells_paused:
            return await _succeeds(http, f"{url}/ready", probe) is False
        return await _holds_requests(http, url, probe)

    if await is_paused() or await _succeeds(http, f"{url}/health_generate", timeout):
        return False
    paused = await is_paused()
    if paused and capabilities.tells_paused:
        # A server with a detected hang reports the same.
        paused = await _holds_requests(http, url, probe)
    return not paused


async def _succeeds(http: HttpClient, url: str, timeout: float) -> bool | None:
    """Returns whether a GET succeeds; ``None`` if there is no response."""
    try:
        return (await http.request("GET", url, timeout=timeout)).ok
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
        return None


async def _holds_requests(http: HttpClient, url: str, timeout: float) -> bool:
    """Returns whether requests wait in a live server."""
    try:
        await http.request("POST", f"{url}/generate", _REFUSED, timeout=timeout)
    except ServerTimeoutError:
        return bool(await _succeeds(http, f"{url}/model_info", timeout))
    except SGLangError as error:
        torchrl_logger.debug(f"A probe failed: {error}")
    return False
