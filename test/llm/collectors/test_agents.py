"""Agents that talk to a gateway, through AsyncLLMCollector."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import torch
from helpers.collecting import tasks
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    CollectorTimeouts,
    Gateway,
    SGLangWrapper,
)
from torchrl_sglang.errors import CollectionError, ConfigurationError


class Agent:
    """Two turns, and a reward for the number of the task."""

    def __init__(self):
        self.runs = 0

    async def __call__(self, task, *, base_url, api_key):
        self.runs += 1
        messages = [{"role": "user", "content": task["query"]}]
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"}
        ) as client:
            for _ in range(2):
                answer = await client.post(
                    f"{base_url}/chat/completions",
                    json={"messages": messages, "max_tokens": 5},
                )
                content = await answer.json()
                messages += [
                    content["choices"][0]["message"],
                    {"role": "user", "content": "Go on."},
                ]
        return float(task["answer"])


@pytest.fixture
def engine(fake):
    with AsyncSGLang.connect(fake.url) as engine:
        yield engine


@pytest.fixture
def gateway(engine):
    with Gateway(engine) as gateway:
        yield gateway


@pytest.fixture
def collect(engine, gateway):
    collectors = []

    def make(agent, **options):
        given = {"prompts": tasks(3), "groups_per_batch": 3, "group_size": 2}
        collectors.append(
            AsyncLLMCollector(
                policy=SGLangWrapper(engine),
                agent=agent,
                **{"gateway": gateway, "total_groups": 3, **given, **options},
            )
        )
        return collectors[-1]

    yield make
    for collector in collectors:
        collector.shutdown()


def test_trajectories_of_whole_groups(collect, gateway):
    agent = Agent()
    (batch,) = collect(agent)
    assert agent.runs == len(batch) == 6
    assert batch["next", "reward"].shape == (6, 1, 1)
    # Groups come as they are complete.
    assert sorted(batch["next", "reward"].flatten().tolist()) == [0, 0, 1, 1, 2, 2]
    assert [row["answer"] for row in batch] == [
        str(int(row["next", "reward"].item())) for row in batch
    ]
    groups = [row["group"] for row in batch]
    assert groups == sorted(groups, key=groups.index)
    assert len(set(groups)) == 3
    for row in batch:
        assert row["masks"].all_assistant_mask.sum() == 10
        known = ~row["log_probs"].full.isnan()
        assert known.equal(row["masks"].all_assistant_mask)
    # Nothing is left behind.
    assert gateway.sessions == []


def test_into_a_replay_buffer(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(6), batch_size=6)
    assert list(collect(Agent(), replay_buffer=buffer)) == [None]
    assert len(buffer) == 6
    assert buffer.sample()["tokens"].full is not None


def test_stale_tokens_are_masked(collect, fake):
    """The first turn is older than the bound when the second one is written."""

    class Slow(Agent):
        async def __call__(self, task, **given):
            reward = await super().__call__(task, **given)
            if self.runs == 1:
                for version in ("1", "2"):
                    fake.weight_version = version
                    collector._versions.add(version)
                collector._set_version()
            return reward

    collector = collect(
        Slow(),
        prompts=tasks(1),
        group_size=1,
        groups_per_batch=1,
        total_groups=1,
        on_stale="mask",
        max_staleness=1,
    )
    (batch,) = collector
    (row,) = batch
    assert not row["masks"].all_assistant_mask.any()
    assert row["log_probs"].full.isnan().all()
    assert row["log_probs"].response.isnan().all()
    assert row["policy_version"].equal(torch.tensor(0))


async def fail(task, **given):
    raise ValueError("out of order")


async def hang(task, **given):
    await asyncio.sleep(60)


async def say_nothing(task, **given):
    return 1.0


async def say_nonsense(task, **given):
    return "good"


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (fail, "out of order"),
        (hang, "0.2 s"),
        (say_nothing, "without a request"),
        (say_nonsense, "'good'"),
    ],
)
def test_agents_that_fail(collect, gateway, agent, reason):
    collector = collect(agent, max_retries=0, timeouts=CollectorTimeouts(agent=0.2))
    with pytest.raises(CollectionError, match=reason):
        list(collector)
    collector.shutdown()
    assert gateway.sessions == []


def test_what_does_not_go_together(collect, engine, gateway, tiny_model_path, fake):
    with pytest.raises(ConfigurationError, match="rewards cannot be given with agent"):
        collect(Agent(), rewards=lambda *_: 1.0)
    with pytest.raises(ConfigurationError, match="give an agent"):
        collect(None)
    with AsyncSGLang.connect(fake.url) as other:
        with pytest.raises(ConfigurationError, match="different engines"):
            collect(Agent(), gateway=Gateway(other))
    with pytest.raises(ConfigurationError, match="needs a gateway"):
        collect(Agent(), gateway=None)
