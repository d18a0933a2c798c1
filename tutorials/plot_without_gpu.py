"""
Debugging without a GPU
=======================

Most faults of a training run are not about speed: a wrong template, a mask that is off
by one, a weight that was never sent, an update that fails in the middle. All of them
can be found on a laptop, against the real engine. This page shows the tools.
"""

# %%
# A model of your architecture, tiny
# ----------------------------------
#
# A server checks names and shapes, and a tiny model has the names of a large one. For
# another architecture, make its configuration small in the same way:
# ``AutoConfig.from_pretrained(name)``, fewer layers, a narrower width.

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp())
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu")

# %%
# What can this server do?
# ------------------------

able = engine.capabilities
print(f"SGLang {able.version}, {able.max_context} tokens, {able.dtype}")
print(f"LoRA: {able.has_lora}; grammar: {able.has_grammar}; sleep: {able.can_sleep}")

# %%
# Mistakes say what is wrong
# --------------------------
#
# A parameter is mapped or refused, never dropped. The servers see none of these:

import textwrap

from torchrl_sglang.errors import SGLangError


def attempt(action, *args, **kwargs):
    """Call something and print its error."""
    try:
        action(*args, **kwargs)
    except SGLangError as error:
        print(textwrap.fill(f"{type(error).__name__}: {error}", 88), end="\n\n")


attempt(engine.generate, ["Hi"], temprature=0.7)
attempt(engine.generate, ["Hi"], seed=3)
attempt(engine.generate, input_ids=[[5, 100_000]])
attempt(engine.load_adapter, "style", path="adapters/style")

# %%
# Break it on purpose
# -------------------
#
# ``FaultyProxy`` stands between engine and server, forwards everything, and breaks the
# requests that it is told to break: it refuses, fails, stalls, or cuts a connection
# before or after the server has worked. Here two requests lose their connection. The
# engine sends them again, and the caller notices nothing:

from torchrl_sglang.testing.faults import FaultyProxy

proxy = FaultyProxy(engine.server_url)
through = AsyncSGLang.connect(proxy.url)
proxy.inject("/generate", "cut", times=2)
answers = through.generate(["Hi", "Ho", "Hey"], max_new_tokens=4)
print(f"{len(answers)} answers, {through.stats().retries} sent again")

# %%
# An update that fails before the first byte
# ------------------------------------------
#
# The server refuses the weights. It still has the old ones, and generates:

scheme = SGLangWeightSyncScheme(through, model, control_timeout=5.0)
sender = scheme.create_sender()
sender.update_weights()
proxy.inject("/pause_generation", "refuse")
attempt(sender.update_weights)
print(f"still version {through.weight_version}:", end=" ")
print(len(through.generate(["Hi"], max_new_tokens=4)), "answer")

# %%
# An update that fails in the middle
# ----------------------------------
#
# Several buckets are needed, and the answer to the second one is lost. The server may
# hold half of the new weights, so generating is refused until an update succeeds:

small = SGLangWeightSyncScheme(through, model, bucket_bytes=200_000, send_timeout=5.0)
careful = small.create_sender()
proxy.inject("/update_weights_from_distributed", "lose", first=2)
attempt(careful.update_weights)
attempt(through.generate, ["Hi"])

# %%
# The next update heals the servers. ``recover()`` would bring back the checkpoint that
# they were started with.

report = careful.update_weights()
print(f"version {report.version}:", end=" ")
print(len(through.generate(["Hi"], max_new_tokens=4)), "answer")

# %%
# Do the servers have my weights?
# -------------------------------
#
# ``verify=True`` compares values and log-probs after an update. It costs a few prompts,
# so use it once at the start of a run, and when something is odd.

report = careful.update_weights(verify=True)
print({phase: round(seconds, 2) for phase, seconds in report.phase_seconds.items()})

# %%
# What is going on?
# -----------------
#
# ``torchrl-sglang doctor`` checks a machine, ``RL_LOGGING_LEVEL=DEBUG`` shows what this
# package does, and ``stats()`` what the servers do:

(server,) = through.stats().servers
print(server)

# %%
# :doc:`/guides/troubleshooting` goes on from here.

sender.shutdown()
careful.shutdown()
through.shutdown()
proxy.close()
engine.shutdown()
