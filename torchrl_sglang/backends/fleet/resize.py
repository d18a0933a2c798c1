"""Adds servers to a running engine, and removes servers from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from threading import Lock
from typing import Any

from torchrl_sglang.backends.client.capabilities import check_same
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.fleet.actions import Stop
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.observe import Find
from torchrl_sglang.backends.fleet.replica import (
    NotStartedError,
    Replica,
    ServerHandle,
    stop_all,
)
from torchrl_sglang.backends.fleet.resize_events import (
    Joined,
    LeaveBegan,
    LeaveGivenUp,
    Left,
    check_can_join,
)
from torchrl_sglang.errors import ConfigurationError, ServerTimeoutError, SGLangError
from torchrl_sglang.support.checks import check_count
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.urls import split_credentials
from torchrl_sglang.types import ServerCapabilities

UPDATE_SECONDS = 600.0
"""Timeout for a weight update to end in which a leaving server takes part."""


class Resize:
    """Changes the set of an engine's servers.

    ``sent_to`` returns the number of this process's requests at an address; ``evict``
    aborts a server's requests, which then move elsewhere; ``poll`` polls the servers
    out of rotation.
    """

    def __init__(
        self,
        fleet: Fleet,
        control: ControlPlane,
        capabilities: ServerCapabilities,
        find: Find,
        *,
        sent_to: Callable[[str], int],
        evict: Callable[[str], Awaitable[None]],
        poll: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._fleet = fleet
        self._control = control
        self._capabilities = capabilities
        self._find = find
        self._sent_to = sent_to
        self._evict = evict
        self._poll = poll
        self._lock = Lock()
        # Pending starts, to be stopped with the engine.
        self._starting: list[ServerHandle] = []

    def add(
        self, servers: int | str | Sequence[str], cuda_devices: Sequence[object] | None
    ) -> tuple[str, ...]:
        """Adds servers; see :meth:`.AsyncSGLang.add_servers`."""
        self._check_owner("add")
        urls = as_urls(servers)
        check_can_join(self._fleet.state, urls or ())
        if urls is None:
            return self._start(check_count("servers", servers), cuda_devices)
        if cuda_devices is not None:
            raise ConfigurationError(
                f"cuda_devices={cuda_devices!r} is for servers that are started here, "
                f"and {', '.join(urls)} run elsewhere; leave it out."
            )
        replicas = run_sync(self._ask(urls))
        self._fleet.apply(Joined(replicas=tuple(replicas)))
        return self._look_at(replicas)

    def _start(
        self, count: int, cuda_devices: Sequence[object] | None
    ) -> tuple[str, ...]:
        start_more = self._fleet.start_more
        if start_more is None or not self._fleet.state.owns_any:
            raise ConfigurationError(
                f"add_servers({count}) starts servers like those that this engine "
                f"object has started, and it has started none: it is connected to "
                f"them, or a copy of the one that did. Call it there, or give the "
                f"addresses of servers that run."
            )
        begun: list[ServerHandle] = []

        def begin(handle: ServerHandle) -> None:
            begun.append(handle)
            with self._lock:
                self._starting.append(handle)
            check_can_join(self._fleet.state, ())

        try:
            replicas = start_more(count, cuda_devices=cuda_devices, begun=begin)
            try:
                self._fleet.apply(Joined(replicas=tuple(replicas)))
            except BaseException:
                stop_all(begun)
                for replica in replicas:
                    _release(replica)
                raise
            # They are the engine's now, also if this is interrupted.
            return self._look_at(replicas)
        except NotStartedError:
            # They are stopped when the engine is.
            check_can_join(self._fleet.state, ())
            raise
        finally:
            with self._lock:
                for handle in begun:
                    self._starting.remove(handle)

    async def _ask(self, urls: Sequence[str]) -> list[Replica]:
        """Returns servers running elsewhere, if they match the others."""
        first = self._fleet.replicas[0].url

        async def ask(url: str) -> Replica:
            capabilities = await self._find(url)
            check_same(self._capabilities, first, capabilities, url)
            # A numbered version belongs to an unknown trainer, and two folders may hold
            # different checkpoints.
            version, path = capabilities.weight_version, capabilities.model_path
            same_weights = (
                not version.isdigit() and path == self._capabilities.model_path
            )
            foreign = "" if same_weights else version
            return Replica(
                url=url, start_id=capabilities.start_id, foreign_version=foreign
            )

        return await fan_out(ask, urls)

    def _look_at(self, replicas: Sequence[Replica]) -> tuple[str, ...]:
        """Polls joined servers to let them serve; returns their addresses."""
        urls = tuple(replica.url for replica in replicas)
        self._fleet.drop_remote_router()
        run_sync(self._poll())
        for replica in self._fleet.replicas:
            if replica.url in urls:
                text = f"The server at {replica.url} was added; it is {replica.status}."
                torchrl_logger.info(f"{text} {replica.reason}".rstrip())
        return urls

    def remove(
        self, servers: int | str | Sequence[str], drain_timeout: float
    ) -> tuple[str, ...]:
        """Removes servers; see :meth:`.AsyncSGLang.remove_servers`."""
        self._check_owner("remove")
        urls = as_urls(servers)
        if urls is None:
            urls = self._choose(check_count("servers", servers))
        run_sync(self._remove(urls, drain_timeout))
        return urls

    def _check_owner(self, verb: str) -> None:
        fleet = self._fleet
        if fleet.directory is not None and not fleet.state.owns_any:
            raise ConfigurationError(
                f"This engine object is a copy of one in another process, which has "
                f"started the servers: {verb} them there, and this copy follows."
            )

    def _choose(self, count: int) -> tuple[str, ...]:
        """Returns the cheapest servers to remove: idle servers, then the newest."""
        stay = [r for r in self._fleet.replicas if r.state != "leaving"]
        stay.sort(key=lambda replica: (replica.state == "serving", -replica.rank))
        if count > len(stay):
            raise ConfigurationError(
                f"remove_servers({count}): the engine has {len(stay)} server(s)."
            )
        return tuple(replica.url for replica in stay[:count])

    async def _remove(self, urls: tuple[str, ...], drain_timeout: float) -> None:
        fleet = self._fleet
        fleet.apply(LeaveBegan(urls=urls))
        fleet.drop_remote_router()
        leaving = [replica for replica in fleet.replicas if replica.url in urls]
        ranks = frozenset(replica.rank for replica in leaving)
        until = time.monotonic() + drain_timeout
        try:
            await fan_out(lambda replica: self._drain(replica.rank, until), leaving)
            handles = await self._leave(ranks)
        except BaseException:
            fleet.apply(LeaveGivenUp(ranks=ranks))
            raise
        # Shielded: the removal ends even if the caller is cancelled.
        await asyncio.shield(asyncio.ensure_future(self._end(leaving, handles)))

    async def _end(
        self, leaving: Sequence[Replica], handles: list[ServerHandle]
    ) -> None:
        await asyncio.to_thread(stop_all, handles)
        for replica in leaving:
            await asyncio.to_thread(_release, replica)
            torchrl_logger.info(f"The server at {replica.url} was removed.")

    async def _drain(self, rank: int, until: float) -> None:
        """Waits until a server is idle; at the deadline, aborts its requests."""
        while (replica := self._fleet.state.find(rank)) is not None and replica.runs:
            if not await self._is_busy(replica):
                return
            if time.monotonic() >= until:
                torchrl_logger.warning(
                    f"The server at {replica.url} has not finished its requests within "
                    f"drain_timeout; they go on elsewhere."
                )
                await self._evict(replica.url)
                return
            await asyncio.sleep(0.1)

    async def _is_busy(self, replica: Replica) -> bool:
        fleet, url = self._fleet, replica.url
        router = fleet.router
        if router is not None and router.usable and url in fleet.state.in_router:
            return True
        if self._sent_to(url):
            return True
        if replica.handle is None and router is None:
            # Requests of other users do not delay the removal.
            return False
        try:
            running, queued, _ = await self._control.load_of(url, timeout=5.0)
        except SGLangError as error:
            torchrl_logger.debug(f"A server that leaves does not answer: {error}")
            return True
        return bool(running or queued)

    async def _leave(self, ranks: frozenset[int]) -> list[ServerHandle]:
        """Removes servers between two weight updates; returns the handles to stop."""
        fleet, until = self._fleet, time.monotonic() + UPDATE_SECONDS
        while time.monotonic() < until:
            actions = fleet.apply(Left(ranks=ranks))
            if all(fleet.state.find(rank) is None for rank in ranks):
                return [action.handle for action in actions if isinstance(action, Stop)]
            await fleet.until(lambda now: now.updating is None, until)
        raise ServerTimeoutError(
            f"A weight update has not ended within {UPDATE_SECONDS:g} s, and the "
            f"servers that were to be removed take part in it; they stay."
        )

    def close(self) -> None:
        """Stops pending starts; no server joins from now on."""
        with self._lock:
            starting = list(self._starting)
        stop_all(starting)


def as_urls(servers: object) -> tuple[str, ...] | None:
    """Returns normalized addresses of servers; ``None`` for a number of servers."""
    if isinstance(servers, int) and not isinstance(servers, bool):
        return None
    addresses = [servers] if isinstance(servers, str) else servers
    if not isinstance(addresses, (list, tuple)) or not addresses:
        raise ConfigurationError(
            f"servers={hide_passwords(repr(servers))} is neither a number of servers "
            f"nor their addresses, like ['http://10.0.0.5:30000']."
        )
    urls: list[str] = []
    for address in addresses:
        if not isinstance(address, str):
            raise ConfigurationError(
                f"servers: {hide_passwords(repr(address))} is not an address of a "
                f"server, like 'http://10.0.0.5:30000'."
            )
        url, login = split_credentials(address)
        if login is not None:
            raise ConfigurationError(
                f"servers: give {url} without user and password; servers of one engine "
                f"have the same api_key."
            )
        if url in urls:
            raise ConfigurationError(f"servers names {url} twice.")
        urls.append(url)
    return tuple(urls)


def _release(replica: Replica) -> None:
    if replica.release is not None:
        replica.release()
