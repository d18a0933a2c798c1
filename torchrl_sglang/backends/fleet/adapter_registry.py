"""Loads LoRA adapters into every server, and lets requests select them by name.

Each call applies an event to the fleet and waits for its outcome: see ``adapters`` for
the state, and ``adapter_events`` for the transitions.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import chain

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.adapter_calls import UNLOAD_SECONDS, AdapterCalls
from torchrl_sglang.backends.fleet.adapter_events import (
    LOAD_SECONDS,
    AdapterGivenUp,
    AdapterOffered,
    AdapterUnwanted,
    AdapterUsed,
)
from torchrl_sglang.backends.fleet.adapters import AdapterState, DesiredAdapter, Loading
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.state import FleetState
from torchrl_sglang.backends.lora.names import (
    check_name,
    is_published,
    load_number,
    make_served_name,
    parse_served_name,
)
from torchrl_sglang.backends.lora.payload import AdapterPayload
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.support.checks import timeout_or
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Adapter

OUTCOME_SECONDS = 1.0
"""Extra time for the outcome of a call after the call's own timeout."""

_DROPPED = re.compile(
    r"Failed to implicitly load LoRA adapter|requested LoRA adapters are not loaded"
    r"|LoRA adapter that has never been loaded"
)
"""Refusals of a request whose adapter was dropped, or lost in a restart."""


def no_lora_error() -> UnsupportedByServerError:
    """Returns the error for servers that were started without LoRA."""
    return UnsupportedByServerError(
        "The servers take no LoRA adapters; start them with enable_lora=True, "
        "max_lora_rank=... and lora_target_modules=['all']."
    )


