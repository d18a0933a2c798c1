"""Events of LoRA adapters, as pure transitions of the fleet; see :func:`.reconcile`.

Adapters are loaded in turn. Retired loads in the way of a new load are dropped first,
and requests use an adapter when every server has it. A restarted server reloads its
missing adapters before it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torchrl_sglang.backends.fleet.actions import Check, DropAdapter, LoadAdapter, Tell
from torchrl_sglang.backends.fleet.adapters import (
    LINGER_SECONDS,
    AdapterState,
    DesiredAdapter,
    Loading,
    catch_up,
)
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.fleet.step import Event, Step
from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.backends.lora.names import load_number, parse_served_name
from torchrl_sglang.errors import RequestRefusedError, SGLangError

LOAD_SECONDS = 120.0
"""Default timeout for loading an adapter, the wait for space included."""


# Next steps.


def advance(step: Step) -> None:
    """Continues the current load, and drops unused retired loads."""
    loading = step.state.adapters.loading
    if step.state.closed:
        return
    if loading is not None and loading.error is None:
        _advance_load(step, loading)
    for served_as in step.state.adapters.due(step.now):
        adapters = step.state.adapters
        dropping = replace(adapters.retiring[served_as], dropping=True)
        retiring = {**adapters.retiring, served_as: dropping}
        step.set(adapters=replace(adapters, retiring=retiring))
        step.do(DropAdapter(served_as=served_as))


def _advance_load(step: Step, loading: Loading) -> None:
    state, served_as = step.state, loading.new.served_as
    if not loading.sent:
        held, limit = state.most_adapters, loading.most_loaded
        full = held if limit is not None and held >= limit else None
        loading = replace(loading, full=full)
        in_the_way = _in_the_way(state.adapters, loading)
        adapters = replace(state.adapters, loading=loading)
        step.set(adapters=adapters.hurry(in_the_way, step.now))
        if in_the_way or full is not None:
            return
    lacking = [r for r in state.running if served_as not in r.held_adapters]
    targets = [r for r in lacking if (r.rank, served_as) not in state.adapters.sending]
    if targets:
        loading = replace(loading, sent=True)
        step.set(adapters=replace(step.state.adapters, loading=loading))
        _send(step, loading.new, targets, loading.until - step.now)
    elif state.running and not state.adapters.is_sent(served_as):
        _finish_load(step, loading)


def _in_the_way(adapters: AdapterState, loading: Loading) -> frozenset[str]:
    """Returns the loads to drop first; a full server drops a load in use."""
    retiring = frozenset(adapters.retiring)
    if loading.full is not None:
        return retiring
    limit = loading.most_pinned if loading.new.adapter.pinned else None
    no_pin = limit is not None and len(adapters.pinned) >= limit
    return retiring & adapters.pinned if no_pin else frozenset()


def _send(
    step: Step, adapter: DesiredAdapter, servers: list[Replica], timeout: float
) -> None:
    adapters = step.state.adapters
    pairs = ((replica.rank, adapter.served_as) for replica in servers)
    step.set(adapters=replace(adapters, sending=adapters.sending.union(pairs)))
    timeout = max(timeout, 0.1)
    step.do(LoadAdapter(adapter=adapter, servers=tuple(servers), timeout=timeout))


def _finish_load(step: Step, loading: Loading) -> None:
    """Makes a fully loaded adapter the current adapter of its name."""
    adapters, new = step.state.adapters, loading.new
    adapters = replace(adapters, loading=None)
    adapters = adapters.adopt({**adapters.wanted, new.adapter.name: new})
    if new.adapter.pinned:
        adapters = replace(adapters, pinned=adapters.pinned | {new.served_as})
    _retire(step, adapters, loading.replaces, step.now + LINGER_SECONDS)


def _retire(
    step: Step, adapters: AdapterState, loads: frozenset[str], due: float
) -> None:
    step.set(adapters=adapters.retire(loads, due))
    step.do(Check(at_once=False))


def catch_up_with(step: Step, replica: Replica, version: str) -> None:
    """Adopts the adapters of the first restarted server: they show replaced loads."""
    adapters = step.state.adapters
    if step.state.misses_adapters(replica) and not step.state.serving:
        held = replica.held_adapters - adapters.ignored
        step.set(adapters=adapters.adopt(catch_up(adapters.wanted, held, version)))


def give_wanted(step: Step, rank: int) -> None:
    """Reloads the next missing adapter into a restarted server."""
    state, replica = step.state, step.state.find(rank)
    busy = any(rank == sent_to for sent_to, _ in state.adapters.sending)
    if replica is None or state.closed or busy or not state.misses_adapters(replica):
        return
    for adapter in state.adapters.wanted.values():
        # Another engine object loads its own adapters again.
        lacks = adapter.served_as not in replica.held_adapters
        if adapter.content is not None and lacks:
            _send(step, adapter, [replica], LOAD_SECONDS)
            return


def _older_loads(state: FleetState, name: str, number: int) -> list[str]:
    """Returns droppable older loads of an adapter, the oldest first.

    They include the replaced loads of a killed trainer.
    """
    loads = (r.held_adapters for r in state.replicas if r.state == "serving")
    loading = state.adapters.loading
    busy = {*state.adapters.retiring, loading.new.served_as if loading else ""}
    return [
        name_on_server
        for name_on_server in sorted({*chain(*loads)}, key=load_number)
        if parse_served_name(name_on_server).name == name
        and name_on_server not in busy
        and load_number(name_on_server) < number
    ]


# Events.


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOffered(Event):
    """A caller offers an adapter for every server, after a discovery."""

    loading: Loading

    def _apply(self, step: Step) -> None:
        adapters, new = step.state.adapters, self.loading.new
        adapter = new.adapter
        if adapters.loading is not None or new.served_as in adapters.names:
            return
        older = _older_loads(step.state, adapter.name, new.number)
        replaced = frozenset(older[-1:])
        if adapter.name in adapters.wanted:
            replaced |= {adapters.wanted[adapter.name].served_as}
        if adapter.pinned:
            # Servers do not report pinned loads; assume older loads are pinned as well.
            adapters = replace(adapters, pinned=adapters.pinned.union(older))
        loading = replace(self.loading, replaces=replaced)
        adapters = replace(adapters, loading=loading)
        _retire(step, adapters, frozenset(older) - replaced, step.now + LINGER_SECONDS)
        advance(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSent(Event):
    """A load of an adapter into a server has ended."""

    asked: Replica
    """The server's state when the load began."""
    served_as: str
    error: SGLangError | None = None

    def _apply(self, step: Step) -> None:
        adapters, key = step.state.adapters, (self.asked.rank, self.served_as)
        if key not in adapters.sending:
            return
        step.set(adapters=replace(adapters, sending=adapters.sending - {key}))
        replica = step.same_start(self.asked)
        if replica is not None and self.error is None:
            step.put(replica.with_adapter(self.served_as))
            give_wanted(step, replica.rank)
        elif replica is not None and replica.runs and self.error is not None:
            self._failed(step, replica, self.error)
        advance(step)

    def _failed(self, step: Step, replica: Replica, error: SGLangError) -> None:
        adapters = step.state.adapters
        refused = isinstance(error, RequestRefusedError)
        if not refused and self.served_as not in adapters.names:
            # It may have it all the same, and then it has less room.
            step.put(replica.with_adapter(self.served_as))
        loading = adapters.loading
        if loading is not None and loading.new.served_as == self.served_as:
            failed = replace(loading, error=loading.error or error)
            step.set(adapters=replace(adapters, loading=failed))
        elif self.served_as in adapters.names:
            text = "A server that was started again does not take its adapters"
            step.do(Tell(text=f"{text}: {error}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterGivenUp(Event):
    """The caller's wait for an adapter has ended; servers drop an incomplete load."""

    served_as: str

    def _apply(self, step: Step) -> None:
        adapters = step.state.adapters
        loading = adapters.loading
        if loading is not None and loading.new.served_as == self.served_as:
            adapters = replace(adapters, loading=None)
            _retire(step, adapters, frozenset({self.served_as}), step.now)
            advance(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterUnwanted(Event):
    """A caller wants an adapter no more, nor older loads of it."""

    name: str

    def _apply(self, step: Step) -> None:
        adapters = step.state.adapters
        if self.name not in adapters.wanted:
            return
        adapter = adapters.wanted[self.name]
        # Otherwise other processes would discover an older load as current.
        older = _older_loads(step.state, self.name, adapter.number)
        linger = [
            n for n in adapters.retiring if parse_served_name(n).name == self.name
        ]
        adapters = adapters.without([adapter.served_as]).hurry(linger, step.now)
        _retire(step, adapters, frozenset({adapter.served_as, *older}), step.now)
        advance(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDropped(Event):
    """Servers have been requested to drop an adapter."""

    served_as: str
    kept: Mapping[str, SGLangError]
    """Address of a server with a possible load -> error."""

    def _apply(self, step: Step) -> None:
        adapters, gone = step.state.adapters, self.served_as
        if gone not in adapters.retiring:
            return
        retiring = {n: load for n, load in adapters.retiring.items() if n != gone}
        step.set(adapters=replace(adapters, retiring=retiring))
        step.state = step.state.without_adapters({gone}, kept=self.kept)
        for error in self.kept.values():
            step.do(Tell(text=f"The LoRA adapter {gone!r} was not dropped: {error}"))
        advance(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterUsed(Event):
    """A request has begun or ended its use of an adapter."""

    served_as: str
    by: int
    """Change of the number of users: 1 or -1."""

    def _apply(self, step: Step) -> None:
        adapters, served_as = step.state.adapters, self.served_as
        users = dict(adapters.users)
        users[served_as] = users.get(served_as, 0) + self.by
        if users[served_as] <= 0:
            del users[served_as]
        step.set(adapters=replace(adapters, users=users))
        if served_as in adapters.retiring and served_as not in users:
            advance(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptersListed(Event):
    """A discovery has listed the adapters of servers, loaded by any engine object."""

    before: Mapping[str, DesiredAdapter]
    """The wanted adapters before the discovery; a later load or drop by this engine
    object invalidates it."""
    held: Mapping[int, frozenset[str]]
    """Rank -> adapters on a server."""
    version: str = ""
    """Newest version of whole weights on the servers; ``""``: not queried."""

    def _apply(self, step: Step) -> None:
        adapters = step.state.adapters
        if not self.held or adapters.wanted is not self.before:
            return
        base = step.state.weights.version
        loads = adapters.find(self.held, base)
        version = max(self.version, base, key=version_order)
        for name, adapter in self.before.items():
            # An adapter of this object stays wanted unless whole weights replaced it.
            own_load = adapter.content is not None and not adapter.is_replaced(version)
            if name not in loads and own_load:
                loads[name] = adapter
        step.set(adapters=replace(adapters.adopt(loads), seen=self.held))
