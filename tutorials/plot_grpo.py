"""
A GRPO loop
===========

Group relative policy optimization in TorchRL's own classes: an environment asks, the
engine answers each question eight times, answers are compared within their group, and
the loss makes the better ones likelier. Then the engine gets the new weights.

A model with random weights learns to answer with digits. It takes no GPU and no
download; ``examples/grpo_tiny`` is the same with a harder task and an evaluation.
"""

# %%
# Engine and policy
# -----------------

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.05)
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu")
tokenizer = engine.get_tokenizer()
policy = SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 12})

# %%
# A question and a reward
# -----------------------
#
# A ``ChatEnv`` asks the questions of a dataset, each to a whole group. The reward is a
# transform: the share of digits in the response.

import torch
from torchrl.data import Unbounded
from torchrl.envs import InitTracker, StepCounter, Transform
from torchrl.envs.llm import ChatEnv

GROUP_SIZE, GROUPS, STEPS = 8, 8, 12


class Digits(Transform):
    """Reward: the share of a response's characters that are digits."""

    def __init__(self):
        super().__init__(in_keys=[("text", "response")], out_keys=["reward"])

    def _step(self, tensordict, next_tensordict):
        texts = [
            text.removesuffix("<|im_end|>") for text in tensordict["text"].response
        ]
        shares = [sum(map(str.isdigit, text)) / max(len(text), 4) for text in texts]
        reward = torch.tensor(shares).view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", reward)

    def transform_reward_spec(self, reward_spec):
        """Declare the reward."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


questions = [{"query": f"Number {n}, please."} for n in range(100)]
env = ChatEnv.from_dataloader(
    torch.utils.data.DataLoader(questions, batch_size=GROUPS),
    repeats=GROUP_SIZE,
    batch_size=(GROUPS * GROUP_SIZE,),
    tokenizer=tokenizer,
)
env.append_transform(InitTracker())
env.append_transform(StepCounter(max_steps=1))
env.append_transform(Digits())

# %%
# The collector calls the policy, and sends weights
# -------------------------------------------------

from torchrl_sglang import SGLangLLMCollector

scheme = SGLangWeightSyncScheme(engine, model)
collector = SGLangLLMCollector(
    env,
    policy=policy,
    dialog_turns_per_batch=GROUPS * GROUP_SIZE,
    flatten_data=True,
    weight_sync_schemes={"policy": scheme},
)

# %%
# Loss and buffer
# ---------------
#
# The trainer scores the very tokens that the engine sampled. The buffer computes the
# advantages: reward minus the group's mean, over its standard deviation.

from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage

from torchrl_sglang import CorrectedGRPOLoss

actor = TransformersWrapper(
    model, tokenizer=tokenizer, input_mode="tokens", generate=False
)
loss = CorrectedGRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
buffer = ReplayBuffer(
    storage=LazyStackStorage(GROUPS * GROUP_SIZE),
    sampler=SamplerWithoutReplacement(),
    transform=MCAdvantage(grpo_size=GROUP_SIZE),
    batch_size=32,
)
KEYS = ("query", "tokens", "masks", "log_probs", ("next", "reward"), ("next", "done"))

# %%
# The loop
# --------
#
# Rollout, training, weights. Each step also compares the engine's log-probs with the
# trainer's before training: the first ratio of the loss is 1 as long as they agree.

rewards, gaps, seconds = [], [], []
rollouts = iter(collector)
for _ in range(STEPS):
    batch = next(rollouts)
    rewards.append(batch["next", "reward"].mean().item())
    with torch.no_grad():
        scored = actor(batch.select("tokens", "masks"))
    engine_says = torch.cat(batch.get(("log_probs", "full"), as_list=True))
    trainer_says = torch.cat(scored.get(("log_probs", "full"), as_list=True))
    gap = (engine_says - trainer_says)[engine_says.isfinite()].abs()
    gaps.append(gap.max().item())

    buffer.extend(batch.select(*KEYS))
    for minibatch in buffer:
        loss(minibatch).loss_objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    buffer.empty()

    seconds.append(collector.update_policy_weights_().seconds)

print(", ".join(f"{reward:.2f}" for reward in rewards))
print(f"an update took {sum(seconds) / len(seconds):.2f} s")

# %%
# The reward rises from one in ten, the share of digits among all characters. The gap
# stays at float32's rounding, which says that every update has arrived: a server with
# old weights would show here first.

import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(rewards, marker=".")
left.set(xlabel="step", ylabel="share of digits", ylim=(0, 1))
right.semilogy(gaps, marker=".")
right.set(xlabel="step", ylabel="largest log-prob gap, nats", ylim=(1e-8, 1))

# %%
# What does it say now?

print(batch["text"].response[:4])

# %%
# In :doc:`plot_async_grpo`, the engine generates while the trainer trains.

collector.shutdown()
scheme.shutdown()
engine.shutdown()
