"""Starts groups just in time, by the recent times of trainer and groups. Pure."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from torchrl_sglang.collectors.scheduling.admission import Limits

LATELY_BATCHES = 8
"""Batches that decisions are made from."""

NOTABLE_WAIT = 0.01
"""Share of the time that a trainer may wait before groups start early again."""

MARGIN = 1.25
"""A group is expected to take this much longer than the slowest one lately."""

LEAST_GROUPS = 32
"""Groups that their longest duration is taken from, at least."""


def batches_in_time(
    steps: Sequence[float], *, lead: float, elapsed: float, shifts: bool = True
) -> tuple[int | None, float]:
    """Returns how many batches must be running or complete now.

    The trainer asks for the n-th batch from now no sooner than after the shortest time
    that n steps in a row took lately.

    Args:
        steps: seconds of the trainer's last steps, each from getting a batch to asking
            for the next one.
        lead: seconds that a batch takes from its start.
        elapsed: seconds since the trainer got its last batch.
        shifts: whether later batches are late, too, if the trainer is.

    Returns:
        Number of batches, or ``None`` if more than there were steps; and the seconds
        until another one must start, infinite if the trainer has to move first.

    Examples:
        >>> batches_in_time([3.0, 4.0, 3.0], lead=1.0, elapsed=0.5)
        (0, 1.5)
        >>> batches_in_time([3.0, 4.0, 3.0], lead=1.0, elapsed=9.0)
        (1, inf)
        >>> batches_in_time([3.0, 4.0, 3.0], lead=50.0, elapsed=0.5)
        (None, inf)
    """
    late = max(elapsed - min(steps, default=0.0), 0.0) if shifts else 0.0
    for count in range(1, len(steps) + 1):
        spans = (
            sum(steps[first : first + count]) for first in range(len(steps) - count + 1)
        )
        seconds_left = min(spans) + late - elapsed - lead
        if seconds_left > 0:
            return count - 1, math.inf if late else seconds_left
    return None, math.inf


class Pace:
    """Measures trainer and groups, and says how many groups may start now.

    If training is slower than generation, a group that starts as early as the bound on
    staleness allows is complete early, and grows old until it is taken. So it starts
    when the trainer will need it, as far as is known; if the trainer waits for more
    than a hundredth of its time, groups start as early as they may.

    Args:
        limits: how far collection may run ahead; without staleness nothing waits here.
        clock: in seconds.

    Attributes:
        batch (int): groups that the trainer takes at a time.
        batches (int): batches that it has had.
    """

    def __init__(
        self, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.batch = limits.groups_per_update
        self.batches = 0
        self._limits = limits
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=LATELY_BATCHES)
        self._waits: deque[float] = deque(maxlen=LATELY_BATCHES)
        groups = max(LEAST_GROUPS, LATELY_BATCHES * limits.groups_per_update)
        self._durations: deque[float] = deque(maxlen=groups)
        self._began: dict[int, float] = {}
        self._asked: float | None = None
        self._got: float | None = None

    def start(self, position: int) -> None:
        """A group starts."""
        self._began[position] = self._clock()

    def end(self, position: int, *, complete: bool) -> None:
        """Ends a group; the durations of complete groups are kept."""
        seconds = self._clock() - self._began.pop(position)
        if complete:
            self._durations.append(seconds)

    def ask(self, groups: int) -> None:
        """The trainer needs a batch, if it does not wait for one already."""
        self.batch = groups
        if self._asked is None:
            self._asked = self._clock()

    def get(self) -> None:
        """The trainer has the batch that it asked for, or its first one."""
        if self._asked is None and self._got is not None:
            return
        now = self._clock()
        if self._asked is not None and self._got is not None:
            self._steps.append(self._asked - self._got)
            self._waits.append(now - self._asked)
        self._got, self._asked = now, None
        self.batches += 1

    @property
    def trainer_waits(self) -> float | None:
        """Share of the time in which the trainer waited lately; ``None`` at first."""
        if self._got is None:
            return None
        waits, steps = sum(self._waits), sum(self._steps)
        if self._asked is None:
            steps += self._clock() - self._got
        else:
            waits += self._clock() - self._asked
            steps += self._asked - self._got
        return waits / (waits + steps) if waits + steps else 0.0

    def limit(self, free: int, ahead: int, *, demanded: bool) -> tuple[int, float]:
        """Returns how many groups start now, and seconds until more may.

        Args:
            free: groups that may start by the bound on staleness.
            ahead: complete groups that the trainer has not had.
            demanded: whether the trainer takes batches, or they go to a buffer, of
                which nobody tells how much the trainer needs.
        """
        waits, steps = sum(self._waits), sum(self._steps)
        if (
            not free
            or not self._limits.max_staleness
            or self._asked is not None
            or self._got is None
            or not self._durations
            or waits > NOTABLE_WAIT * (waits + steps)
        ):
            return free, math.inf
        now, lead = self._clock(), MARGIN * max(self._durations)
        count, seconds = batches_in_time(
            list(self._steps), lead=lead, elapsed=now - self._got, shifts=demanded
        )
        if count is None:
            return free, math.inf
        # One that takes longer than the others is not counted on.
        ahead += sum(now - start <= lead for start in self._began.values())
        return max(min(free, count * self.batch - ahead), 0), seconds
