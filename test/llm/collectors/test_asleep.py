"""A collector whose engine is asleep: groups wait for its memory, and do not fail."""

from __future__ import annotations

import time

import pytest
from helpers.collecting import tasks
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, CollectorTimeouts
from torchrl_sglang.errors import CollectionError, WeightSyncStateError


@pytest.fixture
def fake(tiny_model_path):
    with FakeServer(tiny_model_path, enable_memory_saver=True) as fake:
        yield fake


@pytest.fixture
def engine(policy) -> AsyncSGLang:
    return policy.model


def test_groups_wait_until_all_memory_is_back(make, update, engine):
    """As in a step of a trainer on the same GPU: the update comes before the cache."""
    collector = make(max_staleness=0)
    batches = iter(collector)
    next(batches)
    # The weights have come back already.
    engine.sleep("kv_cache")
    update(collector)
    # Groups may start from now on.
    wait_until(lambda: collector.stats()["groups_running"] == 2)
    time.sleep(0.1)
    assert collector.stats()["conversations_in_flight"] == 0
    with pytest.raises(WeightSyncStateError, match="asleep"):
        engine.generate(input_ids=[[5]])
    engine.wake_up()
    assert len(next(batches)) == 2
    told = collector.stats()
    assert (told["groups_retried"], told["errors"]) == (0, [])


def test_nobody_wakes_it_up(make, update, engine):
    collector = make(max_staleness=0, timeouts=CollectorTimeouts(engine=0.2))
    batches = iter(collector)
    next(batches)
    engine.sleep()
    # No group may start, so that none has waited.
    time.sleep(0.3)
    assert collector.is_running()
    update(collector)
    with pytest.raises(CollectionError, match=r"waited 0\.2 s .* asleep \(kv_c"):
        next(batches)
    wait_until(lambda: not collector.is_running())


def test_prompts_that_are_at_their_end(make, update, engine):
    """There is nothing to wait for."""
    collector = make(prompts=iter(tasks(2)), max_staleness=0)
    batches = iter(collector)
    next(batches)
    engine.sleep()
    update(collector)
    assert next(batches, None) is None


def test_each_wait_is_one_of_its_own(make, update, engine):
    collector = make(max_staleness=0, timeouts=CollectorTimeouts(engine=1.0))
    batches = iter(collector)
    for _ in range(3):
        next(batches)
        engine.sleep("kv_cache")
        update(collector)
        time.sleep(0.6)
        engine.wake_up()
    assert len(next(batches)) == 2
