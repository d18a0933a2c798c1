"""Loads LoRA adapters into every server, and lets requests select them by name.

The *wanted* adapters are those that requests may select; each server's *held* adapters
are in :attr:`.Replica.held_adapters`. A name stays while its adapter is replaced:
servers have another name for each load, so the new one is loaded beside the old one,
requests in flight end with the old one, and they share no prefix-cache entry. Other
engine objects, in any process, discover adapters by these names on the servers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NoReturn, TypeVar

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.fan_out import fan_out
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.reconcile import (
    AdaptersWanted,
    RestartNoticed,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.backends.lora.names import (
    DesiredAdapter,
    catch_up,
    check_name,
    find_wanted,
    is_published,
    load_number,
    make_served_name,
    newest_loads,
    parse_served_name,
    served_names,
)
from torchrl_sglang.backends.lora.payload import AdapterPayload
from torchrl_sglang.backends.lora.retirement import UNLOAD_SECONDS, Retirement
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.support.checks import seconds_or
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.types import Adapter, ServerCapabilities

LOAD_SECONDS = 120.0
"""Default timeout for loading an adapter, the wait for space included."""

DISCOVERY_SECONDS = 1.0
"""Interval between looks for adapters that other engine objects loaded."""

MOST_ASKED = 16
"""Servers that are asked in each look; up to so many, all are."""

WITHDRAW_SECONDS = 3.0
"""Longest wait for servers to drop published adapters."""

ABORT_POLL_SECONDS = 0.2
"""Interval between aborts of requests that keep servers from dropping an adapter."""

_DROPPED = re.compile(
    r"Failed to implicitly load LoRA adapter|requested LoRA adapters are not loaded"
    r"|LoRA adapter that has never been loaded"
)
"""How servers refuse a request whose adapter was dropped, or lost in a restart."""

T = TypeVar("T")


def no_lora_error() -> UnsupportedByServerError:
    """Returns the error for servers that were started without LoRA."""
    return UnsupportedByServerError(
        "The servers take no LoRA adapters; start them with enable_lora=True, "
        "max_lora_rank=... and lora_target_modules=['all']."
    )


async def _answer(call: Awaitable[T], default: T) -> T:
    """Returns a server's answer, or the default where it gives none."""
    try:
        return await call
    except SGLangError as error:
        torchrl_logger.debug(f"A server did not answer: {error}")
        return default


