"""AsyncLLMCollector with TorchRL environments, which raise, hang and end."""

from __future__ import annotations

import time

import pytest
from helpers.collecting import OneReward, collection_of, one_turn_env
from helpers.waiting import wait_until
from tensordict import set_list_to_stack
from torchrl.envs.llm import ChatEnv

from torchrl_sglang.errors import CollectionError, ConfigurationError


async def coroutine_of_env() -> ChatEnv:
    return one_turn_env()


@pytest.fixture
def make_with_env(make):
    def make_collector(env, **kwargs):
        return make(env=env, rewards=None, **kwargs)

    return make_collector


def answers(batch) -> list[int]:
    return [int(answer) for answer in batch["answer"]]


def test_groups_of_environments(make_with_env, update):
    made = []

    def counted():
        made.append(one_turn_env(OneReward()))
        return made[-1]

    collector = make_with_env(counted, group_size=3, max_staleness=1)
    batches = iter(collector)
    seen = []
    for version in range(4):
        batch = next(batches)
        seen += answers(batch)
        assert batch["next", "reward"].shape == (6, 1, 1)
        assert set(batch["policy_version"].tolist()) <= {version - 1, version}
        update(collector)
    assert sorted(seen) == [number for number in range(8) for _ in range(3)]
    # Environments are used again.
    assert len(made) <= 12
    collector.shutdown()
    assert all(env.is_closed for env in made)


def test_tokens_that_are_masked(make_with_env, update):
    collector = make_with_env(
        lambda: one_turn_env(OneReward()),
        max_staleness=0,
        on_stale="mask",
        groups_per_batch=1,
        batches_per_update=2,
    )
    batches = iter(collector)
    assert (
        next(batches).get(("log_probs", "response"), as_list=True)[0].isfinite().all()
    )
    wait_until(lambda: collector.stats()["groups_ready"] == 1)
    update(collector)
    batch = next(batches)
    assert batch.get(("log_probs", "response"), as_list=True)[0].isnan().all()
    assert not batch.get(("masks", "all_assistant_mask"), as_list=True)[0].any()


def test_values_that_are_no_environment_are_refused(make_with_env):
    with pytest.raises(ConfigurationError, match="a function that makes"):
        make_with_env(one_turn_env())
    with pytest.raises(ConfigurationError, match="env=.* is a coroutine function"):
        make_with_env(coroutine_of_env)
    for wrong in (lambda: ChatEnv(batch_size=(3,)), dict):
        with pytest.raises(ConfigurationError, match=r"batch size \(1,\)"):
            make_with_env(wrong, group_size=4)
    with pytest.raises(ConfigurationError, match="step cannot be given with env"):
        make_with_env(one_turn_env, step=print)
    with set_list_to_stack(False), pytest.raises(ConfigurationError, match="set_list"):
        make_with_env(one_turn_env)


@pytest.mark.parametrize("max_in_flight", [1, 3, 100])
def test_conversations_that_share_an_environment(make_with_env, max_in_flight):
    collector = make_with_env(
        lambda: one_turn_env(OneReward(), size=2),
        group_size=4,
        max_in_flight=max_in_flight,
        total_groups=4,
    )
    batches = list(collector)
    seen = [answer for batch in batches for answer in answers(batch)]
    assert sorted(seen) == [number for number in range(4) for _ in range(4)]
    assert all(batch["next", "done"].all() for batch in batches)
    assert collector.stats()["groups_retried"] == 0
    tensors = [row["tokens", "full"] for batch in batches for row in batch.unbind(0)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 16


def test_a_shared_environment_is_for_a_single_turn(make_with_env):
    collector = make_with_env(
        lambda: ChatEnv(batch_size=(2,)), group_size=2, max_retries=0
    )
    with pytest.raises(CollectionError, match=r"go on after.*StepCounter\(max_steps"):
        next(iter(collector))


def test_environments_of_different_batch_sizes_are_refused(make_with_env):
    sizes = iter([1] + [2] * 100)
    collector = make_with_env(
        lambda: one_turn_env(OneReward(), size=next(sizes)), group_size=2, max_retries=0
    )
    with pytest.raises(CollectionError, match="of one batch size, got 2 after 1"):
        next(iter(collector))


def test_one_that_is_made_too_late_is_used_later(make_with_env):
    """Whose sibling failed does not wait for it; another conversation takes it."""
    made = []

    def slow():
        made.append(1)
        if len(made) % 4 == 2:
            raise ValueError("no sandbox now")
        time.sleep(0.2 if len(made) > 1 else 0.0)
        return one_turn_env(OneReward())

    collector = make_with_env(
        slow, group_size=4, groups_per_batch=1, max_retries=100, num_threads=8
    )
    batches = iter(collector)
    for _ in range(4):
        next(batches)
    kept = collection_of(collector).groups._environments
    collection_of(collector).pause()
    wait_until(lambda: collector.stats()["groups_running"] == 0)
    wait_until(lambda: len(kept._idle) == len(kept._known))
    assert collector.stats()["groups_retried"] > 0


@pytest.mark.parametrize("value", [2**70, {1: 2}, None, [1, [2]]], ids=str)
def test_values_of_tasks(make_with_env, value):
    collector = make_with_env(
        lambda: one_turn_env(OneReward()),
        prompts=[{"query": "q", "answer": value}],
        group_size=2,
        total_groups=1,
        groups_per_batch=1,
    )
    batch = next(iter(collector))
    assert batch[0]["answer"] == value
