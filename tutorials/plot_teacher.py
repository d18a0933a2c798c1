"""
Learning from a teacher, or from rewards
========================================

A reward is one number for a whole response; a teacher says at each token what it would
have written instead. On-policy distillation uses that: the student generates, an engine
scores each of its tokens with a larger model, and the loss is the divergence between
the two. This page trains the same student in both ways, on as many responses.

``make demo-distil`` is the same with SmolLM2-135M-Instruct, at equal time.
"""

# %%
# A teacher
# ---------
#
# It has the student's tokenizer. This one is a tiny model that has learned to write
# digits, from a few steps of cross entropy.

import math
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang import GRPO, AsyncSGLang, Distillation, Teacher
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.05)
tokenizer = AutoTokenizer.from_pretrained(path)
questions = [{"query": f"Number {n}, please."} for n in range(80)]


def prompt(question):
    """Return the text of a question, as the engine gets it."""
    message = {"role": "user", "content": question["query"]}
    return tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False
    )


teacher_model = AutoModelForCausalLM.from_pretrained(path)
optimizer = torch.optim.Adam(teacher_model.parameters(), lr=3e-3)
for _ in range(40):
    numbers = torch.randint(10**11, 10**12, (len(questions),)).tolist()
    pairs = zip(questions, numbers, strict=True)
    texts = [f"{prompt(question)}{number}" for question, number in pairs]
    tokens = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    labels = tokens.input_ids.clone()
    labels[:, :-12] = -100
    loss = teacher_model(**tokens, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"cross entropy: {loss.item():.2f} nats; of ten digits: {math.log(10):.2f}")
teacher_path = tempfile.mkdtemp()
teacher_model.save_pretrained(teacher_path)
tokenizer.save_pretrained(teacher_path)

# %%
# Two engines
# -----------
#
# The teacher's reads prompt and response as a prompt, and generates nothing.

engine = AsyncSGLang.from_pretrained(path, device="cpu")
teacher = AsyncSGLang.from_pretrained(teacher_path, device="cpu")


# %%
# What the runs share
# -------------------
#
# Both are measured by the share of digits in the responses that the student samples.


def digits(conversation, task):
    """Reward: the share of characters that are digits."""
    text = conversation.response
    return sum(map(str.isdigit, text)) / max(len(text), 4)


def train(**options):
    """Train a fresh student; return the run."""
    run = GRPO(
        path,
        prompts=questions,
        engine=engine,
        generate_kwargs={"max_new_tokens": 12},
        group_size=8,
        groups_per_batch=4,
        steps=12,
        lr=3e-3,
        output=tempfile.mkdtemp(),
        logger=None,
        recorder=False,
        show_samples=None,
        progress=False,
        **options,
    )
    run.train()
    return run


# %%
# From rewards, and from the teacher
# ----------------------------------
#
# The distilled student gets the reward with weight 0: it is measured, not trained on.

from_rewards = train(rewards={"digits": (digits, 1.0)})
from_teacher = train(
    rewards={"digits": (digits, 0.0)}, teacher=teacher, distillation={"k": 16}
)

# %%
# Curves
# ------

import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, run in (("GRPO", from_rewards), ("distillation", from_teacher)):
    trained = [step for step in run.history if step["step"]]
    shares = [step["reward/digits"] for step in trained]
    left.plot([step["step"] for step in trained], shares, marker=".", label=name)
    print(f"{name}: {shares[0]:.2f} -> {shares[-1]:.2f}")
left.set(xlabel="step", ylabel="share of digits", ylim=(0, 1.02))
left.legend()
divergences = [step["train/distillation"] for step in trained]
right.plot([step["step"] for step in trained], divergences, marker=".", color="C1")
right.set(xlabel="step", ylabel="divergence, nats for each token")
right.set_ylim(0)

# %%
# How much does ``k`` miss?
# -------------------------
#
# The teacher sends its ``k`` likeliest tokens, and all others count as one outcome.
# ``train/distillation_missed`` is its probability outside of them: with more than a few
# percent, give a larger ``k``.

print(f"missed: {trained[0]['train/distillation_missed']:.4f} of the probability")

# %%
# When to take which
# ------------------
#
# * **A teacher** says something about each token of each response, also of wrong ones:
#   a student that is never right learns from it, and a few hundred responses are much.
#   It needs a better model with the same tokenizer, and ends as good as that model.
# * **Rewards** need a program that knows a right answer, and a student that is right
#   now and then: a group without a difference teaches nothing. They have no ceiling.
# * **Both**: first the teacher, then rewards from where it ends; or at once, with
#   ``distillation={"weight": ...}`` as the balance.
# * **Recorded rows** of a better model, without its log-probs: :class:`.SFTLoss`
#   (:doc:`/guides/supervised`). The student then learns what to do in the teacher's
#   places, and not in its own.
#
# :doc:`/guides/teacher` has divergences and estimators. In a loop of your own,
# ``Teacher`` adds its columns to any batch with tokens:

from tensordict import TensorDict
from torchrl.modules.llm import Text

from torchrl_sglang import SGLangWrapper

policy = SGLangWrapper(engine, input_mode="text", generate_kwargs={"max_new_tokens": 4})
text = Text(prompt=[prompt(questions[0])], batch_size=(1,))
scored = Teacher(teacher, Distillation(k=4))(
    policy(TensorDict(text=text, batch_size=1))
)
print(tokenizer.convert_ids_to_tokens(scored[0]["teacher", "top_ids"][-1].tolist()))

engine.shutdown()
teacher.shutdown()
