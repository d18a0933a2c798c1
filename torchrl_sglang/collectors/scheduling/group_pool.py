"""The groups of a collection: which run, which are complete, which were consumed.

Every decision about them is made here, without threads and without I/O.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from torchrl_sglang.collectors.scheduling.admission import (
    Limits,
    choose_groups,
    free_groups,
    may_take_in_order,
    must_wait,
)
from torchrl_sglang.collectors.scheduling.pace import Pace
from torchrl_sglang.collectors.scheduling.prompt_order import PromptOrder

OnStale: TypeAlias = Literal["drop", "retry", "mask"]
"""Treatment of a group with tokens older than ``max_staleness`` updates."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGroup(Generic[T]):
    """A complete group."""

    position: int
    """Position of its prompt."""
    content: T
    """Conversations of the group."""
    oldest: int
    """Policy version of its oldest token."""
    version: int
    """Policy version at that time."""


class GroupPool(Generic[T]):
    """Tracks the groups of a collection and applies the rules of :mod:`.admission`.

    ``total`` is the number of groups to consume; -1 for no end. With ``in_order``
    batches have the first groups in the order of prompts, whichever are complete first.
    If the pool is ``buffered``, groups that are taken go to a replay buffer, where they
    count as ahead of training until an update; otherwise the trainer has them.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        on_stale: OnStale = "drop",
        total: int = -1,
        on_close: Callable[[int], None] | None = None,
        pace: Pace | None = None,
        in_order: bool = False,
        on_stale_group: Callable[[int], None] | None = None,
    ) -> None:
        self.limits = limits
        self._on_stale_group = on_stale_group
        self.in_order = in_order
        self.pace = pace or Pace(limits)
        self.version = 0
        self.order = PromptOrder(on_close)
        self.consumed = 0
        self.stale = 0
        self.buffered = False
        self.exhausted = False
        self._on_stale = on_stale
        self.total = total
        self._running: dict[int, int] = {}
        # Groups consumed when a prompt that is not done was first started.
        self._first_started: dict[int, int] = {}
        self._ready: list[ReadyGroup[T]] = []
        self._consumed_in_version = 0

    @property
    def running(self) -> int:
        """Number of groups that have started and are not complete."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Number of complete groups."""
        return len(self._ready)

    @property
    def _outstanding(self) -> int:
        return self.running + self.ready + self.order.waiting

    @property
    def left(self) -> int | None:
        """Groups until the end; ``None`` without an end."""
        return None if self.total < 0 else max(self.total - self.consumed, 0)

    @property
    def ended(self) -> bool:
        """Whether no group will come any more."""
        if self.left == 0:
            return True
        return self.exhausted and not self._outstanding

    def free(self, wanted: int = 0) -> int:
        """Returns how many groups may start now."""
        free = free_groups(
            self.limits,
            consumed=self._consumed_in_version,
            running=self.running,
            ready=self.ready,
            wanted=wanted,
        )
        if self.exhausted:
            free = min(free, self.order.waiting)
        if self.left is not None:
            free = min(free, self.left - self.running - self.ready)
        return max(free, 0)

    def due(self, wanted: int = 0) -> tuple[int, float]:
        """Returns how many of the free groups start now, and seconds until more may."""
        ahead, free = self.ready, self.free(wanted)
        if self.buffered:
            # Of those in the buffer, the trainer has what it trains on now.
            ahead += max(self._consumed_in_version - self.limits.groups_per_update, 0)
        return self.pace.limit(free, ahead, demanded=not self.buffered)

    def start(self) -> int:
        """Starts a group and returns the position of its prompt."""
        position = self.order.take()
        self.pace.start(position)
        self._running[position] = self.version
        self._first_started.setdefault(position, self.consumed)
        return position

    def complete(self, position: int, content: T, *, oldest: int) -> None:
        """Takes a complete group; it may be too old already."""
        del self._running[position]
        self.pace.end(position, complete=True)
        group = ReadyGroup(
            position=position,
            content=content,
            oldest=oldest,
            version=self.version,
        )
        insort(self._ready, group, key=lambda each: each.position)
        self._drop_stale()

    def give_up(self, position: int, *, retry: bool) -> None:
        """Ends a running group without a result; ``retry``: its prompt starts again."""
        del self._running[position]
        self.pace.end(position, complete=False)
        if retry:
            self.order.put_back(position)
        else:
            self.close([position])

    def end_of_prompts(self, position: int) -> None:
        """There is no prompt at this position, nor behind it."""
        self.give_up(position, retry=False)
        self.order.end(position)
        self.exhausted = True

    def take(self, size: int) -> list[ReadyGroup[T]] | None:
        """Returns the groups of a batch, in the order of prompts.

        ``None`` if the batch has to wait. At the end it may be smaller. Their prompts
        are not done before :meth:`close`.
        """
        size = size if self.left is None else min(size, self.left)
        if self.exhausted:
            size = min(size, self._outstanding)
        if must_wait(
            self.limits,
            consumed=self.consumed,
            size=size,
            started=self._awaited(),
        ):
            return None
        if self.in_order and not may_take_in_order(
            [group.position for group in self._ready],
            (*self._running, *self.order.to_repeat),
            size,
        ):
            return None
        places = choose_groups(
            self.limits,
            version=self.version,
            consumed=self._consumed_in_version,
            ready=[group.oldest for group in self._ready],
            running=list(self._running.values()),
            size=size,
        )
        if not places:
            return None
        chosen = [self._ready[place] for place in places]
        positions = {group.position for group in chosen}
        self._ready = [
            group for group in self._ready if group.position not in positions
        ]
        self.consumed += len(positions)
        self._consumed_in_version += len(positions)
        if self.buffered:
            self._serve_buffer()
        return chosen

    def close(self, positions: Iterable[int]) -> None:
        """Ends prompts: they are done."""
        for position in positions:
            del self._first_started[position]
            self.order.close(position)

    def set_version(self, version: int) -> None:
        """Begins a new policy version; groups that are too old then are dropped."""
        self.version = version
        held = self._consumed_in_version - self.limits.groups_per_update
        self._consumed_in_version = max(held, 0) if self.buffered else 0
        if self.buffered:
            self.pace.ask(self.limits.groups_per_update)
            self._serve_buffer()
        self._drop_stale()

    def _serve_buffer(self) -> None:
        """Counts the trainer as served, if the buffer has its next groups."""
        if self._consumed_in_version >= self.limits.groups_per_update:
            self.pace.get()

    @property
    def _bound(self) -> int:
        """Oldest version that is not stale."""
        return self.version - self.limits.max_staleness

    def _awaited(self) -> list[int]:
        """Returns when running groups first started that are worth waiting for."""
        return [
            self._first_started[position]
            for position, oldest in self._running.items()
            if oldest >= self._bound or self._on_stale == "mask"
        ]

    def _drop_stale(self) -> None:
        """Drops groups as soon as they are too old: others can start instead."""
        if self._on_stale == "mask":
            return
        fresh = []
        for group in self._ready:
            if group.oldest >= self._bound:
                fresh.append(group)
                continue
            self.stale += 1
            if self._on_stale_group is not None:
                self._on_stale_group(group.position)
            if self._on_stale == "retry":
                self.order.put_back(group.position)
            else:
                self.close([group.position])
        self._ready = fresh

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a later run goes on."""
        return {
            "prompts": self.order.state_dict(),
            "consumed": self.consumed,
            # The trainer of a buffer goes on with what is in it.
            "consumed_in_version": self._consumed_in_version if self.buffered else 0,
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was saved; nothing may be running."""
        self.order.load_state_dict(state["prompts"])
        self.consumed = int(state["consumed"])
        self._consumed_in_version = int(state["consumed_in_version"])
        self.version = int(state["version"])
