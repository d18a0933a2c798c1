"""
Asynchronous GRPO with correction
=================================

While the trainer trains, a synchronous engine is idle. Here it generates the next
groups meanwhile, with weights that are a little old. A bound on that age and a
correction of the loss keep learning right. It takes no GPU and no download.

The task is that of :doc:`plot_grpo`: answer with digits.
"""

# %%
# An asynchronous collector
# -------------------------
#
# :class:`~torchrl_sglang.AsyncLLMCollector` runs conversations side by side. Plain
# functions say what a conversation is; here, a question and a reward. ``max_staleness``
# bounds how many updates lie between sampling a token and training on it.

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.testing.tiny_model import save_tiny_model

GROUP_SIZE, GROUPS, STEPS = 8, 8, 15

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.05)
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu")
scheme = SGLangWeightSyncScheme(engine, model)


async def digits(conversation, task):
    """Return the share of a response's characters that are digits."""
    text = conversation.response
    return sum(map(str.isdigit, text)) / max(len(text), 4)


collector = AsyncLLMCollector(
    policy=SGLangWrapper(
        engine, generate_kwargs={"max_new_tokens": 12}, return_generation_info=True
    ),
    prompts=[{"query": f"Number {n}, please."} for n in range(100)],
    rewards=digits,
    group_size=GROUP_SIZE,
    groups_per_batch=GROUPS,
    total_groups=GROUPS * STEPS,
    max_staleness=2,
    weight_sync_schemes={"policy": scheme},
)

# %%
# A loss that knows how old its tokens are
# ----------------------------------------
#
# :class:`~torchrl_sglang.OffPolicyCorrection` stands between batch and loss: it weights
# each token by the truncated ratio of the trainer's policy before the step and the one
# that sampled it. A :class:`~torchrl_sglang.Learner` computes the trainer's log-probs
# and takes the optimizer step; its metrics are worth a log of their own.

import torch
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import (
    CorrectedGRPOLoss,
    GroupAdvantage,
    Learner,
    OffPolicyCorrection,
)

actor = TransformersWrapper(
    model, tokenizer=engine.get_tokenizer(), input_mode="tokens", generate=False
)
learner = Learner(
    CorrectedGRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False),
    torch.optim.Adam(model.parameters(), lr=3e-3),
    correct=OffPolicyCorrection("decoupled_token_is"),
)
advantage = GroupAdvantage(GROUP_SIZE)

# %%
# The loop
# --------
#
# Collect, train, send the weights. ``update_policy_weights_`` finds responses in
# flight; they go on with the new weights. :doc:`/guides/write_your_run` has the same in
# one call.

rewards, divergences, sample_sizes, ages = [], [], [], []
collector.update_policy_weights_()  # So that every token has a version.
for batch in collector:
    rewards.append(batch["next", "reward"].mean().item())
    versions = batch.get(("generation_info", "weight_version"), as_list=True)
    versions = torch.cat(versions)
    ages.append((collector.policy_version - versions).float().mean().item())

    metrics = learner.train(advantage(batch), collector.policy_version)
    divergences.append(metrics["rollout_corr/k3_kl"])
    sample_sizes.append(metrics["rollout_corr/rollout_is_eff_sample_size"])

    collector.update_policy_weights_()

print(", ".join(f"{reward:.2f}" for reward in rewards))

# %%
# What bounds the run?
# --------------------
#
# The collector knows how long either side waited, and how old the tokens were that the
# trainer got. More than two updates is impossible.

stats = collector.stats()
print(stats["bottleneck"])
for age, tokens in sorted(stats["age"].items()):
    print(f"{tokens} tokens were {age} updates old")

# %%
# In the middle: how far apart the sampling policy and the trainer's are. It is zero for
# fresh tokens, and grows with their age and with the size of the updates in between,
# which get smaller once the policy has learned. On the right: the effective share of
# the samples after weighting. Near 1 the correction changes little; if it falls far
# below, lower ``max_staleness`` or the learning rate.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
axes[0].plot(rewards, marker=".")
axes[0].set(xlabel="step", ylabel="share of digits", ylim=(0, 1))
axes[1].plot(divergences, marker=".", label="divergence, nats")
axes[1].set(xlabel="step", ylabel="KL of the policies, nats a token")
twin = axes[1].twinx()
twin.plot(ages, color="C1", linestyle=":", label="mean age")
twin.set(ylabel="mean age, updates (dotted)", ylim=(0, 2.1))
axes[2].plot(sample_sizes, marker=".")
axes[2].set(xlabel="step", ylabel="effective sample size", ylim=(0, 1.05))

# %%
# :doc:`/off_policy` has the methods, and a task that collapses without one.

collector.shutdown()
scheme.shutdown()
engine.shutdown()
