"""Version and consistency of the servers' weights: the only place that changes them.

An update begins, and then ends in one of three ways::

    begin() ─┬─> commit(version)            every server holds this version
             ├─> abort()                    servers hold what they held before
             └─> mark_inconsistent(reason)  servers may hold a mix of versions

While the weights are inconsistent, the engine refuses to generate; the next commit ends
that. Every change happens under the lock and replaces an immutable :class:`Weights`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The state of the weights at one moment."""

    version: str
    """Version of the current weights."""
    newest: str
    """Newest version that weights or an adapter have had; no later one reuses it."""
    checkpoint_version: str | None
    """Version of the checkpoint that the servers started with; ``None``: unknown."""
    inconsistent: str | None = None
    """Why the servers may hold a mix of weights; ``None`` while they are consistent."""
    abort_epoch: int = 0
    """How often the in-flight requests were aborted, to be sent again."""
    membership_epoch: int = 0
    """Grows when a server joins or leaves; a process group is valid for one epoch."""
    in_place_versions: frozenset[str] = frozenset()
    """Versions that in-flight requests went on with, on a stale KV cache."""
    clean_versions: frozenset[str] = frozenset()
    """Versions before which the KV cache was flushed."""


def version_order(version: str) -> int:
    """Returns a weight version as a number; a name, such as ``default``, is oldest."""
    return int(version) if version.isdigit() else -1


def next_version(versions: Iterable[str]) -> str:
    """Returns the version after the newest of these."""
    return str(1 + max(0, *map(version_order, versions)))


class WeightsState:
    """Changes the state of the weights of one engine's servers."""

    def __init__(self, version: str) -> None:
        # A number means that a trainer has sent weights before.
        checkpoint = None if version.isdigit() else version
        self._now = Weights(
            version=version, newest=version, checkpoint_version=checkpoint
        )
        self._lock = threading.Lock()
        self._held: Future[None] | None = None

    @property
    def now(self) -> Weights:
        """The current state."""
        return self._now

    def _change(self, change: Callable[[Weights], Weights]) -> None:
        with self._lock:
            self._now = change(self._now)

    def begin(self) -> WeightUpdate:
        """Begins a weight update."""
        return WeightUpdate(self, self._now.inconsistent)

    def observe(self, version: str) -> bool:
        """Takes over a newer version that a server reports; returns if it was newer."""
        with self._lock:
            newer = version_order(version) > version_order(self._now.version)
            if newer:
                self._now = _newest(replace(self._now, version=version), version)
            return newer

    def reserve(self, version: str) -> None:
        """Records the version of an adapter, so that no later update reuses it."""
        self._change(lambda now: _newest(now, version))

    def mark_inconsistent(self, reason: str | None) -> None:
        """Sets why the servers may hold a mix of weights, or ``None``."""
        self._change(lambda now: replace(now, inconsistent=reason))

    def aborts_requests(self) -> None:
        """In-flight requests are about to be aborted: they go on, or are sent again."""
        self._change(lambda now: replace(now, abort_epoch=now.abort_epoch + 1))

    def hold_requests(self) -> None:
        """Lets no request be sent from now on, until an update has ended."""
        with self._lock:
            self._held = self._held or Future()

    def release_requests(self) -> None:
        """Lets requests be sent again."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held.set_result(None)

    async def settled(self) -> None:
        """Waits until requests may be sent."""
        while (held := self._held) is not None:
            # Several wait for it, and one that is cancelled must not end it.
            await asyncio.shield(asyncio.wrap_future(held))

    def begin_membership_epoch(self) -> None:
        """Invalidates process groups: a server has joined or left."""
        self._change(
            lambda now: replace(now, membership_epoch=now.membership_epoch + 1)
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy has sent no request that an update could have aborted.
        return {"_now": replace(self._now, abort_epoch=0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _held=None)

    def __repr__(self) -> str:
        reason = self._now.inconsistent
        status = "consistent" if reason is None else f"inconsistent: {reason}"
        return f"WeightsState({self._now.version!r}, {status})"


def _newest(weights: Weights, version: str) -> Weights:
    return replace(weights, newest=max(weights.newest, version, key=version_order))


class WeightUpdate:
    """Reports to the engine what a weight update does and how it ended."""

    def __init__(self, state: WeightsState, reason: str | None) -> None:
        self._state = state
        self._reason_before = reason
        self._in_place = self._flushed = False
        self.version: str | None = None
        """Version that was committed; ``None`` before."""

    @property
    def was_inconsistent(self) -> bool:
        """Whether an earlier update left a mix of old and new weights."""
        return self._reason_before is not None

    def commit(self, version: str, *, checkpoint: bool = False) -> None:
        """Every server holds this version; call it before generation resumes.

        ``checkpoint``: it is the weights that the servers were started with.
        """

        def change(now: Weights) -> Weights:
            in_place = {version} if self._in_place else set[str]()
            clean = {version} if self._flushed else set[str]()
            return replace(
                _newest(now, version),
                version=version,
                checkpoint_version=version if checkpoint else now.checkpoint_version,
                inconsistent=None,
                in_place_versions=now.in_place_versions | in_place,
                clean_versions=now.clean_versions | clean,
            )

        self._state._change(change)
        self.version = version

    def abort(self) -> None:
        """The servers hold what they held when the update began."""
        self._state.mark_inconsistent(self._reason_before)
        self._state.release_requests()

    def mark_inconsistent(self, reason: str) -> None:
        """The servers may hold a mix of old and new weights: refuse to generate."""
        self._state.mark_inconsistent(reason)
        self._state.release_requests()

    def aborts_requests(self) -> None:
        """In-flight requests are about to be aborted: they go on, or are sent again."""
        self._state.aborts_requests()

    def holds_requests(self) -> None:
        """No request may be sent until they are released, or the update has ended."""
        self._state.hold_requests()

    def releases_requests(self) -> None:
        """Requests may be sent again."""
        self._state.release_requests()

    def keeps_requests(self) -> None:
        """In-flight requests continue with the new weights on a stale KV cache."""
        self._in_place = True

    def flushed(self) -> None:
        """The KV cache of the old weights is gone."""
        self._flushed = True
