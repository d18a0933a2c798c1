"""
A weight update by hand
=======================

What a collector's ``update_policy_weights_()`` does, call by call: what an update sends
and how long each phase takes, and what becomes of a response that is being generated
while the weights change under it. It takes no GPU and no download.
"""

# %%
# A scheme and its sender
# -----------------------
#
# A scheme holds the options of updates, and its sender sends. The first update connects
# to the server.

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.1)
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu")

scheme = SGLangWeightSyncScheme(engine, model, bucket_bytes=100_000)
sender = scheme.create_sender()
report = sender.update_weights()
print(f"version {report.version}: {report.num_tensors} tensors, {report.num_bytes:,} B")
print(f"in {report.num_buckets} buckets by {report.transport}: {report.reason}")

# %%
# Where the time goes
# -------------------
#
# The first update forms a group with the server, and the second one finds it there. Of
# the rest, sending is the longest part, here as on a GPU.

import matplotlib.pyplot as plt

reports = {"first": report, "second": sender.update_weights()}
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
for row, (name, each) in enumerate(reports.items()):
    start = 0.0
    for phase, seconds in each.phase_seconds.items():
        color = f"C{list(report.phase_seconds).index(phase)}"
        label = phase if row == 0 else None
        axes.barh(name, seconds, left=start, color=color, label=label)
        start += seconds
axes.set(xlabel="seconds")
axes.invert_yaxis()
figure.legend(ncols=4, fontsize="small", loc="outside upper center")

# %%
# A wrong model is found before a byte is sent
# --------------------------------------------
#
# Names, shapes and types are compared with what the server serves.

from torchrl_sglang.errors import WeightMismatchError

weights = dict(model.named_parameters())
weights["model.norm.weights"] = weights.pop("model.norm.weight")
try:
    sender.update_weights(weights)
except WeightMismatchError as error:
    print(error)
print(f"The servers still hold version {engine.weight_version}.")

# %%
# A response that lives through updates
# -------------------------------------
#
# While the server writes 300 tokens, two updates change the weights. A thread generates
# and this one updates. A copy of each version is kept, to score the tokens afterwards.

import copy
import threading
import time

import torch

versions = {engine.weight_version: copy.deepcopy(model)}
answers = []


def generate():
    """Generate one long response."""
    options = {"max_new_tokens": 300, "ignore_eos": True}
    answers.extend(
        engine.generate(input_ids=[[5, 6, 7]], return_logprobs=True, **options)
    )


thread = threading.Thread(target=generate)
thread.start()
while thread.is_alive() and len(versions) < 3:
    time.sleep(0.25)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    versions[sender.update_weights().version] = copy.deepcopy(model)
thread.join()
(answer,) = answers
for span in answer.versions:
    print(f"tokens {span.start} to {span.end} are of version {span.version}")

# %%
# Nothing was lost, and each token knows its version. Its log-prob is exactly that of
# this version, because the new weights have computed the prefix again. Against another
# version's weights the same log-probs are off:

full = torch.tensor([5, 6, 7, *answer.token_ids])
reported = torch.tensor(answer.log_probs)


def score(model):
    """Return a model's log-prob of each response token."""
    with torch.no_grad():
        logits = model(full[None, :-1]).logits[0]
    return logits.log_softmax(-1).gather(-1, full[1:, None])[2:, 0]


gaps = {version: (score(each) - reported).abs() for version, each in versions.items()}
own = torch.cat([gaps[span.version][span.start : span.end] for span in answer.versions])
print(f"largest gap of a token to its own version: {own.max():.1e}")

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for version, gap in gaps.items():
    axes.semilogy(gap.clamp_min(1e-8), ".", markersize=3, label=f"version {version}")
for span in answer.versions[1:]:
    axes.axvline(span.start, color="gray", linewidth=0.8)
axes.set(xlabel="token", ylabel="|reported - computed|")
axes.legend(title="computed with")

# %%
# With ``pause_mode="in_place"`` the server would have gone on with the old keys and
# values: nothing is computed again, and the log-probs after the first line belong to no
# version. :doc:`/concepts/weight_update` has the sequence, and
# :doc:`/concepts/versions` the modes.

sender.shutdown()
engine.shutdown()
