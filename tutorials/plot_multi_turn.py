"""
Several turns and a tool
========================

A conversation of several turns, with a tool between them: the policy may look a number
up before it answers. This page runs such conversations with plain functions, looks at
what is trained and what is cached, and lets a model with random weights learn to use
the tool. It takes no GPU and no download.
"""

# %%
# A policy that can call
# ----------------------
#
# A random model does not know how a call is written. A grammar forces the form: either
# a call of ``look_up``, or an answer. Which one is the model's choice.

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.05)
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu", grammar_backend="xgrammar")

CALL = r'<tool_call>\n\{"name": "look_up", "arguments": \{\}\}\n</tool_call>'
FORM = rf"({CALL}|ANSWER [0-9])"
policy = SGLangWrapper(
    engine,
    generate_kwargs={"max_new_tokens": 80, "regex": FORM},
    prefer_tokens=True,
    return_generation_info=True,
)

# %%
# What a conversation is
# ----------------------
#
# The policy responds. ``tools``, of which the chat template tells it by their
# docstrings, answer first if it called them; otherwise ``step`` says
# what comes next, and ``None`` ends the conversation. Then the reward: 1 for an answer
# that was looked up, and a little less for every further look.

TOOL_TURNS = 3


async def look_up():
    """Tell the number."""
    return "It is 7."


async def step(conversation, task):
    """End the conversation: it has an answer."""
    return


async def careful(conversation, task):
    """Return 1 for an answer that was looked up once, and less for other ways."""
    looks = len(conversation.turns) - 1
    answered = conversation.response.startswith("ANSWER")
    return float(answered and looks > 0) * (1.1 - 0.1 * looks)


from torchrl_sglang import AsyncLLMCollector, SGLangWeightSyncScheme

GROUP_SIZE, GROUPS, STEPS = 8, 8, 15

scheme = SGLangWeightSyncScheme(engine, model)
collector = AsyncLLMCollector(
    policy=policy,
    prompts=[f"Which number has box {n}?" for n in range(40)],
    tools=[look_up],
    step=step,
    rewards=careful,
    max_turns=TOOL_TURNS + 1,
    group_size=GROUP_SIZE,
    groups_per_batch=GROUPS,
    total_groups=GROUPS * STEPS,
    max_staleness=0,
    weight_sync_schemes={"policy": scheme},
)
collector.update_policy_weights_()
batches = iter(collector)
batch = next(batches)

# %%
# A batch has a row for each turn
# -------------------------------
#
# The turns of a conversation follow each other; ``step_count`` says which turn it is.
# The response of a row is what is trained; everything before is its prompt.

done = batch["next", "done"].flatten()
print(f"{len(batch)} turns of {done.sum()} conversations")
longest = int(batch["step_count"].flatten().argmax())
conversation = batch[longest]["text"].full
print(conversation)

# %%
# Tokens are kept
# ---------------
#
# With ``prefer_tokens=True`` a turn begins with the very tokens of the turn before it,
# so the server finds them in its prefix cache and computes the rest alone.

cached = batch["generation_info"].cached_tokens
lengths = [len(row) for row in batch.get(("tokens", "prompt"), as_list=True)]
for turn in range(TOOL_TURNS + 1):
    rows = (batch["step_count"].flatten() == turn).nonzero().flatten().tolist()
    if rows:
        share = sum(cached[row].item() for row in rows) / sum(lengths[r] for r in rows)
        print(f"turn {turn}: {len(rows)} rows, {share:.0%} of the prompt was cached")

# %%
# Learning to look
# ----------------
#
# The reward stands in the last turn. ``GroupAdvantage`` adds it up over the
# conversation, compares conversations of a group, and gives each turn the advantage of
# its conversation.

import torch
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import CorrectedGRPOLoss, GroupAdvantage, Learner

actor = TransformersWrapper(
    model, tokenizer=engine.get_tokenizer(), input_mode="tokens", generate=False
)
learner = Learner(
    CorrectedGRPOLoss(actor, entropy_bonus=False),
    torch.optim.Adam(model.parameters(), lr=2e-3),
    minibatches=2,
)
advantage = GroupAdvantage(GROUP_SIZE)

rewards, turns = [], []
while batch is not None:
    conversations = batch["next", "done"].sum().item()
    rewards.append(batch["next", "reward"].sum().item() / conversations)
    turns.append(len(batch) / conversations)
    learner.train(advantage(batch), collector.policy_version)
    collector.update_policy_weights_()
    batch = next(batches, None)

print(", ".join(f"{reward:.2f}" for reward in rewards))

# %%
# It learns to look, and then to look once: two turns.

import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(rewards, marker=".")
left.set(xlabel="step", ylabel="reward", ylim=(0, 1.05))
right.plot(turns, marker=".")
right.axhline(2, color="gray", linewidth=0.8)
right.set(xlabel="step", ylabel="turns of a conversation")

# %%
# Real models know how to call, and need no grammar. The same program as an agent, with
# a client of OpenAI's protocol, is :doc:`plot_agent`; :doc:`/guides/multi_turn`
# compares the ways.

collector.shutdown()
scheme.shutdown()
engine.shutdown()
