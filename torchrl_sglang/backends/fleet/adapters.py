"""The LoRA adapters of an engine, as a pure part of the state of its fleet.

Requests may select the *wanted* adapters; :attr:`.Replica.held_adapters` has the
adapters on each server. A replacement keeps the adapter's name: each load has a served
name of its own, so the new load is added beside the old load, requests in flight finish
with the old load, and the loads share no prefix-cache entry. Other engine objects, in
any process, discover adapters by their served names.

During the drop of an adapter in use, a server accepts no other adapter, and none at all
while it is paused. So an adapter *retires* first: no new request uses it, and it is
dropped after its last request.
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
"""Time to keep a replaced adapter, while there is space: engine objects in other
processes discover its replacement within a second."""

DRAIN_SECONDS = 1800.0
"""Longest wait for the last requests of a replaced adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredAdapter:
    """An adapter for requests to select."""

    adapter: Adapter
    content: AdapterPayload | None
    """``None`` where another engine object loaded it."""
    base: str = ""
    """Version of the whole weights when it was loaded."""

    @property
    def served_as(self) -> str:
        """Served name of this load."""
        return self.adapter.served_as

    @property
    def number(self) -> int:
        """Number of the load; newer loads have larger numbers."""
        return load_number(self.adapter.served_as)

    def is_replaced(self, version: str) -> bool:
        """Returns whether whole weights of this version replaced it."""
        newest = max(
            version_order(self.adapter.version or ""), version_order(self.base)
        )
        return is_published(self.adapter.served_as) and version_order(version) > newest


def served_names(wanted: Mapping[str, DesiredAdapter]) -> frozenset[str]:
    """Returns the served names of adapters."""
    return frozenset(adapter.served_as for adapter in wanted.values())


