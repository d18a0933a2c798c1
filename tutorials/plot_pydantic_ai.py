"""
Training a pydantic-ai agent
============================

An agent of `pydantic-ai <https://ai.pydantic.dev>`_ learns to use its two tools.
Nothing in it is about training: :class:`~torchrl_sglang.GRPO` runs it many times, and
trains the model that it talks to. :doc:`/guides/agent_frameworks` does the same with
openai-agents, LangGraph, Claude Code and others.

It takes no GPU and no download.
"""

# %%
# An agent
# --------
#
# Its questions are such as ``3*4+5``, and its tools multiply and add. pydantic-ai tells
# the model of the tools, checks the calls that it writes, runs them, and asks again,
# until there is an answer.

from pydantic_ai import Agent


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(tools=[multiply, add])

# %%
# A function runs the agent on a task, with the model at an address that it is given. It
# returns the reward: 1 for the right answer, and 0 for any other, for calls that
# pydantic-ai refuses, and for a sixth turn. How the model came to its answer earns
# nothing.

from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


async def solve(task, *, base_url, api_key):
    """Run the agent on a task, and return the reward."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    model = OpenAIChatModel("policy", provider=provider)
    limits = UsageLimits(request_limit=5)
    try:
        result = await agent.run(task["query"], model=model, usage_limits=limits)
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return 0.0
    return float(result.output == task["answer"])


# %%
# The tasks are all questions of three digits. Some are held out for the evaluation.

import itertools
import random

generator = random.Random(0)
numbers = list(itertools.product(range(1, 10), repeat=3))
generator.shuffle(numbers)
tasks = [{"query": f"{a}*{b}+{c}", "answer": str(a * b + c)} for a, b, c in numbers]
HELD_OUT = 64

# %%
# A model that has seen tool calls
# --------------------------------
#
# Models from the hub have. This one has random weights, one token per character, and a
# chat template that writes calls as Python does.

from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer

tokenizer = make_tiny_tokenizer()
tokenizer.chat_template = r"""
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}
            {%- for call in message.tool_calls %}
                {%- set values = call.function.arguments %}
                {{- "[%s(a=%s, b=%s)]" % (call.function.name, values.a, values.b) }}
            {%- else %}
                {{- message.content }}
            {%- endfor %}
            {{- "<|im_end|>" }}
        {%- endgeneration %}
        {{- "\n" }}
    {%- else %}
        {{- message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}"""
model = make_tiny_model(tokenizer, initializer_range=0.05)

# %%
# It imitates a careless teacher, of whose six ways to an answer one is right.


def demonstrate(a, b, c):
    """Return a conversation of the teacher."""
    calls = generator.choice(
        [
            [(multiply, a, b), (add, a * b, c)],
            [(multiply, a, b)],
            [(add, b, c), (multiply, a, b + c)],
            [(add, a, b), (add, a + b, c)],
            [(add, b, c)],
            [],
        ]
    )
    messages = [{"role": "user", "content": f"{a}*{b}+{c}"}]
    answer = generator.randint(2, 90)
    for tool, x, y in calls:
        answer = tool(x, y)
        function = {"name": tool.__name__, "arguments": {"a": x, "b": y}}
        call = {"type": "function", "function": function}
        messages += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": str(answer)},
        ]
    return [*messages, {"role": "assistant", "content": str(answer)}]


demonstrations = tokenizer.apply_chat_template(
    [demonstrate(*each) for each in numbers[HELD_OUT:] for _ in range(3)],
    padding=True,
    return_dict=True,
    return_tensors="pt",
    return_assistant_tokens_mask=True,
    tokenizer_kwargs={"padding_side": "right"},
)
first = tokenizer.decode(demonstrations["input_ids"][0])
print(first.partition(tokenizer.pad_token)[0])

# %%
# A few hundred steps teach it the form of calls, and to copy numbers.

import torch

STEPS, BATCH_SIZE = 300, 32
torch.manual_seed(0)
torch.set_num_threads(1)  # The server needs the other core.
written = demonstrations["assistant_masks"].bool()
labels = demonstrations["input_ids"].masked_fill(~written, -100)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
for _ in range(STEPS):
    rows = torch.randint(len(labels), (BATCH_SIZE,))
    model(demonstrations["input_ids"][rows], labels=labels[rows]).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()

# %%
# Training
# --------
#
# ``GRPO`` starts a server and runs the agent eight times for each task, with a session
# of its own each time. Runs of the same task are compared, and after each step the
# server gets the new weights. ``"pythonic"`` is SGLang's name for the format of the
# calls.

import tempfile
from pathlib import Path

from torchrl_sglang import GRPO

folder = Path(tempfile.mkdtemp())
model.save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
run = GRPO(
    folder / "model",
    agent=solve,
    prompts=tasks[HELD_OUT:],
    eval_prompts=tasks[:HELD_OUT],
    eval_every=4,
    group_size=8,
    groups_per_batch=8,
    steps=12,
    lr=5e-4,
    generate_kwargs={"max_new_tokens": 32},
    engine={"device": "cpu"},
    gateway={"tool_call_parser": "pythonic"},
    show_samples=None,
    output=folder / "run",
)
run.train()

# %%
# The learning curve
# ------------------

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, label in {"batch/reward": "training", "eval/reward": "held out"}.items():
    found = [metrics for metrics in run.history if name in metrics]
    steps = [metrics["step"] for metrics in found]
    axes.plot(steps, [metrics[name] for metrics in found], marker=".", label=label)
axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.05))
axes.legend()

held_out = [each["eval/reward"] for each in run.history if "eval/reward" in each]
assert held_out[-1] > held_out[0] + 0.4, held_out

# %%
# The model has found out which call comes first, and that another one follows.
# ``torchrl-sglang view`` shows each run of the agent: what the model wrote, token by
# token, and what the tools returned.
#
# .. figure:: /images/viewer_agent.png
#    :alt: Two runs of the agent, turn by turn: the right one, and one that adds first.
#
#    Two of the eight runs of a task, coloured by log-prob.

print(f"torchrl-sglang view {run.folder}")
