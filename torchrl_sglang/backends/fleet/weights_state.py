"""Version and consistency of the servers' weights.

An update begins, and then ends in one of three ways::

    begin ─┬─> commit(version)            every server holds this version
           ├─> abort()                    servers hold what they held before
           └─> mark_inconsistent(reason)  servers may hold a mix of versions

While the weights are inconsistent, the engine refuses to generate, until the next
commit. Every change replaces the frozen :class:`ServedWeights` in the fleet's state.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWeights:
    """The state of the weights at a moment."""

    version: str
    newest: str
    """Newest version of weights or an adapter so far; no later version reuses it."""
    checkpoint_version: str | None
    """Version of the servers' first checkpoint; ``None``: unknown."""
    inconsistent: str | None = None
    """Reason why the servers may hold a mix of weights; ``None``: consistent."""
    base_intact: bool = False
    """Only an adapter is inconsistent; the next adapter replaces it."""
    second_hand: bool = False
    """Another engine object caused the inconsistency, and will end it."""
    abort_epoch: int = 0
    """Number of aborts of in-flight requests, to be sent again."""
    membership_epoch: int = 0
    """Grows when a server joins or leaves; a process group is valid for an epoch."""
    in_place_versions: frozenset[str] = frozenset()
    """Versions of in-flight requests continued on a stale KV cache."""
    clean_versions: frozenset[str] = frozenset()
    """Versions before which the KV cache was flushed."""

    @classmethod
    def reported(cls, version: str) -> ServedWeights:
        """Returns the state of weights with the servers' reported version."""
        # A number is from a trainer's earlier weights.
        checkpoint = None if version.isdigit() else version
        return cls(version=version, newest=version, checkpoint_version=checkpoint)

    def reserve(self, version: str) -> ServedWeights:
        """Keeps later updates from reusing the version of weights or an adapter."""
        newest = max(self.newest, version, key=version_order)
        return replace(self, newest=newest)

    def observe(self, version: str) -> ServedWeights:
        """Adopts a server's reported version, if it is newer."""
        if version_order(version) <= version_order(self.version):
            return self
        now = replace(self.reserve(version), version=version)
        mended = version_order(version) > version_order(self.newest)
        return now.mark_inconsistent(None) if self.second_hand and mended else now

    def mark_inconsistent(
        self, reason: str | None, *, base_intact: bool = False
    ) -> ServedWeights:
        """Sets why the servers may hold a mix of weights, or ``None``."""
        return replace(
            self, inconsistent=reason, base_intact=base_intact, second_hand=False
        )

    def for_copy(self) -> ServedWeights:
        """Returns the state for a copy in another process, without its requests."""
        return replace(self, abort_epoch=0, second_hand=self.inconsistent is not None)

    def abort_requests(self) -> ServedWeights:
        """Begins an abort epoch: in-flight requests continue, or are sent again."""
        return replace(self, abort_epoch=self.abort_epoch + 1)

    def begin_membership_epoch(self) -> ServedWeights:
        """Invalidates process groups: a server has joined or left."""
        return replace(self, membership_epoch=self.membership_epoch + 1)

    def commit(
        self, version: str, *, checkpoint: bool, in_place: bool, flushed: bool
    ) -> ServedWeights:
        """Every server holds this version."""
        return replace(
            self.reserve(version).mark_inconsistent(None),
            version=version,
            checkpoint_version=version if checkpoint else self.checkpoint_version,
            in_place_versions=self.in_place_versions.union([version] * in_place),
            clean_versions=self.clean_versions.union([version] * flushed),
        )


def version_order(version: str) -> int:
    """Returns a weight version as a number; a name, such as ``default``, is oldest."""
    return int(version) if version.isdigit() else -1


def next_version(versions: Iterable[str]) -> str:
    """Returns the version after the newest of these."""
    return str(1 + max(0, *map(version_order, versions)))


class RequestGate:
    """Lets requests be sent, or holds them back during a weight update."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Future[None] | None = None

    def close(self) -> None:
        """Holds requests back from now on."""
        with self._lock:
            self._held = self._held or Future()

    def open(self) -> None:
        """Releases held requests."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held.set_result(None)

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self._held is None

    async def passed(self) -> None:
        """Waits until requests may be sent."""
        while (held := self._held) is not None:
            # Shielded: several requests wait for it, and a cancelled request must not
            # end it.
            await asyncio.shield(asyncio.wrap_future(held))


class WeightUpdate:
    """Reports the steps and the outcome of a weight update to the engine."""

    def __init__(
        self,
        change: Callable[[Callable[[ServedWeights], ServedWeights]], object],
        before: ServedWeights,
        gate: RequestGate,
    ) -> None:
        self._change = change
        self._before = before
        self._gate = gate
        self._in_place = self._flushed = False
        self.version: str | None = None
        """Committed version; ``None`` before."""

    @property
    def was_inconsistent(self) -> bool:
        """Whether an earlier update left a mix of old and new weights."""
        return self._before.inconsistent is not None and not self._before.base_intact

    def commit(self, version: str, *, checkpoint: bool = False) -> None:
        """Commits the version of every server, before generation resumes."""
        options = {"in_place": self._in_place, "flushed": self._flushed}
        self._change(lambda now: now.commit(version, checkpoint=checkpoint, **options))
        self.version = version

    def abort(self) -> None:
        """Ends an update without a change on the servers."""
        initial = self._before
        self._end(initial.inconsistent, base_intact=initial.base_intact)

    def reserve(self, version: str) -> None:
        """Keeps later updates from reusing a version possibly on a server."""
        self._change(lambda now: now.reserve(version))

    def mark_inconsistent(self, reason: str, *, base_intact: bool = False) -> None:
        """Refuses generation: the servers may hold a mix of old and new weights.

        ``base_intact``: only an adapter is inconsistent, until the next adapter.
        """
        self._end(reason, base_intact=base_intact)

    def replaced_adapter(self) -> None:
        """Ends an adapter's inconsistency: requests carry a new adapter."""
        if self._before.base_intact:
            self._end(None)

    def _end(self, reason: str | None, *, base_intact: bool = False) -> None:
        # Requests stay held until the servers are paused, or generate.
        mark = ServedWeights.mark_inconsistent
        self._change(partial(mark, reason=reason, base_intact=base_intact))

    def aborts_requests(self) -> None:
        """Begins an abort epoch: in-flight requests continue, or are sent again."""
        self._change(ServedWeights.abort_requests)

    def holds_requests(self) -> None:
        """Holds requests back until their release, or the end of the update."""
        self._gate.close()

    def releases_requests(self) -> None:
        """Releases held requests."""
        self._gate.open()

    def keeps_requests(self) -> None:
        """Records a continuation of in-flight requests on a stale KV cache."""
        self._in_place = True

    def flushed(self) -> None:
        """Records the flush of the old weights' KV cache."""
        self._flushed = True
