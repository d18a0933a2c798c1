"""The collection that is written in the background never waits for nobody.

``test_group_pool.py`` has the same invariant for the decisions alone.
"""

from __future__ import annotations

import random
import time

import pytest
from helpers.collecting import tasks
from helpers.waiting import wait_until
from torchrl.data import LazyStackStorage, ReplayBuffer


@pytest.mark.parametrize("on_stale", ["drop", "retry", "mask"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_there_are_always_new_groups(make, update, max_staleness, on_stale):
    """Pauses, updates, failures and slow steps, in any order."""
    chance = random.Random(f"{max_staleness} {on_stale}")

    def step(conversation, task):
        time.sleep(chance.choice([0, 0, 0.01]))
        if chance.random() < 0.05:
            raise ValueError("by chance")

    buffer = ReplayBuffer(storage=LazyStackStorage(10_000), batch_size=2)
    collector = make(
        prompts=tasks(10_000),
        step=step,
        groups_per_batch=3,
        max_staleness=max_staleness,
        on_stale=on_stale,
        max_retries=1,
        replay_buffer=buffer,
    )
    collector.start()

    def paused_update():
        with collector.pause():
            update(collector)

    def paused_updates():
        with collector.pause():
            wait_until(lambda: collector.stats()["groups_running"] == 0)
            for _ in range(max_staleness + 1):
                update(collector)

    actions = [
        lambda: update(collector),
        paused_update,
        paused_updates,
        lambda: time.sleep(0.02),
        lambda: None,
    ]
    for _ in range(12):
        for _ in range(chance.randint(1, 4)):
            chance.choice(actions)()
        # A trainer that has trained on what there is updates, and wants more. All that
        # may start then can be there before the next line, on a busy machine.
        before = len(buffer)
        update(collector)
        wait_until(lambda before=before: len(buffer) > before)
