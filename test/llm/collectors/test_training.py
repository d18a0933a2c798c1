"""The asynchronous collector with TorchRL's trainer, loss, samplers, KL transforms."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.collecting import Declare
from tensordict import TensorDictBase
from torchrl.data import (
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    Unbounded,
)
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv, KLRewardTransform, RetrieveKL
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from torchrl.trainers.algorithms import GRPOTrainer

from torchrl_sglang.errors import CollectionError
from torchrl_sglang.testing.tiny_model import make_tiny_model

# TorchRL's own, about what is deprecated in torch and experimental in TorchRL.
pytestmark = pytest.mark.filterwarnings("ignore")

GROUP_SIZE = 2
COEFFICIENT = 0.1
GEN, REF = ("gen", "full"), ("ref", "full")
ROUNDS = 2


class Sender:
    """Counts updates as the sender of a scheme does."""

    def __init__(self, update: Any) -> None:
        self._update = update
        self.collector: Any = None

    def update_weights(self, weights: Any = None) -> None:
        self._update(self.collector)


def sample_number(conversation, task):
    return float(conversation.sample)


@pytest.fixture
def actor(hf_model, tokenizer):
    return TransformersWrapper(
        hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )


def make_buffer(sampler: Any, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyStackStorage(64),
        sampler=sampler,
        transform=MCAdvantage(grpo_size=GROUP_SIZE),
        batch_size=4,
        **kwargs,
    )


def make_trainer(collector, actor, sender, buffer, **kwargs: Any) -> GRPOTrainer:
    sender.collector = collector
    with warnings.catch_warnings():
        # That it is experimental.
        warnings.simplefilter("ignore")
        return GRPOTrainer(
            collector=collector,
            loss_module=GRPOLoss(actor_network=actor, masking_strategy="rlhf"),
            optimizer=torch.optim.SGD(actor.parameters(), lr=0.1),
            weight_sync_sender=sender,
            replay_buffer=buffer,
            progress_bar=False,
            seed=3,
            **kwargs,
        )


@pytest.mark.parametrize("writes", [False, True], ids=["yields", "writes"])
@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, StalenessAwareSampler])
def test_a_trainer(make, update, actor, writes, sampler, tmp_path):
    """Two rounds of collecting, training and sending weights; its state comes back."""
    buffer = make_buffer(sampler())
    collector = make(
        rewards=sample_number,
        group_size=GROUP_SIZE,
        replay_buffer=buffer if writes else None,
    )
    before = actor.model.lm_head.weight.detach().clone()
    trainer = make_trainer(
        collector, actor, Sender(update), buffer,
        total_frames=ROUNDS * 2 * GROUP_SIZE,
        optim_steps_per_batch=1 if sampler is StalenessAwareSampler else None,
        empty_replay_buffer_on_weight_update=True,
        save_trainer_file=tmp_path / "trainer.pt",
    )  # fmt: skip
    trainer.train()
    assert collector.policy_version == ROUNDS
    assert not torch.equal(actor.model.lm_head.weight, before)
    assert not collector.is_running()
    again = make(rewards=sample_number, group_size=GROUP_SIZE)
    other = make_trainer(again, actor, Sender(update), buffer, total_frames=8)
    other.load_from_file(tmp_path / "trainer.pt", weights_only=False)
    assert again.policy_version == collector.policy_version
    pool = again.state_dict()["pool"]
    assert pool["consumed"] == ROUNDS * 2
    # Perhaps none of the next ones has begun.
    order = pool["prompts"]
    assert min([*order["open"], order["next"]]) == ROUNDS * 2


def test_a_trainer_that_does_not_wait(make, update, actor):
    """It samples what the buffer has, the newest most often, again and again."""
    buffer = make_buffer(StalenessAwareSampler())
    collector = make(rewards=sample_number, group_size=GROUP_SIZE, replay_buffer=buffer)
    trainer = make_trainer(
        collector, actor, Sender(update), buffer, total_frames=24,
        optim_steps_per_batch=1, async_collection=True,
    )  # fmt: skip
    trainer.train()
    assert buffer.sampler.consumer_version == collector.policy_version >= ROUNDS
    assert len(buffer) >= 24


def test_a_trainer_is_told_that_the_collector_ended(make, update, actor):
    """Instead of waiting for its buffer for ever."""
    buffer = make_buffer(StalenessAwareSampler())
    collector = make(
        rewards=lambda conversation, task: 1 / 0, max_retries=0, replay_buffer=buffer
    )
    trainer = make_trainer(
        collector, actor, Sender(update), buffer, total_frames=24,
        optim_steps_per_batch=1, async_collection=True,
    )  # fmt: skip
    with pytest.raises(CollectionError, match="division by zero"):
        trainer.train()


@pytest.fixture
def reference_model(tokenizer):
    return make_tiny_model(tokenizer, seed=11)


def make_reference(model, tokenizer, **kwargs: Any) -> TransformersWrapper:
    return TransformersWrapper(
        model, tokenizer=tokenizer, generate=False, pad_output=False,
        return_log_probs=True, **{"log_probs_key": "ref", **kwargs},
    )  # fmt: skip


class Reward(Transform):
    """Rewards at random, so that there is an advantage."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", torch.rand(1, 1, 1))

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def check_kl(batch: TensorDictBase) -> None:
    """Each token has a penalty, and it is in the reward."""
    for row in batch["next"].unbind(0):
        penalty, reward = row["kl_penalty"].flatten(), row["reward"].flatten()
        assert penalty.isfinite().all()
        assert penalty.any()
        bare = reward + COEFFICIENT * penalty
        torch.testing.assert_close(bare, bare[:1].expand(len(bare)))