class AdapterRegistry:
    """The adapters of one engine. Used from the background loop, except for reading."""

    def __init__(
        self, control: ControlPlane, fleet: Fleet, calls: AdapterCalls
    ) -> None:
        self._control = control
        self._fleet = fleet
        self._calls = calls
        self._capabilities = calls.capabilities
        self._begin_in_this_process()
        after_fork(self._begin_in_this_process)

    def _begin_in_this_process(self) -> None:
        self._lock = asyncio.Lock()

    # Reading, from any thread.

    @property
    def _known(self) -> AdapterState:
        return self._fleet.state.adapters

    @property
    def table(self) -> dict[str, Adapter]:
        """Name -> adapter that requests can select."""
        return {name: adapter.adapter for name, adapter in self._known.wanted.items()}

    @property
    def default(self) -> str | None:
        """Name of the adapter of requests that select none."""
        return self._known.default

    @default.setter
    def default(self, name: str | None) -> None:
        if name and not self._capabilities.has_lora:
            raise no_lora_error()
        if name is not None:
            self.check([name])
        self._fleet.change_adapters(lambda now: replace(now, default=name or None))

    def check_new(self, name: str, version: str | None) -> None:
        """Checks the name and the version of a new adapter."""
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

    def check(self, names: Sequence[str | None]) -> None:
        """Checks that the selected adapters are loaded."""
        for name in dict.fromkeys(names):
            self._select(name)

    def _select(self, name: str | None) -> Adapter | None:
        state = self._known
        selected = state.default if name is None else name
        if not selected:
            return None
        if selected not in state.wanted:
            loaded = ", ".join(map(repr, sorted(state.wanted))) or "none"
            raise ConfigurationError(
                f"There is no LoRA adapter {selected!r} on the servers; loaded: "
                f"{loaded}. Load it with engine.load_adapter({selected!r}, ...)."
            )
        return state.wanted[selected].adapter

    # Requests, on the background loop.

    async def refresh(self, names: Sequence[str | None]) -> None:
        """Discovers adapters periodically, and checks the selected adapters."""
        if not self._capabilities.has_lora:
            if any(names):
                raise no_lora_error()
            return
        await self._calls.discover_changes(self._fleet, after=1.0)
        try:
            self.check(names)
        except ConfigurationError:
            await self._calls.discover(self._fleet)
            self.check(names)

    async def missed(self, error: RequestRefusedError) -> bool:
        """Discovers adapters if a server refused a request for a missing adapter."""
        is_missing = _DROPPED.search(str(error)) is not None
        if is_missing:
            await self._calls.discover(self._fleet)
        return is_missing

    def used(self, name: str | None) -> AbstractContextManager[Adapter | None]:
        """Selects the adapter of a request, and keeps it loaded meanwhile."""
        adapter = self._select(name)
        return self.held(adapter)

    @contextmanager
    def held(self, adapter: Adapter | None) -> Iterator[Adapter | None]:
        """Yields an adapter, and keeps it loaded while a request uses it."""
        if adapter is None:
            yield None
            return
        self._fleet.apply(AdapterUsed(served_as=adapter.served_as, by=1))
        try:
            yield adapter
        finally:
            self._fleet.apply(AdapterUsed(served_as=adapter.served_as, by=-1))

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
        deadline = time.monotonic() + timeout_or(LOAD_SECONDS, timeout)
        fleet = self._fleet
        async with self._turn(deadline):
            adapter = Adapter(
                name=name,
                served_as=make_served_name(name, version, published=make_default),
                version=version,
                pinned=pinned,
            )
            base = fleet.weights.version
            new = DesiredAdapter(adapter=adapter, content=content, base=base)
            await self._calls.ask(fleet, fleet.state.running)
            await self._load(new, deadline)
        if version is not None:
            fleet.change_weights(lambda weights: weights.reserve(version))
        torchrl_logger.debug(f"Loaded {adapter}")
        return adapter

    async def _load(self, new: DesiredAdapter, deadline: float) -> None:
        fleet, args = self._fleet, self._capabilities.args
        places = args.max_loras_per_batch
        loading = Loading(
            new=new,
            until=deadline,
            most_loaded=args.max_loaded_loras,
            most_pinned=places - 1 if places else None,
        )
        fleet.notice_deaths()
        fleet.apply(AdapterOffered(loading=loading))
        try:
            await fleet.until(_load_ended, deadline + OUTCOME_SECONDS)
            if self._known.loading is not None:
                cause = self._known.loading.error
                reason = self._why_not_loaded(fleet.state)
                # An error that is its own cause has no end.
                raise reason from None if reason is cause else cause
        finally:
            # Changes nothing if it was loaded.
            fleet.apply(AdapterGivenUp(served_as=new.served_as))

    def _why_not_loaded(self, state: FleetState) -> SGLangError:
        loading, args = state.adapters.loading, self._capabilities.args
        if state.closed:
            return ServerUnavailableError("The engine was shut down; make a new one.")
        if not state.running or loading is None:
            return state.no_server_error()
        name, error = loading.new.adapter.name, loading.error
        if isinstance(error, RequestRefusedError):
            names = ("max_lora_rank", "lora_target_modules", "max_loras_per_batch")
            settings = ", ".join(f"{key}={getattr(args, key)}" for key in names)
            return ConfigurationError(
                f"The LoRA adapter {name!r} was refused: {error} The servers have "
                f"{settings}; start them with others, or load another adapter. "
                f"Requests use the same adapters as before."
            )
        if error is not None:
            return error
        if loading.full is not None:
            loaded = ", ".join(sorted(state.adapters.wanted)) or "other users' adapters"
            return ConfigurationError(
                f"There is no room for the LoRA adapter {name!r}: the servers hold "
                f"{loading.full} and take max_loaded_loras={loading.most_loaded}, and "
                f"one that is replaced stays until its last request has ended. Start "
                f"them with max_loaded_loras={loading.full + 1}, or unload one of "
                f"{loaded}."
            )
        return ServerTimeoutError(
            f"The LoRA adapter {name!r} was not loaded before the timeout; requests "
            f"use the same adapters as before."
        )

    async def unload(self, name: str, *, timeout: float | None = None) -> None:
        """Lets servers drop an adapter; new requests cannot select it."""
        check_name(name)
        timeout = timeout_or(UNLOAD_SECONDS, timeout)
        await self.refresh([name])
        deadline, fleet = time.monotonic() + timeout, self._fleet
        async with self._turn(deadline):
            self.check([name])
            served_as = self._known.wanted[name].served_as
            await self._calls.ask(fleet, fleet.state.running)
            fleet.apply(AdapterUnwanted(name=name))

            def is_unused(state: FleetState) -> bool:
                return state.closed or served_as not in state.adapters.users

            await fleet.until(is_unused, deadline)
            if users := self._known.users.get(served_as):
                raise ServerTimeoutError(
                    f"{users} requests used the LoRA adapter {name!r} for longer than "
                    f"{timeout:g} s. No new ones do, and the servers drop it after the "
                    f"last of them."
                )

            def is_dropped(state: FleetState) -> bool:
                now = state.adapters
                loads = (n for n in now.retiring if parse_served_name(n).name == name)
                return state.closed or all(load in now.users for load in loads)

            until = max(deadline, time.monotonic() + OUTCOME_SECONDS)
            await fleet.until(is_dropped, until)
            if not is_dropped(fleet.state):
                torchrl_logger.warning(
                    f"The LoRA adapter {name!r} was not dropped before the timeout; "
                    f"no request uses it."
                )

    async def published(self, *, timeout: float) -> frozenset[str]:
        """Returns the served names of published adapters, the default of requests."""
        if not self._capabilities.has_lora:
            return frozenset()
        held = await self._control.adapters(timeout=timeout)
        return frozenset(filter(is_published, chain(*held)))

    async def withdraw(self, *, timeout: float) -> None:
        """Drops the published adapters, which whole weights replace.

        Generation must be paused, not in place. Requests that reach a server after the
        pause are aborted.
        """
        deadline = time.monotonic() + timeout
        names = await self.published(timeout=timeout)
        if not names:
            return
        async with self._turn(deadline):
            drops = asyncio.ensure_future(self._drop_now(names, timeout))
            until = min(deadline, time.monotonic() + 3.0)
            try:
                while not drops.done() and time.monotonic() < until:
                    await self._control.abort_all(timeout=timeout)
                    await asyncio.wait([drops], timeout=0.2)
                if drops.done():
                    drops.result()
            finally:
                drops.cancel()
            remaining = names & await self.published(timeout=timeout)
            if remaining:
                raise RequestRefusedError(
                    f"Servers did not drop the LoRA adapters "
                    f"{', '.join(sorted(remaining))}, which requests carry."
                )
            self._fleet.change_adapters(lambda now: now.without(names))
            self._fleet.change(lambda now: now.without_adapters(names))

    async def _drop_now(self, names: Collection[str], timeout: float) -> None:
        # The newest last: in some versions of SGLang, an adapter whose requests were
        # aborted in the queue counts as used forever, and blocks the later ones.
        for served_as in sorted(names, key=load_number):
            errors = await self._calls.unload(self._fleet, served_as, timeout)
            for error in errors.values():
                raise error

    async def close(self) -> None:
        """Has servers that keep running drop replaced adapters."""
        state = self._known
        unused = [name for name in state.retiring if name not in state.users]
        if any(replica.handle is None for replica in self._fleet.replicas):
            calls, fleet = self._calls, self._fleet
            drops = (calls.unload(fleet, name, 2.0) for name in unused)
            await asyncio.gather(*drops)

    @asynccontextmanager
    async def _turn(self, deadline: float) -> AsyncIterator[None]:
        """Lets one caller at a time load or drop adapters."""
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


def _load_ended(state: FleetState) -> bool:
    """Returns whether an adapter was loaded, or will not be."""
    loading = state.adapters.loading
    if loading is None or state.closed or not state.running:
        return True
    no_room = loading.full is not None and not state.adapters.retiring
    return no_room or loading.error is not None