def newest_loads(served: Iterable[str], base: str) -> dict[str, DesiredAdapter]:
    """Returns name -> newest load, for loads on whole weights of version ``base``."""
    # A later load replaces an earlier load: the largest number, else the first name.
    ordered = sorted(sorted(served, reverse=True), key=load_number)
    adapters = map(parse_served_name, ordered)
    return {
        load.name: DesiredAdapter(adapter=load, content=None, base=base)
        for load in adapters
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
    """Returns the selectable adapters, given the loads on each server.

    ``ignored`` are being loaded or dropped; ``latest`` is the newest load of each name.
    """
    # An adapter on a part of the servers is being loaded or dropped.
    everywhere = set(held[0]).intersection(*held[1:]).difference(ignored)
    loads_by_name = {
        name: load
        for name, load in newest_loads(everywhere, base).items()
        # A replaced load may outlive its replacement.
        if not 0 < load.number < latest.get(name, 0)
    }
    for name, adapter in before.items():
        other = loads_by_name.get(name)
        if other is None:
            # Without the default, requests would silently use the base model.
            served_as = adapter.served_as
            if name == default and any(served_as in loads for loads in held):
                loads_by_name[name] = adapter
        elif other.adapter == adapter.adapter or (
            adapter.content is not None and other.number <= adapter.number
        ):
            loads_by_name[name] = adapter
    return loads_by_name


def catch_up(
    before: Mapping[str, DesiredAdapter], held: Iterable[str], version: str
) -> dict[str, DesiredAdapter]:
    """Returns the adapters for the first server after a restart; newer loads win."""
    newest = newest_loads(held, version)
    loads_by_name = {}
    for name, adapter in before.items():
        newer = newest.get(name, adapter)
        if newer.number > adapter.number:
            loads_by_name[name] = newer
        elif not adapter.is_replaced(version):
            loads_by_name[name] = adapter
    return loads_by_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """An adapter on its way into every server; no request uses it before."""

    new: DesiredAdapter
    until: float
    """Deadline of its caller, on the monotonic clock."""
    most_loaded: int | None = None
    """Most adapters on a server; ``None``: any number."""
    most_pinned: int | None = None
    replaces: frozenset[str] = frozenset()
    """Loads that retire when every server has the new load."""
    sent: bool = False
    """Whether it was sent to the servers, which had room."""
    full: int | None = None
    """Number of adapters on the fullest server, if there is no room."""
    error: SGLangError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Retiring:
    """An adapter held by servers, without new requests."""

    start: float
    """Earliest time of the drop if it is not in use, on the monotonic clock."""
    until: float
    """Latest time of the drop, even while it is in use."""
    dropping: bool = False
    """Whether servers have been requested to drop it."""


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """The LoRA adapters of an engine's servers."""

    wanted: Mapping[str, DesiredAdapter] = field(default_factory=dict)
    default: str | None = None
    """Name of the adapter of requests that select none."""
    latest: Mapping[str, int] = field(default_factory=dict)
    """Name -> largest number of its loads so far."""
    seen: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Rank of a server -> its adapters at the last full discovery."""
    loading: Loading | None = None
    sending: frozenset[tuple[int, str]] = frozenset()
    """Rank of a server and load, for each unconfirmed load."""
    users: Mapping[str, int] = field(default_factory=dict)
    retiring: Mapping[str, Retiring] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    """Loads never used again by this engine object, including retiring loads."""
    pinned: frozenset[str] = frozenset()
    """Loads pinned in the servers' batch memory."""

    @cached_property
    def names(self) -> frozenset[str]:
        """The wanted adapters, under the servers' names."""
        return served_names(self.wanted)

    @property
    def can_reload(self) -> bool:
        """Whether this engine object loaded some of the wanted adapters."""
        return any(adapter.content is not None for adapter in self.wanted.values())

    @property
    def ignored(self) -> frozenset[str]:
        """Loads on servers, closed to requests."""
        loading = [self.loading.new.served_as] if self.loading else []
        return self.dropped.union(loading)

    @property
    def lingers(self) -> bool:
        """Whether an unused adapter waits for its time to be dropped."""
        waits = (name for name, load in self.retiring.items() if not load.dropping)
        return any(name not in self.users for name in waits)

    def is_sent(self, served_as: str) -> bool:
        """Returns whether a server may be loading an adapter at this moment."""
        return any(name == served_as for _, name in self.sending)

    def find(
        self, held: Mapping[int, frozenset[str]], base: str
    ) -> dict[str, DesiredAdapter]:
        """Returns the selectable adapters, given each server's loads."""
        return find_wanted(
            self.wanted,
            list(held.values()),
            ignored=self.ignored,
            latest=self.latest,
            default=self.default,
            base=base,
        )

    def adopt(self, found: Mapping[str, DesiredAdapter]) -> AdapterState:
        """Replaces the wanted adapters; the newest published adapter is the default."""
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
            name: max(self.latest.get(name, 0), adapter.number)
            for name, adapter in found.items()
        }
        latest = {**self.latest, **numbers}
        return replace(self, wanted=found, default=default, latest=latest)

    def without(self, dropped: Collection[str]) -> AdapterState:
        """Returns the state without some loads, which are never used again."""
        remaining = {n: w for n, w in self.wanted.items() if w.served_as not in dropped}
        return replace(self.adopt(remaining), dropped=self.dropped.union(dropped))

    def retire(self, loads: Iterable[str], due: float) -> AdapterState:
        """Returns the state with some loads retiring; they are dropped at ``due``."""
        new = Retiring(start=due, until=due + DRAIN_SECONDS)
        retiring = {name: new for name in loads if name not in self.retiring}
        return replace(
            self,
            retiring={**self.retiring, **retiring},
            dropped=self.dropped.union(retiring),
        )

    def hurry(self, loads: Collection[str], now: float) -> AdapterState:
        """Returns the state with retiring loads due now."""
        soon = {
            name: replace(load, start=min(load.start, now)) if name in loads else load
            for name, load in self.retiring.items()
        }
        return replace(self, retiring=soon)

    def due(self, now: float) -> list[str]:
        """Returns the retiring loads to drop now."""
        return [
            name
            for name, load in self.retiring.items()
            if not load.dropping
            and now >= load.start
            and (name not in self.users or now >= load.until)
            and not self.is_sent(name)
        ]

    def in_another_process(self) -> AdapterState:
        """Returns a copy without process-local state (loads in flight, users)."""
        return replace(
            self,
            loading=None,
            sending=frozenset(),
            users={},
            retiring={},
            pinned=frozenset(),
        )

    def for_copy(self) -> AdapterState:
        """Returns the state for a copy of the engine in another process."""
        adapters = {n: replace(a, content=None) for n, a in self.wanted.items()}
        return replace(AdapterState().adopt(adapters), default=self.default)
