"""The rules of staleness, against a simulated trainer and against brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from torchrl_sglang.collectors.scheduling.admission import (
    Limits,
    choose_groups,
    free_groups,
    must_wait,
)
from torchrl_sglang.collectors.scheduling.group_pool import GroupPool


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [1, 3])
def test_areals_rule(max_staleness, size):
    """Counted from the version's start it is the same for a trainer in step."""
    limits = Limits(max_staleness=max_staleness, groups_per_update=size)
    for version, consumed, running, ready in itertools.product(range(4), repeat=4):
        accepted = version * size + consumed + ready
        areal = (max_staleness + version + 1) * size - (accepted + running)
        free = free_groups(limits, consumed=consumed, running=running, ready=ready)
        assert free == max(areal, 0)


@pytest.mark.parametrize("wanted", range(4))
def test_a_waiting_consumer_gets_its_groups(wanted):
    """Also when it takes more batches than was said, so it does not wait for ever."""
    limits = Limits(max_staleness=0, groups_per_update=1)
    for consumed, running, ready in itertools.product(range(4), repeat=3):
        free = free_groups(
            limits, consumed=consumed, running=running, ready=ready, wanted=wanted
        )
        assert free + running + ready >= wanted


def can_be_consumed(limits, version, places, oldest):
    """Brute force: whether groups can all be taken before they are stale."""
    ordered = sorted(oldest)
    for start in ordered:
        due = start + limits.max_staleness
        room = places + max(due - version, 0) * limits.groups_per_update
        if sum(each <= start for each in ordered) > room:
            return False
    return True


def test_a_batch_leaves_what_later_batches_can_take():
    """If a state can be consumed in time, the state after a batch can, too."""
    checked = 0
    for max_staleness, per_update in itertools.product((0, 1, 2), (2, 4)):
        limits = Limits(max_staleness=max_staleness, groups_per_update=per_update)
        version, size = max_staleness, 2
        for consumed in range(0, per_update, size):
            places = per_update - consumed
            for ready in itertools.product(range(version + 1), repeat=3):
                for running in itertools.combinations_with_replacement(
                    range(version + 1), 2
                ):
                    everything = [*ready, *running]
                    if not can_be_consumed(limits, version, places, everything):
                        continue
                    chosen = choose_groups(
                        limits,
                        version=version,
                        consumed=consumed,
                        ready=ready,
                        running=running,
                        size=size,
                    )
                    options = [
                        picks
                        for picks in itertools.combinations(range(len(ready)), size)
                        if can_be_consumed(
                            limits,
                            version,
                            places - size,
                            [
                                *(o for i, o in enumerate(ready) if i not in picks),
                                *running,
                            ],
                        )
                    ]
                    if chosen is None:
                        assert not options
                    else:
                        assert tuple(chosen) in options
                        # Of all that are possible, the earliest to complete.
                        assert tuple(chosen) == options[0]
                    checked += 1
    assert checked > 300


def test_stale_groups_are_not_waited_for():
    limits = Limits(max_staleness=1, groups_per_update=1)
    assert choose_groups(
        limits, version=9, consumed=0, ready=[9], running=[3], size=1
    ) == [0]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("max_staleness", "batches_per_update"), [(0, 1), (1, 1), (2, 1), (3, 2)]
)
def test_a_trainer_in_step_gets_nothing_stale(seed, max_staleness, batches_per_update):
    """Whatever the order in which groups are completed, and none is ever dropped."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 5])
    limits = Limits(
        max_staleness=max_staleness, groups_per_update=size * batches_per_update
    )
    pool: GroupPool[int] = GroupPool(limits)
    running: list[tuple[int, int]] = []
    complete: list[int] = []
    taken: list[int] = []
    for version in range(1, 30):
        for _ in range(batches_per_update):
            while True:
                free = pool.free(wanted=size)
                running += [(pool.start(), pool.version) for _ in range(free)]
                assert pool.running + pool.ready <= limits.capacity
                assert not must_wait(
                    limits, consumed=pool.consumed, size=size, started=pool._awaited()
                )
                batch = pool.take(size)
                if batch is not None:
                    break
                # The newest are completed first more often than not.
                place = max(rng.randrange(len(running)) for _ in range(2))
                position, oldest = running.pop(place)
                pool.complete(position, position, oldest=oldest)
                complete.append(position)
            assert all(pool.version - group.oldest <= max_staleness for group in batch)
            taken += [group.position for group in batch]
        if max_staleness == 0:
            assert pool.running == pool.ready == 0
        pool.set_version(version)
    assert pool.stale == 0
    assert len(set(taken)) == len(taken)
    assert {*taken} <= {*complete}
    assert len(complete) == len(taken) + pool.ready
    begun = [*complete, *(position for position, _ in running)]
    assert sorted(begun) == list(range(len(begun)))
