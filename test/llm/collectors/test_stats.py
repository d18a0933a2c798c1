"""What bounds a run is what bounds it, on loads of known bounds; messages of set-up."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from torchrl_sglang import CollectorTimeouts
from torchrl_sglang.collectors.runtime.stats import find_bottleneck
from torchrl_sglang.errors import CollectionTimeoutError, ConfigurationError


@pytest.mark.parametrize(
    ("waits", "idle", "generating", "bound"),
    [
        (0.0, 0.6, 1.0, "Training"),
        # A long conversation always runs.
        (0.03, 0.0, 1.0, "Training"),
        # A recipe that collects for 16 % of the time, and one that waits for 10 %.
        (0.16, 0.68, 1.0, "Training"),
        (0.10, 0.12, 0.9, "Training"),
        (0.17, 0.0, 1.0, "Generation"),
        (0.7, 0.16, 1.0, "Generation"),
        (0.7, 0.0, 0.2, "The environment"),
        (0.5, 0.5, 1.0, "The bound on staleness"),
        (0.25, 0.75, 1.0, "Training"),
    ],
)
def test_the_bottleneck(waits, idle, generating, bound):
    lately = {"trainer_waits": waits, "idle": idle, "conversations": 10.0}
    lately["conversations_in_flight"] = 10.0 * generating
    assert find_bottleneck(lately, 1).startswith(f"{bound} bounds the run")


def test_requests_beyond_cuda_graphs(make, fake):
    collector = make(timeouts=CollectorTimeouts(batch=0.5))
    next(iter(collector))
    with fake.misbehaving("hang"), pytest.raises(CollectionTimeoutError):
        list(collector)
    assert "CUDA" not in collector.stats()["bottleneck"]
    engine = collector.policy.model
    engine.capabilities = replace(engine.capabilities, graphs_up_to=1)
    assert "SGLang has CUDA graphs for 1;" in collector.stats()["bottleneck"]


@pytest.mark.parametrize(
    ("train", "step", "max_staleness", "bound"),
    [
        (0.3, 0.0, 2, "Training"),
        (0.0, 0.3, 1, "The environment"),
        # Each waits for the other.
        (0.2, 0.2, 0, "The bound on staleness"),
    ],
)
def test_the_bottleneck_of_a_run(make, update, train, step, max_staleness, bound):
    def waits(conversation, task):
        time.sleep(step)

    collector = make(step=waits if step else None, max_staleness=max_staleness)
    batches = iter(collector)
    # A busy machine may make one side longer for a while.
    for number in range(1, 21):
        next(batches)
        time.sleep(train)
        update(collector)
        stats = collector.stats()
        if number >= 5 and stats["bottleneck"].startswith(bound):
            break
    assert stats["bottleneck"].startswith(bound), stats
    assert all(isinstance(number, float) for number in stats["lately"].values())


def test_servers_that_are_down(make, fake):
    collector = make(timeouts=CollectorTimeouts(batch=5.0))
    next(iter(collector))
    fake.close()
    with pytest.raises(CollectionTimeoutError):
        list(collector)
    said = collector.stats()["bottleneck"]
    assert said.startswith("Servers that do not serve bound the run: ")
    assert fake.url in said


@pytest.mark.parametrize(
    ("arguments", "advantage", "message"),
    [
        ({}, {"grpo_size": 8}, "group_size is 1, .* group_size=8"),
        ({"group_size": 4}, {"grpo_size": 8}, "group_size is 4, .* grpo_size=8"),
        ({"group_size": 2}, {"grpo_size": 2, "prompt_key": "q"}, "prompt_key='q'"),
    ],
)
@pytest.mark.parametrize("place", ["postproc", "replay_buffer"])
def test_advantages_of_other_groups(make, place, arguments, advantage, message):
    transform = MCAdvantage(**advantage)
    if place == "replay_buffer":
        transform = ReplayBuffer(storage=LazyStackStorage(9), transform=transform)
    with pytest.raises(ConfigurationError, match=message):
        next(iter(make(**{place: transform}, **arguments)))


@pytest.mark.parametrize("name", ["max_staleness", "group_size", "total_groups"])
def test_a_count_that_is_none(make, name):
    with pytest.raises(ConfigurationError, match=f"{name} must be an integer of at"):
        make(**{name: None})
