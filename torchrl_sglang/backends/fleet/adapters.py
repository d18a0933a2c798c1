"""The LoRA adapters of one engine, as a part of the state of its fleet. Pure.

The *wanted* adapters are those that requests may select; each server's *held* ones are
in :attr:`.Replica.held_adapters`. A name stays while its adapter is replaced: servers
have another name for each load, so the new one is loaded beside the old one, requests
in flight end with the old one, and they share no prefix-cache entry. Other engine
objects, in any process, discover adapters by these names on the servers.

A server that drops an adapter in use accepts no other adapter until then, and none at
all while it is paused. So an adapter *retires* first: no new request uses it, and it is
dropped after the last one that does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.backends.lora.names import (
    is_published,
    load_number,
    parse_served_name,
)
from torchrl_sglang.backends.lora.payload import AdapterPayload
from torchrl_sglang.errors import SGLangError
from torchrl_sglang.types import Adapter

LINGER_SECONDS = 5.0
"""A replaced adapter is kept for so long, while there is space: engine objects in other
processes discover its replacement within a second."""

DRAIN_SECONDS = 1800.0
"""Longest wait for the last requests of a replaced adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredAdapter:
    """An adapter that requests may select."""

    adapter: Adapter
    content: AdapterPayload | None
    """``None`` where another engine object loaded it."""
    base: str = ""
    """Version of the whole weights when it was loaded."""

    @property
    def served_as(self) -> str:
        """What the servers call this load."""
        return self.adapter.served_as

    @property
    def number(self) -> int:
        """Number of the load; a larger one is newer."""
        return load_number(self.adapter.served_as)

    def is_replaced(self, version: str) -> bool:
        """Returns whether whole weights of this version replaced it."""
        own = max(version_order(self.adapter.version or ""), version_order(self.base))
        return is_published(self.adapter.served_as) and version_order(version) > own


def served_names(wanted: Mapping[str, DesiredAdapter]) -> frozenset[str]:
    """Returns the servers' names of adapters."""
    return frozenset(each.adapter.served_as for each in wanted.values())


def newest_loads(served: Iterable[str], base: str) -> dict[str, DesiredAdapter]:
    """Returns name -> newest load, of loads over whole weights of version ``base``."""
    # The last one counts: the largest number, or else the first name.
    ordered = sorted(sorted(served, reverse=True), key=load_number)
    adapters = map(parse_served_name, ordered)
    return {
        each.name: DesiredAdapter(adapter=each, content=None, base=base)
        for each in adapters
    }


def find_wanted(
    before: Mapping[str, DesiredAdapter],
    held: Sequence[Collection[str]],
    *,
    ignored: Collection[str],
    latest: Mapping[str, int],
    default: str | None,
    base: str,
) -> dict[str, DesiredAdapter]:
    """Returns the adapters that requests may select, from what each server holds.

    ``ignored`` are being loaded or dropped; ``latest`` is the newest load of each name.
    """
    # An adapter that some servers lack is being loaded or dropped.
    everywhere = set(held[0]).intersection(*held[1:]).difference(ignored)
    found = {
        name: each
        for name, each in newest_loads(everywhere, base).items()
        # A replaced load may outlive its replacement.
        if not 0 < each.number < latest.get(name, 0)
    }
    for name, own in before.items():
        other = found.get(name)
        if other is None:
            # Without the default, requests would silently use the base model.
            if name == default and any(own.adapter.served_as in each for each in held):
                found[name] = own
        elif other.adapter == own.adapter or (
            own.content is not None and other.number <= own.number
        ):
            found[name] = own
    return found


