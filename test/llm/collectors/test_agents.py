"""Agents that talk to a gateway, through AsyncLLMCollector."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import torch
from helpers.collecting import ask_gateway, talk, tasks, user, versions_of
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    CollectorTimeouts,
    Gateway,
    SGLangWrapper,
)
from torchrl_sglang.errors import CollectionError, ConfigurationError
from torchrl_sglang.gateway.agents import AgentResult
from torchrl_sglang.trainers.report import describe


class Agent:
    """Two turns, and a reward for the number of the task."""

    def __init__(self):
        self.runs = 0

    async def __call__(self, task, *, base_url, api_key):
        self.runs += 1
        await talk(base_url, api_key, task["query"], turns=2, max_tokens=5)
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
                    versions_of(collector).add(version)
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


class Through(Agent):
    """Three turns through two weight updates, the first one within the second turn."""

    def __init__(self, update, fake, models=("policy",) * 3):
        super().__init__()
        self.update, self.fake, self.models = update, fake, models

    async def __call__(self, task, *, base_url, api_key):
        self.runs += 1
        messages = [user(task["query"])]
        for number, model in enumerate(self.models):
            if self.runs == 1 and number:
                before = self.fake.weight_version
                self.update(self.collector)
                self.fake.earlier_version = (before, 2) if number == 1 else None
            options = {"max_tokens": 5, "model": model}
            reply = await ask_gateway(base_url, api_key, messages, **options)
            messages += [reply, user("Go on.")]
        return float(task["answer"])


@pytest.fixture
def through(collect, update, fake):
    def make(models=("policy",) * 3, **options):
        agent = Through(update, fake, models)
        agent.collector = collect(
            agent,
            group_size=1,
            **{"groups_per_batch": 1, "total_groups": 1, "max_staleness": 1, **options},
        )
        return agent

    return make


def test_a_session_is_bounded_token_by_token(through):
    """Versions are those of the tokens, also of a turn that two of them wrote."""
    agent = through(on_stale="mask")
    (batch,) = agent.collector
    (row,) = batch
    mask = row["masks"].all_assistant_mask[-len(row["token_policy_version"]) :]
    versions = [0] * 5 + [0] * 2 + [1] * 3 + [2] * 5
    written = row["token_policy_version"] >= 0
    assert row["token_policy_version"][written].tolist() == versions
    assert mask[written].tolist() == [version > 0 for version in versions]
    assert row["log_probs"].response.isfinite().equal(mask)
    assert row["policy_version"].item() == 0
    assert agent.collector.stats()["age"] == {2: 7, 1: 3, 0: 5}


@pytest.mark.parametrize(("on_stale", "runs"), [("drop", 2), ("retry", 2)])
def test_a_session_with_older_tokens_is_not_taken(through, on_stale, runs):
    agent = through(on_stale=on_stale)
    (batch,) = agent.collector
    assert agent.runs == runs
    assert batch["answer"] == [{"drop": "1", "retry": "0"}[on_stale]]
    assert batch["policy_version"].tolist() == [2]
    assert agent.collector.stats()["groups_stale"] == 1
    assert agent.collector.stats()["age"] == {0: 15}


def test_untrained_turns_have_no_age(engine, through):
    """Of a first turn that the rule leaves out, older tokens do no harm."""
    with Gateway(engine, trained="policy") as gateway:
        agent = through(("title", "title", "policy"), gateway=gateway)
        (batch,) = agent.collector
        (row,) = batch
        assert (agent.runs, row["policy_version"].item()) == (1, 2)
        assert row["masks"].all_assistant_mask.sum() == 5
        assert row["request"]["model"] == "policy"
        agent.collector.shutdown()
        assert agent.collector.stats()["age"] == {0: 5}


def test_agents_of_which_nothing_is_trained_fail(collect, engine):
    with Gateway(engine, trained="policy") as gateway:
        collector = collect(Agent(), gateway=gateway, max_retries=0)
        with pytest.raises(CollectionError, match="rule trained=.* the models ''"):
            list(collector)
        collector.shutdown()


def test_metrics_of_an_agent_are_in_its_rows(collect):
    class Counting(Agent):
        async def __call__(self, task, **session):
            reward = await super().__call__(task, **session)
            metrics = {"calls": self.runs} if task["answer"] != "0" else {}
            return AgentResult(reward=reward, metrics=metrics)

    (batch,) = collect(Counting())
    answers = [row["next", "reward"].item() for row in batch.unbind(0)]
    assert len(set(answers)) > 1
    found = [row.get(("next", "metrics"), None) for row in batch.unbind(0)]
    assert [metrics is None for metrics in found] == [not a for a in answers]
    about = describe(batch, policy_version=0, group_size=2, trajectory_return="mean")
    values = [metrics["calls"].item() for metrics in found if metrics is not None]
    assert about["metrics/calls"] == sum(values) / len(values)


def test_rewards_that_an_agent_sets_itself(collect, engine):
    """Of its turns and of itself, with a discount, over HTTP."""

    class Rewarded(Agent):
        async def __call__(self, task, *, base_url, api_key):
            await super().__call__(task, base_url=base_url, api_key=api_key)
            headers = {"Authorization": f"Bearer {api_key}"}
            url = f"{base_url.removesuffix('/v1')}/reward"
            async with aiohttp.ClientSession(headers=headers) as client:
                for part in ({"turn": 0}, {"branch": 1}, {}):
                    answer = await client.post(url, json={"reward": 1.0, **part})
                    answer.raise_for_status()

    with Gateway(engine, discount=0.5) as gateway:
        (batch,) = collect(Rewarded(), gateway=gateway)
        for row in batch:
            assert row["next", "reward"].item() == 2.0
            written = row["masks"].all_assistant_mask[-len(row["turn_returns"]) :]
            assert row["turn_returns"][written].tolist() == [2.0] * 10
            assert row["turn_rewards"][written].tolist() == [0] * 4 + [1] + [0] * 4 + [
                2
            ]


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


def test_arguments_that_exclude_each_other_are_refused(
    collect, engine, gateway, tiny_model_path, fake
):
    with pytest.raises(ConfigurationError, match="rewards cannot be given with agent"):
        collect(Agent(), rewards=lambda *_: 1.0)
    with pytest.raises(ConfigurationError, match="give an agent"):
        collect(None)
    with AsyncSGLang.connect(fake.url) as other:
        with pytest.raises(ConfigurationError, match="different engines"):
            collect(Agent(), gateway=Gateway(other))
    with pytest.raises(ConfigurationError, match="needs a gateway"):
        collect(Agent(), gateway=None)


class Forgetful(Agent):
    """An agent that returns nothing, and may set its reward."""

    def __init__(self, gateway=None):
        super().__init__()
        self.gateway = gateway

    async def __call__(self, task, *, base_url, api_key):
        await super().__call__(task, base_url=base_url, api_key=api_key)
        if self.gateway is not None:
            for session in self.gateway.sessions:
                self.gateway.set_reward(session, 1.0, turn=0)


def test_a_missing_reward_is_an_error(collect, gateway, caplog):
    (batch,) = collect(Forgetful())
    assert not batch["next", "reward"].any()
    assert caplog.text.count("returned no reward, and none was set") == 1
    caplog.clear()
    (batch,) = collect(Forgetful(gateway))
    assert batch["turn_returns"].any() or batch["next", "reward"].any()
    assert "returned no reward" not in caplog.text