class AdapterRegistry:
    """The adapters of one engine. Used from the background loop, except for reading."""

    def __init__(
        self, control: ControlPlane, fleet: Fleet, capabilities: ServerCapabilities
    ) -> None:
        self._control = control
        self._fleet = fleet
        self._capabilities = capabilities
        self._default: str | None = None
        self._wanted: dict[str, DesiredAdapter] = {}
        # Name -> number of its newest load that was ever found.
        self._latest: dict[str, int] = {}
        self._discovered_at = -DISCOVERY_SECONDS
        # Rank of a server -> adapters that it held at the last discovery.
        self._seen: dict[int, frozenset[str]] = {}
        # Place of the server that is asked next.
        self._asked = 0
        self._begin_in_this_process(set())
        after_fork(self._begin_after_fork)
        self._adopt(newest_loads(capabilities.adapters, fleet.weights.version))

    def _begin_in_this_process(self, dropped: set[str]) -> None:
        self._lock = asyncio.Lock()
        # Served name that is being loaded; not used before every server has it.
        self._loading: str | None = None
        self._reloads: dict[str, asyncio.Task[None]] = {}
        self._retirement = Retirement(self._control, self._fleet, dropped)
        self._closed = False

    def _begin_after_fork(self) -> None:
        # The parent's requests, tasks and loop are not those of a forked process.
        self._begin_in_this_process(self._retirement.dropped)

    def state(self) -> tuple[dict[str, DesiredAdapter], str | None]:
        """Returns what a copy of the engine in another process needs to know."""
        wanted = self._wanted.items()
        return {n: replace(each, content=None) for n, each in wanted}, self._default

    def set_state(self, state: tuple[dict[str, DesiredAdapter], str | None]) -> None:
        """Takes over what :meth:`state` returned in another process."""
        wanted, default = state
        self._adopt(wanted)
        self._default = default

    def check_new(self, name: str, version: str | None) -> None:
        """Checks the name and the version of an adapter that is to be loaded."""
        check_name(name)
        if version is not None and not (
            isinstance(version, str) and re.fullmatch(r"[^#\s]+", version)
        ):
            raise ConfigurationError(
                f"version={version!r} is no weight version; give a text without spaces "
                f"and '#'."
            )
        if not self._capabilities.has_lora:
            raise no_lora_error()

    # Reading, from any thread.

    @property
    def table(self) -> dict[str, Adapter]:
        """Name -> adapter that requests can select."""
        return {name: each.adapter for name, each in self._wanted.items()}

    @property
    def default(self) -> str | None:
        """Name of the adapter of requests that select none."""
        return self._default

    @default.setter
    def default(self, name: str | None) -> None:
        if name and not self._capabilities.has_lora:
            raise no_lora_error()
        if name is not None:
            self.check([name])
        self._default = name or None

    @property
    def can_reload(self) -> bool:
        """Whether this engine object has loaded adapters that it can load again."""
        return not self._closed and any(w.content for w in self._wanted.values())

    def check(self, names: Sequence[str | None]) -> None:
        """Checks that the adapters that requests select are loaded."""
        for name in dict.fromkeys(names):
            selected = self._default if name is None else name
            if selected and selected not in self._wanted:
                loaded = ", ".join(map(repr, sorted(self._wanted))) or "none"
                raise ConfigurationError(
                    f"There is no LoRA adapter {selected!r} on the servers; loaded: "
                    f"{loaded}. Load it with engine.load_adapter({selected!r}, ...)."
                )

    # Requests, on the background loop.

    async def refresh(self, names: Sequence[str | None]) -> None:
        """Discovers adapters now and then, and checks what requests select."""
        if not self._capabilities.has_lora:
            if any(names):
                raise no_lora_error()
            return
        if time.monotonic() - self._discovered_at >= DISCOVERY_SECONDS:
            await self.discover_changes()
        try:
            self.check(names)
        except ConfigurationError:
            await self.discover()
            self.check(names)

    async def missed(self, error: RequestRefusedError) -> bool:
        """Discovers adapters if a server lacked a request's; returns if it did."""
        found = _DROPPED.search(str(error)) is not None
        if found:
            await self.discover()
        return found

    @contextmanager
    def used(self, name: str | None) -> Iterator[Adapter | None]:
        """Yields the adapter of a request, and keeps it loaded meanwhile."""
        self.check([name])
        selected = self._default if name is None else name
        adapter = self._wanted[selected].adapter if selected else None
        with self.held(adapter):
            yield adapter

    def held(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Keeps an adapter loaded while a request uses it."""
        if adapter is None:
            return nullcontext()
        return self._retirement.hold(adapter.served_as)

    # Discovery.

    async def discover_changes(self) -> None:
        """Discovers adapters if one of a few servers, in turn, holds other ones.

        Each engine object loads an adapter into all servers, and a request that a
        server refuses for want of one leads to a discovery, too.
        """
        serving = self._serving
        if len(serving) > MOST_ASKED:
            self._discovered_at = time.monotonic()
            start = self._asked % len(serving)
            self._asked = start + MOST_ASKED
            held = await self._ask_held([*serving, *serving][start : self._asked])
            if all(self._seen.get(rank) == names for rank, names in held.items()):
                return
        await self.discover()

    @property
    def _serving(self) -> list[Replica]:
        return [each for each in self._fleet.replicas if each.state == "serving"]

    async def discover(self) -> None:
        """Finds the adapters that any engine object has loaded: the servers know."""
        self._discovered_at = time.monotonic()
        before, dropped = self._wanted, self._retirement.dropped
        held = await self._ask_held(self._serving)
        self._seen = dict(held)
        wanted = served_names(before) - dropped
        for rank in [each for each in held if wanted - held[each]]:
            if await self._is_restarted(self._fleet.replicas[rank]):
                # It gets no requests until it holds them again.
                del held[rank]
        if self._wanted is not before or not held:
            # This object loaded or dropped an adapter meanwhile, and knows better.
            return
        version = self._fleet.weights.version
        found = find_wanted(
            before,
            list(held.values()),
            ignored={*dropped, self._loading or ""},
            latest=self._latest,
            default=self._default,
            base=version,
        )
        lost = [each for name, each in before.items() if name not in found]
        if lost:
            urls = [self._fleet.replicas[rank].url for rank in held]
            versions = await _answer(self._control.weight_versions(urls=urls), [])
            version = max([*versions, version], key=version_order)
            if self._wanted is not before:
                return
            for each in lost:
                # An adapter that this object loaded is loaded again, unless whole
                # weights replaced it.
                if each.content is not None and not each.is_replaced(version):
                    found[each.adapter.name] = each
        self._adopt(found)

    async def _ask_held(self, replicas: Sequence[Replica]) -> dict[int, frozenset[str]]:
        """Returns rank -> what a server holds; those without an answer are left out."""
        found: dict[int, frozenset[str]] = {}

        async def ask(replica: Replica) -> None:
            for each in await _answer(self._control.adapters(urls=[replica.url]), []):
                held = found[replica.rank] = frozenset(each)
                change = partial(Replica.holding, adapters=held, since=replica)
                self._fleet.learn(replica, change)

        await fan_out(ask, replicas)
        return found

    async def _is_restarted(self, replica: Replica) -> bool:
        """Takes a server that lacks adapters out of rotation if it was restarted."""
        start_id = await _answer(self._control.start_id(replica.url), "")
        restarted = bool(start_id and replica.start_id) and start_id != replica.start_id
        if restarted:
            noticed = RestartNoticed(rank=replica.rank, start_id=start_id)
            self._fleet.apply(noticed)
        return restarted

    def _adopt(self, found: dict[str, DesiredAdapter]) -> None:
        """Makes these the wanted adapters; the newest published one is the default."""
        published = filter(is_published, served_names(found))
        new = set(published) - served_names(self._wanted)
        self._wanted = found
        self._fleet.apply(AdaptersWanted(names=served_names(found), found=True))
        for name, each in found.items():
            self._latest[name] = max(self._latest.get(name, 0), each.number)
        if new:
            self._default = parse_served_name(max(new, key=load_number)).name
        elif self._default not in found:
            # Another engine object dropped it, or whole weights replaced it.
            self._default = None

    # Loading and dropping, on the background loop.

    async def load(
        self,
        name: str,
        content: AdapterPayload,
        *,
        pinned: bool,
        version: str | None,
        make_default: bool = False,
        timeout: float | None = None,
    ) -> Adapter:
        """Loads an adapter into every server; later requests of its name use it."""
        deadline = time.monotonic() + seconds_or("timeout", timeout, LOAD_SECONDS)
        async with self._locked(deadline):
            adapter = Adapter(
                name=name,
                served_as=make_served_name(name, version, published=make_default),
                version=version,
                pinned=pinned,
            )
            replaced = await self._find_replaced(adapter)
            await self._make_space(adapter, deadline)
            base = self._fleet.weights.version
            new = DesiredAdapter(adapter=adapter, content=content, base=base)
            await self._load_everywhere(new, deadline)
            if pinned:
                self._retirement.pinned.add(adapter.served_as)
            for served_as in replaced:
                self._retirement.retire(served_as)
        if version is not None:
            self._fleet.change_weights(lambda weights: weights.reserve(version))
        torchrl_logger.debug(f"Loaded {adapter}")
        return adapter

    async def _load_everywhere(self, new: DesiredAdapter, deadline: float) -> None:
        """Loads an adapter until every server that runs holds it; makes it wanted."""
        self._loading = served_as = new.adapter.served_as
        try:
            while True:
                self._fleet.notice_deaths()
                state = self._fleet.state
                if not state.running:
                    raise state.no_server_error()
                wanted = {**self._wanted, new.adapter.name: new}
                names, running = served_names(wanted), state.running
                lacking = [r for r in running if served_as not in r.held_adapters]
                if not lacking:
                    self._fleet.apply(AdaptersWanted(names=names))
                    # A server may have joined meanwhile.
                    if self._fleet.state.wanted_adapters == names:
                        self._adopt(wanted)
                        return
                await self._send(new, lacking, deadline)
        except BaseException:
            self._retirement.drop_soon(served_as)
            raise
        finally:
            self._loading = None

    async def unload(self, name: str, *, timeout: float | None = None) -> None:
        """Lets servers drop an adapter; new requests cannot select it."""
        check_name(name)
        timeout = seconds_or("timeout", timeout, UNLOAD_SECONDS)
        await self.refresh([name])
        deadline, retirement = time.monotonic() + timeout, self._retirement
        async with self._locked(deadline):
            self.check([name])
            adapter = self._wanted[name].adapter
            served_as = adapter.served_as
            # Otherwise other processes would discover an older load as the current one.
            dropped = [served_as, *await self._older_loads(adapter)]
            retiring = (w for w in retirement.retiring if not retirement.users(w))
            linger = [w for w in retiring if parse_served_name(w).name == name]
            retirement.dropped.update(dropped)
            self._forget([served_as])
            await retirement.hurry([served_as, *linger], deadline)
            if users := retirement.users(served_as):
                for each in dropped:
                    retirement.retire(each)
                raise ServerTimeoutError(
                    f"{users} requests used the LoRA adapter {name!r} for longer than "
                    f"{timeout:g} s. No new ones do, and the servers drop it after the "
                    f"last of them."
                )
            left = max(deadline - time.monotonic(), 1.0)
            await asyncio.gather(*(retirement.drop(each, left) for each in dropped))

    def _forget(self, dropped: Collection[str]) -> None:
        """Removes adapters from the wanted ones."""
        wanted = self._wanted.items()
        self._adopt({n: w for n, w in wanted if w.adapter.served_as not in dropped})

    async def published(self, *, timeout: float) -> frozenset[str]:
        """Returns the servers' names of adapters that requests use by default."""
        if not self._capabilities.has_lora:
            return frozenset()
        held = await self._control.adapters(timeout=timeout)
        return frozenset(filter(is_published, chain(*held)))

    async def withdraw(self, *, timeout: float) -> None:
        """Drops the published adapters, which whole weights replace.

        Generation must be paused, not in place. Requests that were on their way to a
        server at the pause are aborted.
        """
        deadline = time.monotonic() + timeout
        names = await self.published(timeout=timeout)
        if not names:
            return
        async with self._locked(deadline):
            drops = asyncio.ensure_future(self._drop_now(names, timeout))
            until = min(deadline, time.monotonic() + WITHDRAW_SECONDS)
            try:
                while not drops.done() and time.monotonic() < until:
                    await self._control.abort_all(timeout=timeout)
                    await asyncio.wait([drops], timeout=ABORT_POLL_SECONDS)
                if drops.done():
                    drops.result()
            finally:
                drops.cancel()
            left = names & await self.published(timeout=timeout)
            if left:
                raise RequestRefusedError(
                    f"Servers did not drop the LoRA adapters "
                    f"{', '.join(sorted(left))}, which requests carry."
                )
            self._retirement.dropped.update(names)
            self._forget(names)
            for served_as in names:
                self._retirement.forget(served_as)

    async def _drop_now(self, names: Collection[str], timeout: float) -> None:
        # The newest last: in some versions of SGLang, one whose requests were aborted
        # in the queue counts as used for ever, and blocks the later ones.
        for served_as in sorted(names, key=load_number):
            for error in await self._retirement.unload(served_as, timeout):
                raise error

    async def _find_replaced(self, adapter: Adapter) -> set[str]:
        """Returns the loads that this one replaces; older ones are dropped now."""
        older = await self._older_loads(adapter)
        replaced = set(older[-1:])
        if adapter.name in self._wanted:
            replaced.add(self._wanted[adapter.name].adapter.served_as)
        if adapter.pinned:
            # Servers do not say which are pinned; assume the same of older loads.
            self._retirement.pinned.update(older)
        for served_as in set(older) - replaced:
            self._retirement.retire(served_as)
        return replaced

    async def _older_loads(self, adapter: Adapter) -> list[str]:
        """Returns older loads of an adapter, the oldest first, that are not retiring.

        A trainer that was killed has left the loads that it replaced to the next one.
        """
        held = await _answer(self._control.adapters(urls=self._fleet.serving), [])
        return [
            each
            for each in sorted({*chain(*held)}, key=load_number)
            if parse_served_name(each).name == adapter.name
            and each not in self._retirement.retiring
            and load_number(each) < load_number(adapter.served_as)
        ]

    async def _make_space(self, adapter: Adapter, deadline: float) -> None:
        """Checks that servers have space: a full one drops an adapter in use."""
        args, retirement = self._capabilities.args, self._retirement
        places = args.max_loras_per_batch
        if adapter.pinned and places and len(retirement.pinned) >= places - 1:
            pinned = [name for name in retirement.retiring if name in retirement.pinned]
            await retirement.hurry(pinned, deadline)
        limit = args.max_loaded_loras
        if limit is None or await self._most_held() < limit:
            return
        await retirement.hurry(list(retirement.retiring), deadline)
        if (held := await self._most_held()) >= limit:
            raise ConfigurationError(
                f"There is no room for the LoRA adapter {adapter.name!r}: the servers "
                f"hold {held} and take max_loaded_loras={limit}, and one that is "
                f"replaced stays until its last request has ended. Start them with "
                f"max_loaded_loras={held + 1}, or unload one of "
                f"{', '.join(sorted(self._wanted)) or 'those of other users'}."
            )

    async def _most_held(self) -> int:
        return max(map(len, await self._control.adapters()))

    # Sending.

    def reload(self, replica: Replica) -> None:
        """Begins to load the wanted adapters that a restarted server lacks."""
        running = self._reloads.get(replica.url)
        if not self._closed and (running is None or running.done()):
            self._reloads[replica.url] = asyncio.ensure_future(self._reload(replica))

    async def _reload(self, replica: Replica) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            async with self._locked(deadline):
                # What it holds may have changed while others had the lock.
                replica = self._fleet.replicas[replica.rank]
                if not self._fleet.serving:
                    held = replica.held_adapters - self._retirement.dropped
                    found = catch_up(self._wanted, held, replica.version)
                    if found != self._wanted:
                        self._adopt(found)
                for each in list(self._wanted.values()):
                    now = self._fleet.replicas[replica.rank]
                    if each.adapter.served_as not in now.held_adapters:
                        await self._send(each, [now], deadline)
        except SGLangError as error:
            torchrl_logger.warning(
                f"A server that was started again does not take its adapters: {error}"
            )

    async def _send(
        self, wanted: DesiredAdapter, replicas: Sequence[Replica], deadline: float
    ) -> None:
        adapter, content, fleet = wanted.adapter, wanted.content, self._fleet
        if content is None:
            # The engine object that loaded it loads it again.
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise ServerTimeoutError(
                f"The LoRA adapter {adapter.name!r} was not loaded before the timeout; "
                f"requests use what they used before."
            )
        sent = {replica.url: replica for replica in replicas}
        served_as = adapter.served_as
        outcomes = await self._control.load_lora_adapter(
            adapter.served_as,
            content.path,
            tensors=content.tensors,
            config=content.config,
            pinned=adapter.pinned,
            timeout=left,
            urls=list(sent),
        )
        fleet.notice_deaths()
        for url, error in outcomes.items():
            now = fleet.replicas[sent[url].rank]
            if error is None:
                fleet.learn(sent[url], lambda now: now.with_adapter(served_as))
            elif now.url == url and now.handle is sent[url].handle and now.runs:
                self._raise(adapter, error)

    def _raise(self, adapter: Adapter, error: SGLangError) -> NoReturn:
        """Raises why an adapter was not loaded."""
        if not isinstance(error, RequestRefusedError):
            raise error
        names = ("max_lora_rank", "lora_target_modules", "max_loras_per_batch")
        args = self._capabilities.args
        told = ", ".join(f"{name}={getattr(args, name)}" for name in names)
        raise ConfigurationError(
            f"The LoRA adapter {adapter.name!r} was refused: {error} The servers have "
            f"{told}; start them with others, or load another adapter. Requests use "
            f"what they used before."
        ) from error

    async def close(self) -> None:
        """Ends background work. Servers that keep running drop replaced adapters."""
        self._closed = True
        reloads = list(self._reloads.values())
        for task in reloads:
            task.cancel()
        await asyncio.gather(*reloads, return_exceptions=True)
        await self._retirement.close()

    @asynccontextmanager
    async def _locked(self, deadline: float) -> AsyncIterator[None]:
        """Lets one adapter at a time be loaded or dropped."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self._lock.acquire()
        except TimeoutError:
            raise ServerTimeoutError(
                "Another LoRA adapter was being loaded or dropped until the timeout of "
                "this call."
            ) from None
        try:
            yield
        finally:
            self._lock.release()
