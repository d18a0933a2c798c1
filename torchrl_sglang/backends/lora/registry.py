"""LoRA adapters of an engine: loading, replacing and dropping them, and who uses which.

A name that requests select stays the same while the adapter behind it is replaced. The
servers know each load by a name of its own (``"policy@7#..."``): a new one is loaded
beside the old one, requests that are sent from then on name the new one, those under
way end with the old one, and no prefix-cache entry is shared. The old one is dropped
when the last of its requests has ended: a server that is told so earlier takes no other
adapter until then, and never, while it is paused.

Another engine object, such as a copy in another process, finds what is loaded by these
names, on the servers.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.lora.payload import Content
from torchrl_sglang.backends.support.versions import version_order
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import Adapter, ModelMetadata, ServerCapabilities

__all__ = [
    "Adapters",
    "check_name",
    "parse_served_name",
    "why_no_lora",
]

LOAD_SECONDS = 120.0
"""Default budget for loading an adapter, the wait for room included."""

UNLOAD_SECONDS = 60.0
"""Budget for servers to drop an adapter that no request of ours uses."""

LINGER_SECONDS = 5.0
"""An adapter that was replaced is kept for so long, if there is room: copies of the
engine in other processes look every :data:`LOOK_SECONDS` what is loaded."""

LOOK_SECONDS = 1.0
"""How often an engine that does not load adapters itself looks for those of others."""

DRAIN_SECONDS = 1800.0
"""Longest wait for the last requests of an adapter that was replaced."""

CLOSE_SECONDS = 2.0
"""Budget for dropping what was replaced when an engine is shut down and its servers are
not."""

_DROPPED = re.compile(
    r"Failed to implicitly load LoRA adapter|requested LoRA adapters are not loaded"
    r"|LoRA adapter that has never been loaded"
)
"""How servers refuse a request that names an adapter which has been dropped, or which
was loaded before they were started again."""

_NAME = re.compile(r"[A-Za-z0-9._/-]+")
"""A name is part of the servers' own, and of a model's in OpenAI's protocol."""

_SERVED = re.compile(
    r"(?P<name>[^@~#]+)([@~](?P<version>[^#]*))?(#(?P<load>[0-9a-f]+))?"
)
"""``@`` where requests that select none use it, ``~`` where they do not."""


WITHDRAW_SECONDS = 3.0
"""Longest wait for servers to let an adapter go that they do not offer any more."""

