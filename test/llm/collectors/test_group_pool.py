"""Prompts are neither lost nor done twice, whatever happens to their groups."""

from __future__ import annotations

import json
import random

import pytest

from torchrl_sglang.collectors.scheduling.admission import Limits
from torchrl_sglang.collectors.scheduling.group_pool import GroupPool


def make_pool(on_stale="drop", total=-1, **kwargs) -> GroupPool:
    limits = Limits(max_staleness=1, groups_per_update=3)
    return GroupPool(limits, on_stale=on_stale, total=total, **kwargs)


@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
@pytest.mark.parametrize("seed", range(10))
def test_every_prompt_is_done_once(on_stale, seed):
    """Random starts, results, failures, updates, batches, kills and restarts."""
    rng = random.Random(seed)
    done: list[int] = []
    given_up: list[int] = []
    pool = make_pool(on_stale, on_close=done.append)
    running: list[tuple[int, int]] = []
    taken: list[int] = []
    for _ in range(400):
        action = rng.choice(["start", "start", "complete", "fail", "take", "update"])
        if action == "start":
            running += [(pool.start(), pool.version) for _ in range(pool.free())]
        elif action == "complete" and running:
            position, oldest = running.pop(rng.randrange(len(running)))
            pool.complete(position, None, oldest=oldest)
        elif action == "fail" and running:
            position, _ = running.pop(rng.randrange(len(running)))
            retry = rng.random() < 0.5
            pool.give_up(position, retry=retry)
            given_up += [] if retry else [position]
        elif action == "take":
            batch = pool.take(rng.choice([1, 3])) or []
            positions = [group.position for group in batch]
            assert positions == sorted(positions)
            # They are done when the consumer has them.
            assert not set(positions) & set(done)
            pool.close(positions)
            taken += positions
            if on_stale != "mask":
                assert all(pool.version - group.oldest <= 1 for group in batch)
        elif action == "update":
            pool.set_version(pool.version + 1)
        if rng.random() < 0.02:
            state = json.loads(json.dumps(pool.state_dict()))
            pool = make_pool(on_stale, on_close=done.append)
            pool.load_state_dict(state)
            running = []
        assert len(set(taken)) == len(taken)
        assert len(set(done)) == len(done)
    open_positions = set(pool.state_dict()["prompts"]["open"])
    everything = set(range(pool.state_dict()["prompts"]["next"]))
    assert open_positions | set(done) == everything
    assert not open_positions & set(done)
    if on_stale == "drop":
        assert set(taken) | set(given_up) <= set(done)
    else:
        assert set(taken) | set(given_up) == set(done)


class Sequence:
    """A random sequence of what happens to a pool, whose free places fill at once."""

    def __init__(self, seed: int, on_stale: str, *, buffered: bool) -> None:
        self.rng = rng = random.Random(seed)
        limits = Limits(
            max_staleness=rng.randrange(3), groups_per_update=rng.randrange(1, 5)
        )
        total = rng.choice([-1, 12])
        self.pool: GroupPool[None] = GroupPool(limits, on_stale=on_stale, total=total)
        self.pool.buffered = buffered
        self.prompts = rng.choice([10, 10**6])
        self.size = 1 if buffered else rng.randint(1, limits.groups_per_update)
        self.running: dict[int, int] = {}
        self.wanted = 0

    def complete(self) -> None:
        if self.running:
            position = self.rng.choice(list(self.running))
            # Its tokens may all be newer than its start.
            oldest = self.rng.randint(self.running.pop(position), self.pool.version)
            self.pool.complete(position, None, oldest=oldest)

    def fail(self) -> None:
        if self.running:
            position = self.rng.choice(list(self.running))
            del self.running[position]
            self.pool.give_up(position, retry=self.rng.random() < 0.7)

    def take(self) -> None:
        pool = self.pool
        before = pool.free(), pool.ready, pool.stale
        batch = pool.take(self.size)
        self.wanted = 0 if batch or pool.buffered else self.size
        if batch is None:
            # It frees no place, which nobody would look for.
            assert (pool.free(), pool.ready, pool.stale) == before
        else:
            pool.close(group.position for group in batch)

    def update(self) -> None:
        self.pool.set_version(self.pool.version + 1)

    def fill(self) -> None:
        while self.pool.free(self.wanted):
            position = self.pool.start()
            if position >= self.prompts:
                self.pool.end_of_prompts(position)
            else:
                self.running[position] = self.pool.version

    def check(self) -> None:
        """What a batch needs runs or can start, or the trainer's update is awaited."""
        pool = self.pool
        assert pool.running == len(self.running)
        if not (self.running or pool.ended or pool.take(self.size)):
            full = pool._consumed_in_version >= pool.limits.capacity
            assert full if pool.buffered else pool.free(self.size)


