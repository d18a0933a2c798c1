"""Groups start just in time: simulated trainers and engines, with a clock of theirs."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from torchrl_sglang.collectors.scheduling.admission import Limits
from torchrl_sglang.collectors.scheduling.group_pool import GroupPool
from torchrl_sglang.collectors.scheduling.pace import Pace

GROUPS = 8


class Early(Pace):
    """Starts groups as early as they may."""

    def limit(self, free: int, ahead: int, *, demanded: bool) -> tuple[int, float]:
        return free, math.inf


@dataclass
class Run:
    """A trainer and an engine that shares its speed among more groups than ``room``."""

    group: Callable[[random.Random], float]
    step: Callable[[random.Random], float]
    max_staleness: int = 2
    room: int = 16
    batches_per_update: int = 1
    buffered: bool = False
    kind: type[Pace] = Pace
    now: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    left: dict[int, float] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng, self.steps = random.Random(0), random.Random(1)
        limits = Limits(
            max_staleness=self.max_staleness,
            groups_per_update=GROUPS * self.batches_per_update,
        )
        measured = self.kind(limits, clock=lambda: self.now)
        self.pool: GroupPool[None] = GroupPool(limits, pace=measured)
        self.pool.buffered = self.buffered

    def advance(self, until: float, wanted: int = 0) -> None:
        """Generates until a time, or until the next group is complete."""
        pool = self.pool
        free, more = pool.due(wanted)
        for _ in range(free):
            position = pool.start()
            self.left[position] = self.group(self.rng)
            self.oldest[position] = pool.version
        speed = min(1.0, self.room / max(len(self.left), 1))
        first = min(self.left.values(), default=math.inf) / speed
        seconds = max(min(until - self.now, more, first), 1e-6)
        assert seconds < math.inf, "Nothing will ever happen."
        self.now += seconds
        for position in list(self.left):
            self.left[position] -= seconds * speed
            if self.left[position] <= 1e-9:
                del self.left[position]
                oldest = self.oldest[position]
                pool.complete(position, None, oldest=oldest)

    def take(self, size: int, *, demand: bool) -> None:
        pool = self.pool
        if demand:
            pool.pace.ask(size)
        while (batch := pool.take(size)) is None:
            if not demand:
                return
            self.advance(math.inf, wanted=size)
        if demand:
            pool.pace.get()
        pool.close(group.position for group in batch)
        self.buffer += [group.oldest for group in batch]

    def run(self, updates: int) -> float:
        """Returns updates per second, after the first ones."""
        self.buffer: list[int] = []
        for number in range(updates):
            if number == 20:
                began = self.now
                self.ages.clear()
            for _ in range(self.batches_per_update):
                if not self.buffered:
                    self.take(GROUPS, demand=True)
                while len(self.buffer) < GROUPS:
                    self.take(1, demand=False)
                    if len(self.buffer) < GROUPS:
                        self.advance(math.inf)
                for oldest in self.buffer[:GROUPS]:
                    self.ages[self.pool.version - oldest] += 1
                del self.buffer[:GROUPS]
                until = self.now + self.step(self.steps)
                while self.now < until:
                    if self.buffered:
                        self.take(1, demand=False)
                    self.advance(until)
            self.pool.set_version(self.pool.version + 1)
        return (updates - 20) / (self.now - began)

    @property
    def age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / self.ages.total()


def near(mean: float) -> Callable[[random.Random], float]:
    return lambda rng: mean * rng.uniform(0.8, 1.2)


def heavy(mean: float) -> Callable[[random.Random], float]:
    """One in ten takes several times as long."""
    return lambda rng: mean * min(0.4 * rng.paretovariate(1.6), 8.0)


# group, step: seconds. The engine has room for 16 groups, and a batch has 8.
LOADS = {
    "trainer-bound": (near(1.0), near(3.0), 0.7),
    "uneven steps": (near(1.0), lambda rng: rng.choice([2.0, 3.0, 6.0]), 0.8),
    "long groups": (near(4.0), near(3.0), 1.01),
    "heavy tail": (heavy(1.0), near(3.0), 1.01),
    "balanced": (near(2.0), near(1.0), 1.01),
    "generation-bound": (near(6.0), near(1.0), 1.01),
}


@pytest.mark.parametrize("buffered", [False, True], ids=["batches", "buffer"])
@pytest.mark.parametrize("load", LOADS)
def test_younger_and_not_slower(load, buffered):
    group, step, most = LOADS[load]
    options = {"group": group, "step": step, "buffered": buffered}
    before, after = Run(kind=Early, **options), Run(**options)
    speeds = before.run(200), after.run(200)
    assert after.age <= most * before.age
    assert speeds[1] > 0.98 * speeds[0]
    assert max(after.ages) <= max(before.ages)
