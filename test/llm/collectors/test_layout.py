"""The asynchronous collector's batches, key by key those of TorchRL's LLMCollector."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.collecting import LengthReply
from helpers.slow import diagonal
from tensordict import NonTensorData, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import SGLangWrapper
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS

TASKS = [{"query": "hi", "answer": "1"}, {"query": "what is 2+2?", "answer": "4"}]


class LengthReward(Transform):
    """Rewards every turn with the length of its message."""

    def _step(self, tensordict, next_tensordict):
        contents = [one.content[-1] for one in tensordict["history"].full.unbind(0)]
        reward = torch.tensor([float(len(content)) for content in contents])
        shape = (*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", reward.view(shape))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


async def step(conversation, task):
    conversation.turns[-1].reward = float(len(conversation.response))
    return f"length {len(conversation.response)}"


def expected(policy, tokenizer, turns, group_size) -> TensorDictBase:
    """What TorchRL collects."""
    num_envs = len(TASKS) * group_size
    batch = {name: [task[name] for task in TASKS] for name in TASKS[0]}
    env = ChatEnv.from_dataloader(
        [batch] * 4, tokenizer=tokenizer, batch_size=(num_envs,), repeats=group_size
    )
    env.append_transform(StepCounter(max_steps=turns))
    env.append_transform(LengthReply())
    env.append_transform(LengthReward())
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=num_envs * turns,
        yield_completed_trajectories=True,
        track_policy_version=True,
    )
    data = next(iter(collector))
    collector.shutdown()
    return data


def make_chat_env(tokenizer, turns, size=1) -> ChatEnv:
    """The same environment for some conversations, which are given their tasks."""
    env = ChatEnv(batch_size=(size,), tokenizer=tokenizer)
    env = env.append_transform(StepCounter(max_steps=turns))
    env.append_transform(LengthReply())
    return env.append_transform(LengthReward())


def leaves(td, prefix=()):
    """Yields every key with its value."""
    if isinstance(td, torch.Tensor) or not hasattr(td, "keys"):
        yield prefix, td
        return
    if isinstance(td, NonTensorData):
        yield prefix, td.data
        return
    for name in sorted(td.keys()):
        yield from leaves(td.get(name), (*prefix, name))


def to_plain(value):
    return value if isinstance(value, torch.Tensor) else getattr(value, "data", value)


@pytest.mark.parametrize("form", ["functions", "environments", "shared environments"])
@pytest.mark.parametrize(
    ("prefer_tokens", "info"), diagonal([False, True], [False, True])
)
@pytest.mark.parametrize(("turns", "group_size"), [(1, 1), (1, 3), (3, 2)])
def test_every_key_is_that_of_llm_collector(
    make, fake_engine, tokenizer, turns, group_size, info, prefer_tokens, form
):
    if form == "shared environments" and turns > 1:
        pytest.skip("They are for conversations of a single turn.")
    policy = SGLangWrapper(
        fake_engine,
        generate_kwargs={"max_new_tokens": 6},
        return_generation_info=info,
        prefer_tokens=prefer_tokens,
    )
    reference = expected(policy, tokenizer, turns, group_size)
    if form == "functions":
        kind = {"step": step, "max_turns": turns}
    else:
        size = group_size if form == "shared environments" else 1
        kind = {"env": partial(make_chat_env, tokenizer, turns, size)}
    collector = make(
        policy=policy,
        prompts=TASKS,
        rewards=None,
        group_size=group_size,
        max_staleness=0,
        **kind,
    )
    batch = next(iter(collector))
    assert batch.batch_size == reference.batch_size
    assert type(batch) is type(reference)
    # LLMCollector puts the trajectories that end first, which here is the same order.
    for ours, theirs in zip(batch.unbind(0), reference.unbind(0), strict=True):
        mine, other = dict(leaves(ours)), dict(leaves(theirs))
        # It alone knows the version of each token, in its own count.
        assert mine.pop((POLICY_VERSIONS,)).tolist() == [0] * len(
            mine["tokens", "response"]
        )
        assert mine.keys() == other.keys()
        for key, value in other.items():
            found, wanted = to_plain(mine[key]), to_plain(value)
            if isinstance(wanted, torch.Tensor):
                assert found.dtype == wanted.dtype, key
                assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), key
            else:
                assert found == wanted, key
            for name in key[:1]:
                assert type(ours.get(name)) is type(theirs.get(name)), key


def test_a_conversation_that_ends_by_itself_is_terminated(make):
    collector = make(rewards=None)
    batch = next(iter(collector))
    assert batch["next", "terminated"].all()
    assert not batch["next", "truncated"].any()
    assert batch["next", "done"].all()
    assert not batch["done"].any()