@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
@pytest.mark.parametrize("buffered", [False, True])
def test_if_there_is_room_and_a_prompt_something_runs(on_stale, buffered):
    for seed in range(600):
        case = Sequence(seed, on_stale, buffered=buffered)
        actions = [case.complete, case.complete, case.fail, case.take, case.update]
        for _ in range(60):
            case.rng.choice(actions)()
            case.fill()
            case.check()


def test_a_total_and_a_smaller_last_batch():
    pool = make_pool(total=4)
    positions = [pool.start() for _ in range(pool.free())]
    assert positions == [0, 1, 2, 3]
    for position in positions:
        pool.complete(position, None, oldest=0)
    assert [group.position for group in pool.take(3)] == [0, 1, 2]
    assert not pool.ended
    assert [group.position for group in pool.take(3)] == [3]
    assert pool.ended
    assert pool.free(wanted=3) == 0


def test_the_end_of_prompts():
    pool = make_pool()
    positions = [pool.start() for _ in range(pool.free())]
    for position in reversed(positions[2:]):
        pool.end_of_prompts(position)
    assert pool.state_dict()["prompts"] == {"next": 2, "open": [0, 1]}
    pool.give_up(0, retry=True)
    pool.complete(1, None, oldest=0)
    assert pool.take(3) is None
    # What failed starts again, and nothing else.
    assert pool.free() == 1
    pool.complete(pool.start(), None, oldest=0)
    assert [group.position for group in pool.take(3)] == [0, 1]
    assert pool.ended


@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_overtaken_for_ever(on_stale, seed):
    """Whatever the speeds, the failures, and how often the trainer updates."""
    rng = random.Random(seed)
    update_share = rng.choice([0.0, 0.05, 0.3])
    pool = make_pool(on_stale)
    left: dict[int, int] = {}
    oldest: dict[int, int] = {}
    started: list[int] = []
    taken: list[int] = []
    waited = 0
    for _ in range(600):
        for _ in range(pool.free(wanted=3)):
            position = pool.start()
            # One in ten is slow, also when it starts again.
            left[position] = rng.choice([40, *range(1, 10)])
            oldest[position] = pool.version
            if position not in started:
                started.append(position)
        for position in list(left):
            left[position] -= 1
            if left[position]:
                continue
            del left[position]
            if rng.random() < 0.1:
                pool.give_up(position, retry=True)
            else:
                pool.complete(position, None, oldest=oldest[position])
        batch = pool.take(3)
        if batch is None:
            waited += 1
            continue
        before = len(taken)
        taken += [group.position for group in batch]
        pool.close(group.position for group in batch)
        for position in taken[before:]:
            overtook = [each for each in taken[:before] if each > position]
            assert len(overtook) <= pool.limits.capacity
        if rng.random() < update_share:
            pool.set_version(pool.version + 1)
    # The order of prompts is that of their first starts, whatever happened.
    assert started == list(range(len(started)))
    assert len(taken) > 50
    assert waited > 0


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
def test_a_trainer_that_does_not_update_waits_for_a_slow_group(on_stale, stale):
    """Not for one that is too old already, unless it is taken all the same."""
    pool = make_pool(on_stale)
    pool.start()
    if stale:
        pool.set_version(2)
    overtook = 0
    for _ in range(4):
        for _ in range(3):
            pool.complete(pool.start(), None, oldest=pool.version)
        overtook += len(pool.take(3) or ())
    waits = not stale or on_stale == "mask"
    assert overtook == (pool.limits.capacity if waits else 12)


def test_a_state_goes_on_within_its_version():
    pool = make_pool()
    pool.buffered = True
    for position in [pool.start() for _ in range(pool.free())]:
        pool.complete(position, None, oldest=0)
        assert pool.take(1) is not None
    assert pool.free() == 0
    again = make_pool()
    again.buffered = True
    again.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    assert again.free() == 0
    again.set_version(1)
    assert again.free() == 3


def test_groups_in_a_buffer_count_until_they_are_trained_on():
    pool = make_pool()
    pool.buffered = True
    for version in range(5):
        started = [pool.start() for _ in range(pool.free())]
        # Two updates' worth ahead at first, and one for each update.
        assert len(started) == (6 if version == 0 else 3)
        for position in started:
            pool.complete(position, None, oldest=version)
            assert pool.take(1) is not None
        assert pool.free() == 0
        pool.set_version(version + 1)
