"""
Log-probs and scoring
=====================

A policy-gradient loss divides the trainer's probability of a token by the engine's.
This page compares the two on a running server: where they agree, how precision drives
them apart, and what temperature does. It takes no GPU and no download.
"""

# %%
# A model, an engine, and some responses
# --------------------------------------

import tempfile

import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import Text
from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.2)
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu")
policy = SGLangWrapper(
    engine,
    input_mode="text",
    generate_kwargs={"max_new_tokens": 48, "ignore_eos": True, "temperature": 2.0},
)
texts = [f"{n} and {n}:" for n in range(32)]
prompts = TensorDict(text=Text(prompt=texts, batch_size=32), batch_size=32)
result = policy(prompts.clone())

# %%
# Every response token has a log-prob. Those of the prompt were not asked for and are
# NaN: unknown, which losses skip. They are never 0, which would be a probability of 1.

(row, *_) = result["log_probs"].get("full", as_list=True)
print(f"{row.isnan().sum()} unknown, {row.isfinite().sum()} known")

# %%
# Does the trainer agree?
# -----------------------
#
# The tokens above were sampled with temperature 2. Their log-probs are the model's own
# all the same, ``log_softmax(logits)``, because that is what a loss computes. The
# trainer's, from the same weights in float32, differ by rounding.


def trainer_log_probs(model):
    """Return the log-probs of all response tokens, computed by a Hugging Face model."""
    found = []
    for full, response in zip(
        result["tokens"].get("full", as_list=True),
        result["tokens"].get("response", as_list=True),
        strict=True,
    ):
        with torch.no_grad():
            logits = model(full[None, :-1]).logits[0].float()
        scores = logits.log_softmax(-1).gather(-1, full[1:, None])[:, 0]
        found.append(scores[-len(response) :])
    return torch.cat(found)


engine_says = torch.cat(result["log_probs"].get("response", as_list=True))
trainer_says = trainer_log_probs(model)
print(f"float32: largest gap {(engine_says - trainer_says).abs().max():.1e} nats")

# %%
# On GPUs, models are kept in bfloat16, which has 8 bits of mantissa. A trainer in
# bfloat16 disagrees with the float32 server visibly, with the very same weights:

import copy

bfloat16_says = trainer_log_probs(copy.deepcopy(model).to(torch.bfloat16))
gap = (engine_says - bfloat16_says).abs()
print(f"bfloat16: mean gap {gap.mean():.3f}, largest {gap.max():.3f} nats")

# %%
# On the left, each token once for each trainer. On the right, the importance ratio that
# a loss begins with: 1 if engine and trainer agree. PPO's clipping begins at 0.8
# and 1.2. This is why the gap is worth a look in every run, and why
# :class:`~torchrl_sglang.OffPolicyCorrection` exists.

import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.scatter(engine_says, bfloat16_says, s=6, label="bfloat16")
left.scatter(engine_says, trainer_says, s=3, label="float32")
left.set(xlabel="engine's log-prob", ylabel="trainer's log-prob")
left.legend()
ratios = (bfloat16_says - engine_says).exp()
right.hist(ratios, bins=60, log=True)
right.axvspan(0.8, 1.2, alpha=0.15)
right.set(xlabel="first ratio, bfloat16", ylabel="tokens")
right.legend(["clip range", "tokens"])

# %%
# Whose log-probs?
# ----------------
#
# A penalty, a bias or a grammar changes the logits before a token is drawn. The
# trained model knows nothing of it, so ``logprobs_mode="model"``, the default, still
# gives the model's own log-probs. ``"sampling"`` gives those of the distribution that
# the tokens were drawn from, which a loss that models the penalty would need.

penalized = {"max_new_tokens": 48, "ignore_eos": True, "frequency_penalty": 1.0}
for mode in ("model", "sampling"):
    version = policy.get_new_version(generate_kwargs=penalized, logprobs_mode=mode)
    result = version(prompts.clone())
    engine_says = torch.cat(result["log_probs"].get("response", as_list=True))
    gap = (engine_says - trainer_log_probs(model)).abs().max()
    print(f"{mode}: largest gap to the model {gap:.1e} nats")

# %%
# Scoring
# -------
#
# ``generate=False`` makes the same policy score tokens that it is given, by one pass
# through the server. The reference model of a KL penalty can be such an engine.

scorer = policy.get_new_version(generate=False, input_mode="tokens")
scores = scorer(result.select("tokens"))["log_probs"].get("full", as_list=True)
lengths = [len(row) for row in result["tokens"].get("response", as_list=True)]
scores = torch.cat([row[-length:] for row, length in zip(scores, lengths, strict=True)])
gap = (scores - trainer_log_probs(model)).abs().max()
print(f"largest gap of scores: {gap:.1e}")

# %%
# :doc:`/concepts/log_probs` has the definition, and everything that is NaN.

engine.shutdown()