def catch_up(
    before: Mapping[str, DesiredAdapter], held: Iterable[str], version: str
) -> dict[str, DesiredAdapter]:
    """Returns the adapters for the first server that runs again; newer loads win."""
    newest = newest_loads(held, version)
    found = {}
    for name, own in before.items():
        newer = newest.get(name, own)
        if newer.number > own.number:
            found[name] = newer
        elif not own.is_replaced(version):
            found[name] = own
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """An adapter that every server is being given; no request uses it before."""

    new: DesiredAdapter
    until: float
    """When its caller gives up, on the monotonic clock."""
    most_loaded: int | None = None
    """Most adapters that a server holds; ``None``: any number."""
    most_pinned: int | None = None
    """Most adapters that a server pins."""
    replaces: frozenset[str] = frozenset()
    """Loads that retire when every server has this one."""
    sent: bool = False
    """Whether servers had room, and were sent it."""
    full: int | None = None
    """How many adapters the fullest server holds, if it has no room."""
    error: SGLangError | None = None
    """Why a server did not take it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retiring:
    """An adapter that no new request uses, while servers hold it."""

    due: float
    """When it is dropped if it is not in use, on the monotonic clock."""
    until: float
    """When it is dropped although it is in use."""
    dropping: bool = False
    """Whether servers were told to drop it."""


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """What one engine knows of the adapters of its servers."""

    wanted: Mapping[str, DesiredAdapter] = field(default_factory=dict)
    """Name -> adapter that requests may select."""
    default: str | None = None
    """Name of the adapter of requests that select none."""
    latest: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of its newest load that was ever found."""
    seen: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Rank of a server -> adapters that it held when all were last asked."""
    loading: Loading | None = None
    sending: frozenset[tuple[int, str]] = frozenset()
    """Ranks of servers, and the loads that they have been sent and not confirmed."""
    users: Mapping[str, int] = field(default_factory=dict)
    """Load -> number of requests that use it."""
    retiring: Mapping[str, Retiring] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    """Loads that this engine object never uses again; those that retire, too."""
    pinned: frozenset[str] = frozenset()
    """Loads that servers keep among those that batches are computed with."""

    @cached_property
    def names(self) -> frozenset[str]:
        """The wanted adapters, under the servers' names."""
        return served_names(self.wanted)

    @property
    def can_reload(self) -> bool:
        """Whether this engine object has loaded adapters that it can load again."""
        return any(each.content is not None for each in self.wanted.values())

    @property
    def ignored(self) -> frozenset[str]:
        """Loads that no request may use, although servers hold them."""
        loading = [self.loading.new.served_as] if self.loading else []
        return self.dropped.union(loading)

    @property
    def lingers(self) -> bool:
        """Whether time alone lets servers drop an adapter."""
        waits = (name for name, each in self.retiring.items() if not each.dropping)
        return any(name not in self.users for name in waits)

    def is_sent(self, served_as: str) -> bool:
        """Returns whether a server may be loading an adapter at this moment."""
        return any(name == served_as for _, name in self.sending)

    def find(
        self, held: Mapping[int, frozenset[str]], base: str
    ) -> dict[str, DesiredAdapter]:
        """Returns the adapters that requests may select, from what servers hold."""
        return find_wanted(
            self.wanted,
            list(held.values()),
            ignored=self.ignored,
            latest=self.latest,
            default=self.default,
            base=base,
        )

    def adopt(self, found: Mapping[str, DesiredAdapter]) -> AdapterState:
        """Makes these the wanted adapters; the newest published one is the default."""
        if found == self.wanted:
            return self
        new = set(filter(is_published, served_names(found) - self.names))
        default = self.default
        if new:
            default = parse_served_name(max(new, key=load_number)).name
        elif default not in found:
            # Another engine object dropped it, or whole weights replaced it.
            default = None
        numbers = {
            name: max(self.latest.get(name, 0), each.number)
            for name, each in found.items()
        }
        latest = {**self.latest, **numbers}
        return replace(self, wanted=found, default=default, latest=latest)

    def without(self, dropped: Collection[str]) -> AdapterState:
        """Returns the state without adapters that are dropped from now on."""
        wanted = {n: w for n, w in self.wanted.items() if w.served_as not in dropped}
        return replace(self.adopt(wanted), dropped=self.dropped.union(dropped))

    def retire(self, loads: Iterable[str], due: float) -> AdapterState:
        """Returns the state when no new request uses some loads, dropped later."""
        new = Retiring(due=due, until=due + DRAIN_SECONDS)
        retiring = {name: new for name in loads if name not in self.retiring}
        return replace(
            self,
            retiring={**self.retiring, **retiring},
            dropped=self.dropped.union(retiring),
        )

    def hurry(self, loads: Collection[str], now: float) -> AdapterState:
        """Returns the state when retiring loads are dropped as soon as they can be."""
        soon = {
            name: replace(each, due=min(each.due, now)) if name in loads else each
            for name, each in self.retiring.items()
        }
        return replace(self, retiring=soon)

    def due(self, now: float) -> list[str]:
        """Returns the loads that servers are to be told to drop now."""
        return [
            name
            for name, each in self.retiring.items()
            if not each.dropping
            and now >= each.due
            and (name not in self.users or now >= each.until)
            and not self.is_sent(name)
        ]

    def in_another_process(self) -> AdapterState:
        """Returns the state without what one process does, such as its requests."""
        return replace(
            self,
            loading=None,
            sending=frozenset(),
            users={},
            retiring={},
            pinned=frozenset(),
        )

    def for_copy(self) -> AdapterState:
        """Returns what a copy of the engine in another process needs to know."""
        wanted = {n: replace(each, content=None) for n, each in self.wanted.items()}
        return replace(AdapterState().adopt(wanted), default=self.default)
