"""Publishes the life of each group of a collection."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchrl_sglang.observer import (
    GroupEnded,
    GroupFailed,
    GroupsTaken,
    GroupStale,
    GroupStarted,
    Publisher,
    ResponseRecord,
)


class GroupEvents:
    """Publishes events of groups, which the pool knows by the positions of prompts."""

    def __init__(self, publish: Publisher, tokenizer: Any) -> None:
        self.publish = publish
        self._tokenizer = tokenizer
        self._groups: dict[int, GroupStarted] = {}
        self._batches = 0

    def started(self, positions: Iterable[int], version: int) -> None:
        """Groups have started."""
        for position in positions:
            group = GroupStarted(position=position, version=version)
            self._groups[position] = group
            self.publish(group)

    def ended(
        self,
        position: int,
        responses: Callable[[], Sequence[ResponseRecord]],
        *,
        version: int,
        kept: bool,
        tokens: int,
    ) -> None:
        """The conversations of a group are complete; see :class:`.GroupEnded`."""
        group = self._groups[position] if kept else self._groups.pop(position)
        self.publish(
            GroupEnded(
                group=group,
                responses=responses,
                tokens=tokens,
                tokenizer=self._tokenizer,
                versions=(group.version, version),
                status="complete" if kept else "filtered",
            )
        )

    def failed(self, position: int, error: str, *, retried: bool) -> None:
        """A group has failed; its prompt may start again."""
        group = self._groups.pop(position)
        self.publish(GroupFailed(group=group, error=error, retried=retried))

    def stale(self, position: int) -> None:
        """A complete group became too old before a batch took it."""
        self.publish(GroupStale(group=self._groups.pop(position)))

    def taken(self, positions: Iterable[int], version: int) -> None:
        """A batch, or a replay buffer, took groups."""
        self._batches += 1
        groups = [self._groups.pop(position) for position in positions]
        self.publish(GroupsTaken(number=self._batches, version=version, groups=groups))


def figures_of(collection: Any) -> Callable[[], Mapping[str, Any] | None]:
    """Returns a function that reads the figures of a collection, kept alive elsewhere.

    Before the first group and while groups are made, it returns statistics; afterwards,
    ``None``.
    """
    find = weakref.ref(collection)

    def read() -> Mapping[str, Any] | None:
        alive = find()
        if alive is None or not (alive.alive or alive.tokens == 0):
            return None
        stats = alive.stats()
        names = (
            *("groups_running", "groups_ready", "groups_stale", "groups_failed"),
            *("conversations_in_flight", "tokens", "lately", "bottleneck"),
        )
        figures = {name: stats[name] for name in names}
        return {**figures, "max_staleness": alive.pool.limits.max_staleness}

    return read
