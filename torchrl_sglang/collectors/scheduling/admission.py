"""Rules for when a group starts and which groups make up a batch. Pure.

A token's staleness is the number of weight updates between the version that generated
it and the version that is trained on it. Two rules bound it by ``max_staleness``:

- :func:`free_groups`: a group starts only if it can be consumed in time. AReaL's
  rule, ``(k + version + 1) * B - (accepted + running)``, counted from the beginning of
  the current version, so that it also holds for a trainer that skipped or repeated an
  update.
- :func:`choose_groups`: a batch takes complete groups in their order, except where a
  later batch could not consume an older group in time.

With a trainer that consumes ``groups_per_update`` groups between two updates, no group
ever becomes stale, and none is overtaken by :attr:`Limits.capacity` others. For a
trainer that does not update, :func:`must_wait` bounds that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of how far collection runs ahead of training."""

    max_staleness: int
    """Most weight updates between generating a token and training on it."""
    groups_per_update: int
    """Groups that the trainer consumes between two weight updates."""

    @property
    def capacity(self) -> int:
        """Most groups that are running, complete or consumed in a version."""
        return (self.max_staleness + 1) * self.groups_per_update


def free_groups(
    limits: Limits, *, consumed: int, running: int, ready: int, wanted: int = 0
) -> int:
    """Returns how many groups may start now.

    Args:
        limits: bounds of the collection.
        consumed: groups consumed since the current version began.
        running: groups that have started and are not complete.
        ready: complete groups that are not consumed.
        wanted: groups that a waiting consumer asks for; they may start in any case.

    Examples:
        >>> limits = Limits(max_staleness=1, groups_per_update=8)
        >>> free_groups(limits, consumed=0, running=6, ready=4)
        6
        >>> free_groups(limits, consumed=16, running=0, ready=0, wanted=8)
        8
    """
    ahead = running + ready
    return max(limits.capacity - consumed - ahead, wanted - ahead, 0)


def must_wait(
    limits: Limits, *, consumed: int, size: int, started: Iterable[int]
) -> bool:
    """Returns whether a batch has to wait for groups that are running.

    A group is overtaken by at most :attr:`Limits.capacity` others, which a slow one
    reaches only if the trainer takes more than ``groups_per_update`` groups between two
    updates.

    Args:
        limits: bounds of the collection.
        consumed: groups consumed so far.
        size: groups of the batch.
        started: for each running group, how many were consumed when its prompt was
            first started.

    Examples:
        >>> limits = Limits(max_staleness=1, groups_per_update=2)
        >>> must_wait(limits, consumed=2, size=2, started=[0, 1])
        False
        >>> must_wait(limits, consumed=4, size=2, started=[0, 1])
        True
    """
    return any(consumed + size - start > limits.capacity for start in started)


def may_take_in_order(
    ready: Sequence[int], unfinished: Iterable[int], size: int
) -> bool:
    """Returns whether the first complete groups do not depend on timing.

    They are, once no group before the last of them can still be complete.

    Args:
        ready: positions of the prompts of complete groups, in ascending order.
        unfinished: positions of those that run or start again.
        size: groups of the batch.

    Examples:
        >>> may_take_in_order([0, 2, 3], [4], 2)
        True
        >>> may_take_in_order([0, 2, 3], [1], 2)
        False
    """
    if len(ready) < size:
        return False
    return not size or all(position > ready[size - 1] for position in unfinished)


def choose_groups(
    limits: Limits,
    *,
    version: int,
    consumed: int,
    ready: Sequence[int],
    running: Sequence[int],
    size: int,
) -> list[int] | None:
    """Returns the positions of the complete groups that make up a batch.

    Args:
        limits: bounds of the collection.
        version: of the trainer's weights.
        consumed: groups consumed since that version began.
        ready: oldest version of each complete group, in the order to take them in.
        running: oldest version of each group that is not complete.
        size: groups of the batch.

    Returns:
        Positions in ``ready``, in that order; ``None`` if the batch has to wait for
        groups that are running.

    Examples:
        >>> limits = Limits(max_staleness=1, groups_per_update=2)
        >>> choose_groups(
        ...     limits, version=5, consumed=0, ready=[5, 5, 4], running=[], size=2
        ... )
        [0, 2]
        >>> choose_groups(
        ...     limits, version=5, consumed=0, ready=[5, 5], running=[4], size=2
        ... ) is None
        True
    """
    if len(ready) < size:
        return None
    chosen: set[int] = set()
    # Places in later batches of the current version.
    later = max(limits.groups_per_update - consumed - size, 0)
    for ahead in range(limits.max_staleness + 1):
        # Groups that must be consumed before the version grows by more than `ahead`.
        horizon = version + ahead - limits.max_staleness
        due_places = [place for place, oldest in enumerate(ready) if oldest <= horizon]
        # Groups that are stale already are not waited for.
        late = version - limits.max_staleness
        coming = sum(late <= oldest <= horizon for oldest in running)
        places = later + ahead * limits.groups_per_update
        needed = min(len(due_places) + coming - places, size)
        if needed > len(due_places):
            return None
        missing = needed - len(chosen.intersection(due_places))
        other_places = [place for place in due_places if place not in chosen]
        chosen.update(other_places[: max(missing, 0)])
    other_places = [place for place in range(len(ready)) if place not in chosen]
    return sorted([*chosen, *other_places[: size - len(chosen)]])
