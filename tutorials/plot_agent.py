"""
Training an agent with two tools
================================

An agent is a program that talks to a model through an API: it sends a conversation,
runs the tools that the model calls, and sends the results.
:class:`~torchrl_sglang.Gateway` lets such a program train the model as it is: it serves
OpenAI's protocol, and records the tokens, log-probabilities and weight versions of
everything that the model writes.

Here an agent has two tools, ``add`` and ``mul``, and a model with random weights learns
which one a question needs. It takes no GPU and no download.
"""

# %%
# A model and an engine
# ---------------------
#
# Models from the hub bring a chat template that writes tool calls. This one gets a
# short one, with the calls of Qwen's models. The grammar backend is for the format of
# the calls, which a model with random weights does not know.

import tempfile

from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.testing.tiny_model import save_tiny_model

path = save_tiny_model(tempfile.mkdtemp(), initializer_range=0.3)
model = AutoModelForCausalLM.from_pretrained(path)
engine = AsyncSGLang.from_pretrained(path, device="cpu", grammar_backend="xgrammar")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.tool_calls -%}
{%- for call in message.tool_calls -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- else -%}
{{ message.content }}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

# %%
# An agent
# --------
#
# The agent is a plain function with OpenAI's client, and nothing in it is about
# training. It asks, runs the tool that the model calls, sends the result, and asks for
# the answer. A base URL and a key select its session of the gateway. It returns the
# reward: 1 if the model has called the right tool, and 0 otherwise.
#
# ``regex`` is a sampling parameter of SGLang. It forces the format of the call and
# leaves the choice of the tool to the model.

import json

import openai

TOOLS = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS}
DECLARATIONS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in TOOLS
]


async def agent(client, task, *, base_url, api_key):
    """Solve a task such as ``(3, "*", 4)`` and return the reward."""
    client = client.with_options(base_url=base_url, api_key=api_key)
    a, sign, b = task
    form = (
        r'<tool_call>\n\{"name": "(add|mul)", "arguments": '
        rf'\{{"a": {a}, "b": {b}\}}\}}\n</tool_call>'
    )
    messages = [{"role": "user", "content": f"{a} {sign} {b}"}]
    response = await client.chat.completions.create(
        model="policy",
        messages=messages,
        tools=DECLARATIONS,
        extra_body={"regex": form},
    )
    message = response.choices[0].message
    (call,) = message.tool_calls
    result = TOOLS[call.function.name](**json.loads(call.function.arguments))
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": str(result)},
    ]
    await client.chat.completions.create(
        model="policy",
        messages=messages,
        tools=DECLARATIONS,
        extra_body={"regex": "[0-9]{1,2}"},
    )
    return float(call.function.name == {"+": "add", "*": "mul"}[sign])


# %%
# A gateway
# ---------
#
# ``tool_call_parser`` is SGLang's name of the format, so that the client gets calls and
# not their text.

from torchrl_sglang import Gateway

gateway = Gateway(engine, chat_template=CHAT_TEMPLATE, tool_call_parser="qwen25")
gateway.start()

# %%
# ``run_agents`` calls the agent for each task, ``group_size`` times, each time with a
# session of its own.

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial


async def run_agents(tasks, group_size):
    """Return the sessions of agents that were run on tasks."""
    # One client for all agents: making one takes longer than a turn of this model.
    async with openai.AsyncOpenAI(api_key="of each session") as client:
        groups = await gateway.run_agents(
            partial(agent, client), tasks, group_size=group_size
        )
    return [session for group in groups for session in group]


def sample(tasks, group_size):
    """Return the same, from a thread: a notebook's own has an event loop already."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, run_agents(tasks, group_size)).result()


(session,) = sample([(3, "*", 4)], group_size=1)
(trajectory,) = session.trajectories()
for message in trajectory.messages:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    print(message["role"], "|", message["content"], *calls)

# %%
# The second turn begins with the tokens of the first one, so that one row holds both.
# Its mask covers what the model wrote.

row = gateway.to_tensordict([session])[0]
mask = row["masks"].all_assistant_mask
print(engine.get_tokenizer().decode(row["tokens"].full[mask]))
gateway.drop(session)

# %%
# Training
# --------
#
# The advantage of a session is its reward beside the others' of the batch. Groups of
# one task each, as in GRPO, would compare a model that always calls the same tool with
# itself, and it would never leave that. A scheme sends the new weights to the engine
# after each step.

import torch
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import CorrectedGRPOLoss, SGLangWeightSyncScheme

GROUP_SIZE, TASKS, STEPS = 8, 6, 20

scheme = SGLangWeightSyncScheme(engine, model)
sender = scheme.create_sender()
actor = TransformersWrapper(
    model, tokenizer=engine.get_tokenizer(), input_mode="tokens", generate=False
)
loss = CorrectedGRPOLoss(actor, entropy_bonus=False, masking_strategy="rlhf")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(0)


def make_tasks():
    """Return random tasks, half of them sums."""
    digits = torch.randint(1, 10, (TASKS, 2), generator=generator).tolist()
    return [(a, "+*"[i % 2], b) for i, (a, b) in enumerate(digits)]


rewards = []
for _ in range(STEPS):
    sessions = sample(make_tasks(), GROUP_SIZE)
    rewards.append(sum(session.reward for session in sessions) / len(sessions))
    batch = gateway.to_tensordict(sessions)
    reward = batch["next", "reward"]
    batch["advantage"] = (reward - reward.mean()) / reward.std().clamp_min(1e-6)
    loss(batch).loss_objective.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    sender.update_weights()
    for session in sessions:
        gateway.drop(session)

print(", ".join(f"{reward:.2f}" for reward in rewards))

# %%
# Choosing at random gives 0.5. The model has found out what the signs mean.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(rewards, marker=".")
axes.set(xlabel="step", ylabel="share of right tools", ylim=(0, 1.05))
axes.xaxis.get_major_locator().set_params(integer=True)

# %%
# The agent could as well be a program of yours in another process: it needs a base URL
# and a key. :doc:`/agents` says how branches, retries and sub-agents become rows. In
# :doc:`plot_pydantic_ai`, an agent framework's agent is trained in one call.
#
# The server ends with the engine:

gateway.shutdown()
sender.shutdown()
engine.shutdown()