ABORT_POLL_SECONDS = 0.2
"""How often what still carries an adapter is aborted until servers have dropped it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    adapter: Adapter
    content: Content | None
    """``None`` for what somebody else has loaded."""
    base: str = ""
    """Version of the weights that it was loaded over, where this engine loaded it."""

    def is_replaced(self, version: str) -> bool:
        """Returns whether whole weights of this version have taken its place. Pure."""
        own = max(version_order(self.adapter.version or ""), version_order(self.base))
        return is_published(self.adapter.served_as) and version_order(version) > own


def parse_served_name(served_as: str) -> Adapter:
    """Returns the adapter that a server calls so.

    Examples:
        >>> parse_served_name("policy@7#18a3f").version
        '7'
        >>> parse_served_name("style").name
        'style'
    """
    found = _SERVED.fullmatch(served_as)
    if found is None:
        return Adapter(name=served_as, served_as=served_as)
    version = found["version"] or None
    return Adapter(name=found["name"], served_as=served_as, version=version)


def is_published(served_as: str) -> bool:
    """Returns whether requests that select no adapter carry the one of this name.

    Examples:
        >>> is_published("policy@7#18a3f"), is_published("style~#18a40")
        (True, False)
    """
    name = parse_served_name(served_as).name
    return served_as.startswith(f"{name}@")


def _load_number(adapter: Adapter) -> int:
    """Sorts the loads of adapters by their time."""
    _, mark, number = adapter.served_as.rpartition("#")
    return int(number, 16) if mark else 0


class Adapters:
    """The adapters of one engine. Used from the background loop, but for reading.

    Args:
        control: calls to the servers.
        fleet: the servers.
        capabilities: what they can do.
    """

    def __init__(
        self, control: ControlPlane, fleet: Fleet, capabilities: ServerCapabilities
    ) -> None:
        self._control = control
        self._fleet = fleet
        self._capabilities = capabilities
        self._default: str | None = None
        # What this object has had dropped, as the servers call it: never used again.
        self._dropped: set[str] = set()
        self._looked_at = -LOOK_SECONDS
        self._loaded: dict[str, _Loaded] = {}
        # Name -> the newest load of it that was ever found.
        self._latest: dict[str, int] = {}
        self._metadata: ModelMetadata | None = None
        self._begin_in_this_process()
        self._take(self._newest(capabilities.adapters))

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._turn = asyncio.Lock()
        self._users: Counter[str] = Counter()
        self._unused = asyncio.Event()
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._room_wanted = asyncio.Event()
        # What is being loaded; nobody uses it before every server has it.
        self._coming: str | None = None
        self._pinned: set[str] = set()
        self._equipping: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def _begin_after_fork(self) -> None:
        # The parent's requests and tasks are not ours, nor is its loop.
        if self._pid != os.getpid():
            self._begin_in_this_process()

    def state(self) -> dict[str, Any]:
        """Returns what a copy of the engine in another process knows."""
        return {
            "loaded": {
                name: replace(each, content=None) for name, each in self._loaded.items()
            },
            "default": self._default,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Begins with what :meth:`state` returned in another process."""
        self._loaded = dict(state["loaded"])
        self._latest = {n: _load_number(e.adapter) for n, e in self._loaded.items()}
        self._default = state["default"]
        self._fleet.adopt_adapters(self._required())

    def metadata(self, get: Callable[[], ModelMetadata]) -> ModelMetadata:
        """Returns the parameters of the served model, found out once."""
        if self._metadata is None:
            self._metadata = get()
        return self._metadata

    # Reading, from any thread.

    @property
    def table(self) -> dict[str, Adapter]:
        """Name -> adapter, of those that requests can select."""
        return {name: each.adapter for name, each in self._loaded.items()}

    @property
    def default(self) -> str | None:
        """Name of the adapter of requests that select none."""
        return self._default

    @default.setter
    def default(self, name: str | None) -> None:
        if name and not self._capabilities.has_lora:
            raise why_no_lora()
        if name is not None:
            self.check([name])
        self._default = name or None

    def check(self, names: Sequence[str | None]) -> None:
        """Checks what requests select.

        Raises:
            ConfigurationError: if a name is not that of a loaded adapter.
        """
        for name in dict.fromkeys(names):
            wanted = self._default if name is None else name
            if wanted in (None, "") or wanted in self._loaded:
                continue
            loaded = ", ".join(map(repr, sorted(self._loaded))) or "none"
            raise ConfigurationError(
                f"There is no LoRA adapter {wanted!r} on the servers; loaded: "
                f"{loaded}. Load it with engine.load_adapter({wanted!r}, ...)."
            )

    # Using, on the background loop.

    async def look(self, names: Sequence[str | None]) -> None:
        """Checks what requests select, and finds what other engine objects loaded.

        Raises:
            ConfigurationError: as :meth:`check` does.
        """
        self._begin_after_fork()
        if not self._capabilities.has_lora:
            if any(names):
                raise why_no_lora()
            return
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            await self.discover()
        try:
            self.check(names)
        except ConfigurationError:
            await self.discover()
            self.check(names)

    async def missed(self, error: RequestRefusedError) -> bool:
        """Finds out what is loaded, where a request named what a server has not.

        Returns:
            Whether it is worth sending again, with what is loaded now.
        """
        if _DROPPED.search(str(error)) is None:
            return False
        await self.discover()
        return True

    async def discover(self) -> None:
        """Finds what is loaded, whoever loaded it: the servers tell."""
        self._begin_after_fork()
        self._looked_at = time.monotonic()
        before = self._loaded
        held = await self._held()
        lacking = self._served() - self._dropped
        for replica in [each for each in held if lacking - held[each]]:
            if await self._is_restarted(replica):
                # It gets no requests until it holds them again.
                del held[replica]
        if self._loaded is not before or not held:
            # Something was loaded or dropped here meanwhile: that is known better.
            return
        found = self._in_use(list(held.values()))
        gone = [each for each in before.values() if each.adapter.name not in found]
        if gone:
            version = await self._newest_version(list(held))
            if self._loaded is not before:
                return
            for each in gone:
                # What we have loaded stays ours, if no whole weights took its place.
                if each.content is not None and not each.is_replaced(version):
                    found[each.adapter.name] = each
        self._take(found)

    async def _held(self) -> dict[Replica, frozenset[str]]:
        """Returns what each server holds that serves and answers."""
        replicas = [each for each in self._fleet.replicas if each.state == "serving"]
        known = [set(each.held_adapters) for each in replicas]

        async def one(replica: Replica) -> frozenset[str] | None:
            try:
                (names,) = await self._control.adapters(urls=[replica.url])
            except SGLangError as error:
                torchrl_logger.debug(f"A server does not tell its adapters: {error}")
                return None
            return frozenset(names)

        answers = await asyncio.gather(*map(one, replicas))
        held = {}
        for replica, names, before in zip(replicas, answers, known, strict=True):
            if names is not None:
                self._fleet.report_adapters(replica, names, before)
                held[replica] = names
        return held

    async def _is_restarted(self, replica: Replica) -> bool:
        """Returns whether a server that lacks adapters was started again meanwhile."""
        try:
            start_id = await self._control.start_id(replica.url)
        except SGLangError as error:
            torchrl_logger.debug(f"A server does not tell when it began: {error}")
            return False
        if start_id in ("", replica.start_id) or not replica.start_id:
            return False
        self._fleet.was_restarted(replica, start_id)
        return True

    async def _newest_version(self, replicas: Sequence[Replica]) -> str:
        """Returns the newest version of whole weights that servers have."""
        urls = [replica.url for replica in replicas]
        try:
            versions = await self._control.weight_versions(urls=urls)
        except SGLangError as error:
            torchrl_logger.debug(f"Servers do not tell their versions: {error}")
            versions = []
        return max([*versions, self._fleet.weights.version], key=version_order)

    def _in_use(self, held: Sequence[Collection[str]]) -> dict[str, _Loaded]:
        """Returns what requests may select, from what each server holds."""
        # One that some of them lack is being loaded, or dropped.
        everywhere = set(held[0]).intersection(*held[1:])
        everywhere -= {self._coming, *self._dropped}
        found = {
            name: each
            for name, each in self._newest(sorted(everywhere)).items()
            # One that was replaced may be there longer than what replaced it.
            if not 0 < _load_number(each.adapter) < self._latest.get(name, 0)
        }
        for name, each in self._loaded.items():
            same = name in found and found[name].adapter == each.adapter
            if same or (
                each.content is not None
                and name in found
                and _load_number(found[name].adapter) <= _load_number(each.adapter)
            ):
                found[name] = each
        default = self._default or ""
        if default not in found and default in self._loaded:
            kept = self._loaded[default]
            if any(kept.adapter.served_as in names for names in held):
                # Some servers lack it, and that is theirs to say: other requests would
                # silently be computed without it.
                found[default] = kept
        return found

    def _served(self) -> frozenset[str]:
        return frozenset(each.adapter.served_as for each in self._loaded.values())

    @property
    def can_reload(self) -> bool:
        """Whether this engine object can load adapters again that it has loaded."""
        loaded = self._loaded.values()
        return not self._closed and any(each.content is not None for each in loaded)

    def _take(self, found: dict[str, _Loaded]) -> None:
        """Has requests select what was found; the latest load may be the default."""
        before = {each.adapter.served_as for each in self._loaded.values()}
        new = [
            each.adapter
            for each in found.values()
            if each.adapter.served_as not in before
            and is_published(each.adapter.served_as)
        ]
        self._loaded = found
        self._fleet.adopt_adapters(self._required())
        for name, each in found.items():
            self._latest[name] = max(
                self._latest.get(name, 0), _load_number(each.adapter)
            )
        if new:
            self._default = max(new, key=_load_number).name
        elif self._default not in found:
            # It was dropped by somebody else, as whole weights do that replace it.
            self._default = None

    def _newest(self, served_names: Sequence[str]) -> dict[str, _Loaded]:
        found: dict[str, Adapter] = {}
        for served_as in served_names:
            adapter = parse_served_name(served_as)
            if adapter.name not in found or _load_number(
                found[adapter.name]
            ) < _load_number(adapter):
                found[adapter.name] = adapter
        return {
            # Whole weights drop what is published, so it was loaded over these.
            name: _Loaded(adapter=each, content=None, base=self._fleet.weights.version)
            for name, each in found.items()
        }

    @contextmanager
    def used(self, names: Sequence[str | None]) -> Iterator[list[Adapter | None]]:
        """Keeps the adapters of requests loaded while these are under way.

        Args:
            names: what each request selects.

        Yields:
            The adapter of each, ``None`` for the base model.

        Raises:
            ConfigurationError: if one has been dropped meanwhile.
        """
        self._begin_after_fork()
        self.check(names)
        adapters = [
            self._loaded[wanted].adapter if wanted else None
            for wanted in (self._default if n is None else n for n in names)
        ]
        with self.held(adapters):
            yield adapters

    @contextmanager
    def held(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Keeps these very adapters loaded while requests use them."""
        served = [adapter.served_as for adapter in adapters if adapter is not None]
        self._users.update(served)
        try:
            yield
        finally:
            self._users.subtract(served)
            self._unused.set()

    # Loading and dropping, on the background loop.

    async def load(
        self,
        name: str,
        content: Content,
        *,
        pinned: bool,
        version: str | None,
        make_default: bool = False,
        timeout: float = LOAD_SECONDS,
    ) -> Adapter:
        """Loads an adapter into every server and has requests use it from then on.

        Raises:
            ConfigurationError: if servers refuse it, or have no room.
            SGLangError: if a server cannot be reached. What was loaded before is used
                as before.
        """
        self._begin_after_fork()
        if not self._capabilities.has_lora:
            raise why_no_lora()
        mark = "@" if make_default else "~"
        deadline = time.monotonic() + timeout
        async with self._in_turn(deadline):
            # The time of its turn: the greatest is the one that requests use.
            adapter = Adapter(
                name=name,
                served_as=f"{name}{mark}{version or ''}#{time.time_ns():x}",
                version=version,
                pinned=pinned,
            )
            replaced = await self._begin_to_replace(adapter)
            await self._make_room(adapter, deadline)
            base = self._fleet.weights.version
            new = _Loaded(adapter=adapter, content=content, base=base)

            def commit() -> None:
                self._loaded = {**self._loaded, name: new}
                if make_default:
                    self._default = name

            self._coming = adapter.served_as
            try:
                while True:
                    await self._send_to_all(new, deadline)
                    if self._fleet.want_adapters(self._required(plus=new), commit):
                        break
            except BaseException:
                self._drop_later(adapter.served_as)
                raise
            finally:
                self._coming = None
            if pinned:
                self._pinned.add(adapter.served_as)
            for served_as in replaced:
                self._retire(served_as)
        torchrl_logger.debug(f"Loaded {adapter}")
        return adapter

    async def unload(self, name: str, *, timeout: float = UNLOAD_SECONDS) -> None:
        """Has requests not use an adapter any more, and servers drop it.

        Raises:
            ConfigurationError: if there is none of this name.
            ServerTimeoutError: if requests use it when the budget is used up; it is
                dropped after them.
        """
        await self.look([name])
        deadline = time.monotonic() + timeout
        async with self._in_turn(deadline):
            self.check([name])
            adapter = self._loaded[name].adapter
            served_as = adapter.served_as
            # Whoever looks afterwards would take an older one for the newest.
            dropped = [served_as, *await self._older(adapter)]
            lingering = [
                each
                for each in self._retiring
                if parse_served_name(each).name == name and self._users[each] <= 0
            ]

            def commit() -> None:
                self._loaded = {n: e for n, e in self._loaded.items() if n != name}
                self._dropped.update(dropped)
                if self._default == name:
                    self._default = None

            self._fleet.want_adapters(self._required(minus=name), commit)
            await self._hurry([served_as, *lingering], deadline)
            if self._users[served_as] > 0:
                for each in dropped:
                    self._retire(each)
                raise ServerTimeoutError(
                    f"{self._users[served_as]} requests used the LoRA adapter "
                    f"{name!r} for longer than {timeout:g} s. No new ones do, and the "
                    f"servers drop it after the last of them."
                )
            left = max(deadline - time.monotonic(), 1.0)
            await asyncio.gather(*(self._drop(each, left) for each in dropped))

    async def published(self, *, timeout: float) -> frozenset[str]:
        """Returns what requests that select no adapter carry, whoever published it.

        The servers tell, under their own names for it.
        """
        if not self._capabilities.has_lora:
            return frozenset()
        held = await self._control.adapters(timeout=timeout)
        return frozenset(filter(is_published, chain(*held)))

    async def withdraw(self, *, timeout: float) -> None:
        """Has every server drop what is published: whole weights take its place.

        To be called when generation is paused, not in place, and requests select it no
        more: those that were on their way to a server at the pause are aborted here.

        Raises:
            SGLangError: if a server cannot be told, or still offers one afterwards.
        """
        self._begin_after_fork()
        deadline = time.monotonic() + timeout
        names = await self.published(timeout=timeout)
        if not names:
            return
        async with self._in_turn(deadline):
            drops = asyncio.ensure_future(self._drop_at_once(names, timeout))
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
            self._dropped |= names
            self._forget(names)

    async def _drop_at_once(self, names: Iterable[str], timeout: float) -> None:
        # The newest last: on some versions of SGLang, one whose requests were aborted
        # in the queue counts as used for ever, and holds the later ones up.
        order = sorted(names, key=lambda each: _load_number(parse_served_name(each)))
        for served_as in order:
            outcomes = await self._control.unload_lora_adapter(
                served_as, timeout=timeout
            )
            for error in outcomes.values():
                # A server that does not have it has nothing to drop.
                if error is not None and not isinstance(error, RequestRefusedError):
                    raise error

    def _forget(self, served_names: Collection[str]) -> None:
        """Has requests select these no more; nobody needs to load them again."""
        kept = {
            name: each
            for name, each in self._loaded.items()
            if each.adapter.served_as not in served_names
        }
        required = self._required() - frozenset(served_names)

        def commit() -> None:
            self._loaded = kept
            if self._default not in kept:
                self._default = None

        self._fleet.want_adapters(required, commit)
        for served_as in served_names:
            self._pinned.discard(served_as)
            for replica in self._fleet.replicas:
                replica.held_adapters.discard(served_as)

    async def _begin_to_replace(self, adapter: Adapter) -> set[str]:
        """Returns what is to be dropped when there is an adapter that is coming.

        That is what requests use until then, ours or others'. Older loads of it are
        dropped now.
        """
        older = await self._older(adapter)
        replaced = set(older[-1:])
        if adapter.name in self._loaded:
            replaced.add(self._loaded[adapter.name].adapter.served_as)
        if adapter.pinned:
            # Servers do not tell what is pinned; what came before us did as we do.
            self._pinned.update(older)
        for served_as in older:
            if served_as not in replaced:
                self._retire(served_as)
        return replaced

    async def _older(self, adapter: Adapter) -> list[str]:
        """Returns older loads of an adapter that we do not drop yet, the oldest first.

        One whose trainer has ended before it dropped what it had replaced has no other
        owner than the next trainer.
        """
        try:
            held = await self._control.adapters(urls=self._fleet.serving)
        except SGLangError as error:
            torchrl_logger.debug(f"Servers do not tell their adapters: {error}")
            return []
        found = [parse_served_name(each) for each in {*chain(*held)}]
        return [
            each.served_as
            for each in sorted(found, key=_load_number)
            if each.name == adapter.name
            and each.served_as not in self._retiring
            and _load_number(each) < _load_number(adapter)
        ]

    def reload(self, replica: Replica) -> None:
        """Begins to load what a server lacks that was started again; does not wait."""
        self._begin_after_fork()
        running = self._equipping.get(replica.url)
        if self._closed or (running is not None and not running.done()):
            return
        self._equipping[replica.url] = asyncio.ensure_future(self._equip(replica))

    async def _equip(self, replica: Replica) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            async with self._in_turn(deadline):
                self._catch_up(replica)
                for each in list(self._loaded.values()):
                    if each.content is not None:
                        await self._send(each, [replica], deadline)
        except SGLangError as error:
            torchrl_logger.warning(
                f"A server that was started again does not take its adapters: {error}"
            )

    def _catch_up(self, replica: Replica) -> None:
        """Takes over what others have loaded or replaced while no server served."""
        if self._fleet.serving:
            # Those tell.
            return
        newest = self._newest(sorted(replica.held_adapters - self._dropped))
        found = {}
        for name, each in self._loaded.items():
            newer = newest.get(name, each)
            if _load_number(newer.adapter) > _load_number(each.adapter):
                found[name] = newer
            elif not each.is_replaced(replica.version):
                found[name] = each
        if found != self._loaded:
            self._take(found)

    async def close(self) -> None:
        """Ends what is under way. Servers that go on drop what was replaced."""
        if self._pid != os.getpid():
            return
        self._closed = True
        tasks = [*self._retiring.values(), *self._equipping.values()]
        replaced = [name for name in self._retiring if self._users[name] <= 0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if any(replica.handle is None for replica in self._fleet.replicas):
            await asyncio.gather(*(self._drop(n, CLOSE_SECONDS) for n in replaced))

    @asynccontextmanager
    async def _in_turn(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self._turn.acquire()
        except TimeoutError:
            raise ServerTimeoutError(
                "Another LoRA adapter was being loaded or dropped until the budget of "
                "this call was used up."
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    def _required(
        self, *, plus: _Loaded | None = None, minus: str | None = None
    ) -> frozenset[str]:
        """Returns what servers must hold, as they call it: what requests may name."""
        held = {**self._loaded}
        if plus is not None:
            held[plus.adapter.name] = plus
        held.pop(minus or "", None)
        return frozenset(each.adapter.served_as for each in held.values())

    async def _send_to_all(self, loaded: _Loaded, deadline: float) -> None:
        """Loads an adapter into every server that runs, also those that just joined."""
        served_as = loaded.adapter.served_as
        while True:
            self._fleet.notice_deaths()
            running = [replica for replica in self._fleet.replicas if replica.runs]
            if not running:
                raise self._fleet.no_server_error()
            lacking = [r for r in running if served_as not in r.held_adapters]
            if not lacking:
                return
            await self._send(loaded, lacking, deadline)

    async def _send(
        self, loaded: _Loaded, replicas: Sequence[Replica], deadline: float
    ) -> None:
        adapter, content = loaded.adapter, loaded.content
        assert content is not None
        budget = deadline - time.monotonic()
        if budget <= 0:
            raise ServerTimeoutError(
                f"The LoRA adapter {adapter.name!r} was not loaded within its budget; "
                f"requests use what they used before."
            )
        lacking = {
            r.url: (r, r.handle)
            for r in replicas
            if adapter.served_as not in r.held_adapters
        }
        if content.path is not None:
            outcomes = await self._control.load_lora_adapter(
                adapter.served_as,
                content.path,
                pinned=adapter.pinned,
                timeout=budget,
                urls=list(lacking),
            )
        else:
            outcomes = await self._control.load_lora_adapter_from_tensors(
                adapter.served_as,
                content.tensors,
                content.config,
                pinned=adapter.pinned,
                timeout=budget,
                urls=list(lacking),
            )
        self._fleet.notice_deaths()
        for url, error in outcomes.items():
            replica, process = lacking[url]
            if error is None and replica.handle is process:
                replica.held_adapters.add(adapter.served_as)
            elif error is not None and replica.handle is process and replica.runs:
                raise self._translated(adapter, error) from error

    def _translated(self, adapter: Adapter, error: SGLangError) -> SGLangError:
        if not isinstance(error, RequestRefusedError):
            return error
        args = self._capabilities.server_args
        return ConfigurationError(
            f"The LoRA adapter {adapter.name!r} was refused: {error} The servers have "
            f"max_lora_rank={args.get('max_lora_rank')}, lora_target_modules="
            f"{args.get('lora_target_modules')}, max_loras_per_batch="
            f"{args.get('max_loras_per_batch')}; start them with others, or load "
            f"another adapter. Requests use what they used before."
        )

    async def _make_room(self, adapter: Adapter, deadline: float) -> None:
        """Sees to it that a server need not drop an adapter that is used.

        One that is full drops the least recently used by itself, and then fails the
        requests that name it.
        """
        places = self._capabilities.server_args.get("max_loras_per_batch")
        if adapter.pinned and places and len(self._pinned) >= places - 1:
            await self._hurry(
                [n for n in self._retiring if n in self._pinned], deadline
            )
        limit = self._capabilities.server_args.get("max_loaded_loras")
        if limit is None:
            return
        if await self._most_held() < limit:
            return
        await self._hurry(list(self._retiring), deadline)
        held = await self._most_held()
        if held >= limit:
            raise ConfigurationError(
                f"There is no room for the LoRA adapter {adapter.name!r}: the servers "
                f"hold {held} and take max_loaded_loras={limit}, and one that is "
                f"replaced stays until its last request has ended. Start them with "
                f"max_loaded_loras={held + 1}, or unload one of "
                f"{', '.join(sorted(self._loaded)) or 'those of other users'}."
            )

    async def _most_held(self) -> int:
        return max(len(held) for held in await self._control.adapters())

    def _retire(self, served_as: str) -> None:
        """Has an adapter dropped that no new request uses, after the last old one."""

        async def retire() -> None:
            try:
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._room_wanted.wait()
            except TimeoutError:
                pass
            await self._wait_until_unused([served_as], time.monotonic() + DRAIN_SECONDS)
            await self._drop(served_as, UNLOAD_SECONDS)

        self._in_background(served_as, retire())

    def _drop_later(self, served_as: str) -> None:
        self._in_background(served_as, self._drop(served_as, UNLOAD_SECONDS))

    def _in_background(self, served_as: str, work: Any) -> None:
        self._dropped.add(served_as)
        task = asyncio.ensure_future(work)
        self._retiring[served_as] = task
        task.add_done_callback(lambda _: self._retiring.pop(served_as, None))

    async def _hurry(self, served_names: Sequence[str], deadline: float) -> None:
        """Waits until adapters that no new request uses are unused, and dropped."""
        self._room_wanted.set()
        try:
            await self._wait_until_unused(served_names, deadline)
            tasks = [
                self._retiring[name] for name in served_names if name in self._retiring
            ]
            if tasks:
                await asyncio.wait(tasks, timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            self._room_wanted.clear()

    async def _wait_until_unused(
        self, served_names: Sequence[str], deadline: float
    ) -> None:
        while any(self._users[name] > 0 for name in served_names):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._unused.clear()
            try:
                async with asyncio.timeout(left):
                    await self._unused.wait()
            except TimeoutError:
                return

    async def _drop(self, served_as: str, timeout: float) -> None:
        """Has every server that holds an adapter drop it; failures are only told."""
        for replica in self._fleet.replicas:
            replica.held_adapters.discard(served_as)
        self._users.pop(served_as, None)
        self._pinned.discard(served_as)
        outcomes = await self._control.unload_lora_adapter(served_as, timeout=timeout)
        for url, error in outcomes.items():
            # A server that was started again never had it.
            if error is not None and not isinstance(error, RequestRefusedError):
                torchrl_logger.warning(
                    f"{url} did not drop the LoRA adapter {served_as!r}: {error}"
                )


def why_no_lora() -> UnsupportedByServerError:
    """Returns the error for servers that were started without LoRA."""
    return UnsupportedByServerError(
        "The servers take no LoRA adapters; start them with enable_lora=True, "
        "max_lora_rank=... and lora_target_modules=['all']."
    )


def check_name(name: str) -> None:
    """Checks the name of an adapter.

    Raises:
        ConfigurationError: if it is none.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no name of a LoRA adapter; give letters, digits, '.', '_', "
            f"'-' and '/'."
        )