def train(make, update, actor, collector) -> None:
    """Two rounds of training on whole batches."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP_SIZE),
        batch_size=4,
    )
    loss = GRPOLoss(actor, entropy_bonus=False)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    for _, batch in zip(range(ROUNDS), collector, strict=False):
        check_kl(batch)
        buffer.extend(batch)
        out = loss(buffer.sample())
        out.loss_objective.backward()
        assert actor.model.lm_head.weight.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
        update(collector)


def test_kl_as_postproc(make, update, actor, policy, tokenizer, reference_model):
    scorer = policy.get_new_version(
        generate=False, input_mode="tokens", log_probs_key="gen"
    )
    reference = make_reference(reference_model, tokenizer, input_mode="tokens")
    postproc = RetrieveKL(
        scorer, reference, assistant_only=False, coeff=COEFFICIENT,
        gen_log_probs_full_key=GEN, ref_log_probs_full_key=REF,
    )  # fmt: skip
    collector = make(rewards=sample_number, group_size=GROUP_SIZE, postproc=postproc)
    train(make, update, actor, collector)


@pytest.mark.parametrize("kind", ["retrieve", "reward"])
def test_kl_in_environments(make, update, actor, reference_model, tokenizer, kind):
    """``RetrieveKL`` takes the policy from the collector."""
    key = "ref" if kind == "retrieve" else "log_probs"
    reference = make_reference(
        reference_model, tokenizer, input_mode="tokens", log_probs_key=key
    )

    def make_env():
        env = ChatEnv(batch_size=(1,), tokenizer=tokenizer)
        env = env.append_transform(StepCounter(max_steps=1)).append_transform(Reward())
        if kind == "reward":
            return env.append_transform(KLRewardTransform(reference, coef=COEFFICIENT))
        return env.append_transform(Declare(GEN, REF)).append_transform(
            RetrieveKL(
                "from_collector", reference, assistant_only=False, coeff=COEFFICIENT,
                gen_log_probs_full_key=GEN, ref_log_probs_full_key=REF,
            )
        )  # fmt: skip

    collector = make(env=make_env, rewards=None, group_size=GROUP_SIZE)
    train(make, update, actor, collector)
