"""
First rollout and weight update
===============================

A reinforcement-learning loop around a language model has two ends: an engine that
generates, and a trainer that changes weights. This page joins them: SGLang generates,
a TorchRL policy turns its answers into TensorDicts, and after a training step the
engine receives the new weights.

It takes no GPU and no download: the model is tiny and its weights are random, so what
it says is noise. The server, the tokens and the log-probabilities are real.
"""

# %%
# A model
# -------
#
# :func:`~torchrl_sglang.testing.tiny_model.save_tiny_model` writes a two-layer Qwen2
# model and its tokenizer as Hugging Face files. The trainer loads them with
# ``transformers``; with a model from the hub, the rest of this page stays the same.

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp())
model = AutoModelForCausalLM.from_pretrained(path)

# %%
# An engine
# ---------
#
# ``from_pretrained`` starts an SGLang server and waits until it is ready. The engine
# owns the server, which ends with it.

from torchrl_sglang import AsyncSGLang

engine = AsyncSGLang.from_pretrained(path, device="cpu")
print(engine)

# %%
# A policy
# --------
#
# In history mode the policy takes conversations. The chat template and the tokenizer
# are applied here, so that the recorded tokens are those that the model saw.

from torchrl_sglang import SGLangWrapper

policy = SGLangWrapper(
    engine, input_mode="history", generate_kwargs={"max_new_tokens": 16}
)

# %%
# A rollout
# ---------

from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

chats = [[{"role": "user", "content": "Hi"}]]
prompt = ChatHistory(prompt=History.from_chats(chats))
result = policy(TensorDict(history=prompt, batch_size=(1,)))

print(result["text"].prompt[0])
print(result["text"].response[0])

# %%
# Tokens and log-probabilities are ragged, one tensor for each prompt.

(response,) = result["tokens"].get("response", as_list=True)
(log_probs,) = result["log_probs"].get("response", as_list=True)
print(response)
print(log_probs)

# %%
# Does the trainer agree?
# -----------------------
#
# An importance ratio compares the trainer's log-probabilities with the engine's. With
# the same weights in float32 there is nothing but rounding between them.

import torch

(tokens,) = result["tokens"].get("full", as_list=True)


def trainer_log_probs() -> torch.Tensor:
    """Return the trained model's log-probability of each response token."""
    with torch.no_grad():
        logits = model(tokens[None, :-1]).logits[0]
    scores = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return scores[-len(response) :]


print(f"largest difference: {(trainer_log_probs() - log_probs).abs().max():.1e}")

# %%
# A weight update
# ---------------
#
# A scheme has the engine and the model that is trained, and its sender is made once.
# ``update_weights`` sends the model's weights as they are; the first one opens a group
# with the server.

from torchrl_sglang import SGLangWeightSyncScheme

scheme = SGLangWeightSyncScheme(engine, model)
sender = scheme.create_sender()

# %%
# One step of an optimizer stands for training: it makes the response less likely.

optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loss = -model(input_ids=tokens[None], labels=tokens[None]).loss
loss.backward()
optimizer.step()

report = sender.update_weights()
print(f"{report.num_tensors} tensors, {report.num_bytes:,} bytes")
print(f"the weights are version {engine.weight_version} now")

# %%
# The engine has the new weights
# ------------------------------
#
# With ``generate=False`` the policy scores what it is given. The same tokens have other
# log-probabilities than before, and they are the trainer's.

scorer = policy.get_new_version(generate=False, input_mode="tokens")
(scores,) = scorer(result.select("tokens"))["log_probs"].get("full", as_list=True)
scores = scores[-len(response) :]

print(f"change by the update: {(scores - log_probs).abs().max():.1e}")
print(f"largest difference: {(trainer_log_probs() - scores).abs().max():.1e}")

# %%
# In a training loop
# ------------------
#
# There the collector calls the policy, and its ``update_policy_weights_`` sends the
# weights of the scheme's model.

from torchrl.envs import InitTracker
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import SGLangLLMCollector

questions = [{"query": "Hi"}, {"query": "2 + 2 ="}]
env = ChatEnv.from_dataloader(
    torch.utils.data.DataLoader(questions, batch_size=2),
    batch_size=(2,),
    tokenizer=engine.get_tokenizer(),
)
env.append_transform(InitTracker())
collector = SGLangLLMCollector(
    env,
    policy=policy,
    dialog_turns_per_batch=2,
    total_dialog_turns=4,
    weight_sync_schemes={"policy": scheme},
)

for batch in collector:
    collector.update_policy_weights_()
    print(f"{len(batch)} answers; the weights are version {engine.weight_version} now")

# %%
# ``examples/grpo_tiny`` puts a loss between the two lines and trains a model to add.
#
# The server ends with the engine:

collector.shutdown()
sender.shutdown()
engine.shutdown()
