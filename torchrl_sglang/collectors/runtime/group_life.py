"""Tells a recorder what becomes of the groups of a collection."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.recording.records import GroupRecord, ResponseRecord


class _Begun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that runs, or waits to be taken."""

    id: int
    time: float
    version: int


class _EndedGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Makes the record of a group, in the recorder's thread."""

    begun: _Begun
    position: int
    ended: float
    version: int
    kept: bool
    responses: Callable[[], Sequence[ResponseRecord]]

    def __call__(self) -> GroupRecord:
        return GroupRecord(
            id=self.begun.id,
            position=self.position,
            began=self.begun.time,
            ended=self.ended,
            status="complete" if self.kept else "filtered",
            versions=(self.begun.version, self.version),
            responses=self.responses(),
        )


class GroupLife:
    """Tells a recorder of groups by the positions of their prompts.

    Args:
        recorder: ``None``: nothing is recorded.
        tokenizer: of the policy.
    """

    def __init__(self, recorder: RunRecorder | None, tokenizer: Any) -> None:
        self._recorder = recorder
        self._tokenizer = tokenizer
        self._begun: dict[int, _Begun] = {}
        self._batches = 0

    def started(self, positions: Iterable[int], version: int) -> None:
        """Groups have started."""
        if self._recorder is None:
            return
        now = time.time()
        for position in positions:
            begun = _Begun(id=self._recorder.next_id(), time=now, version=version)
            self._begun[position] = begun
            self._recorder.event("began", id=begun.id, position=position)

    def ended(
        self,
        position: int,
        responses: Callable[[], Sequence[ResponseRecord]],
        *,
        version: int,
        kept: bool,
        tokens: int,
    ) -> None:
        """The conversations of a group are complete.

        Args:
            position: of its prompt.
            responses: returns them, in the recorder's thread.
            version: policy version now.
            kept: whether the group may be trained on.
            tokens: of all responses.
        """
        begun = self._begun.get(position)
        if self._recorder is None or begun is None:
            return
        ended = time.time()
        make = _EndedGroup(
            begun=begun,
            position=position,
            ended=ended,
            version=version,
            kept=kept,
            responses=responses,
        )
        self._recorder.group(make, self._tokenizer, 1 + tokens)
        if not kept:
            self._forget(position)

    def failed(self, position: int, error: str, *, retried: bool) -> None:
        """A group has failed; its prompt may start again."""
        self._end_with("failed", position, error=error[:500], retried=retried)

    def stale(self, position: int) -> None:
        """A complete group was too old before a batch took it."""
        self._end_with("stale", position)

    def taken(self, positions: Sequence[int], version: int) -> None:
        """Groups were taken for a batch, or by a replay buffer."""
        if self._recorder is None:
            return
        begun = [self._begun.pop(each, None) for each in positions]
        ids = [each.id for each in begun if each is not None]
        self._batches += 1
        self._recorder.event("batch", number=self._batches, version=version, ids=ids)

    def waited(self, began: float) -> None:
        """A consumer has waited for a batch since a time."""
        if self._recorder is not None:
            self._recorder.add_phase("wait", began, time.time())

    def _end_with(self, kind: str, position: int, **values: Any) -> None:
        begun = self._forget(position)
        if self._recorder is not None and begun is not None:
            self._recorder.event(kind, id=begun.id, **values)

    def _forget(self, position: int) -> _Begun | None:
        return self._begun.pop(position, None)


def collector_figures(collection: Any) -> Callable[[], Mapping[str, Any] | None]:
    """Returns a function that tells how a collection fares; it is not kept alive."""
    own = weakref.ref(collection)

    def read() -> Mapping[str, Any] | None:
        found = own()
        if found is None or not (found.alive or found.tokens == 0):
            return None
        stats = found.stats()
        names = ("groups_running", "groups_ready", "groups_stale", "groups_failed")
        return {
            **{name: stats[name] for name in names},
            "conversations_in_flight": stats["conversations_in_flight"],
            "max_staleness": found.pool.limits.max_staleness,
            "tokens": stats["tokens"],
            "lately": stats["lately"],
            "bottleneck": stats["bottleneck"],
        }

    return read
