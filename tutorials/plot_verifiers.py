"""
Training an agent in a sandbox
==============================

`verifiers <https://github.com/PrimeIntellect-ai/verifiers>`_ has environments for
agents: a taskset with rewards, a harness, which is the agent's program, and a runtime,
the sandbox that both share. ``VerifiersAgent`` trains a model in any of them, such as
in those of Harbor and OpenEnv.

Here the sandbox has a file, and a model with random weights learns which command
answers a question about it. It takes no GPU.
"""

# %%
# A Python of its own
# -------------------
#
# verifiers needs other versions of packages than SGLang and this package, so that it
# runs in an environment of its own, which nothing else has to fit.

import os
import subprocess
import tempfile
import venv
from pathlib import Path

folder = Path(tempfile.mkdtemp())
environment = Path(os.environ.get("VERIFIERS_ENVIRONMENT", folder / "verifiers"))
if not environment.exists():
    venv.create(environment, with_pip=True)
    pip = [environment / "bin/pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "verifiers==0.4.0"], check=True)

# %%
# Tasks
# -----
#
# A taskset writes a file into each sandbox, asks for its lines, words or bytes, and
# compares the answer that the agent leaves in the sandbox.

packages = folder / "packages"
packages.mkdir()
(packages / "counting.py").write_text("""
import random

import verifiers.v1 as vf

__all__ = ["Counting"]


class Question(vf.TaskData):
    text: str
    answer: int


class CountingTask(vf.Task[Question, vf.State, vf.TaskConfig]):
    async def setup(self, runtime):
        await runtime.write("notes", self.data.text.encode())

    @vf.reward
    async def right(self, runtime):
        answer = await runtime.read("answer")
        return float(int(answer) == self.data.answer)


class Counting(vf.Taskset[CountingTask, vf.TasksetConfig]):
    def load(self):
        generator = random.Random(0)
        for number in range(48):
            lines = generator.randint(3, 9)
            text = "one or two\\n" * lines
            kind = ("lines", "words", "bytes")[number % 3]
            answer = {"lines": lines, "words": 3 * lines, "bytes": len(text)}[kind]
            data = Question(prompt=f"How many {kind}?", text=text, answer=answer)
            yield CountingTask(data, self.config.task)
""")

# %%
# An agent
# --------
#
# A harness asks the model for a command, and runs it in the sandbox. Nothing in it is
# about training. ``regex`` is a sampling parameter of SGLang: it holds a model with
# random weights to commands, and leaves the choice to it.

(packages / "shell.py").write_text("""
import aiohttp
import verifiers.v1 as vf

__all__ = ["Shell"]


class Shell(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__
    ):
        request = {
            "model": ctx.model,
            "messages": [{"role": "user", "content": data.prompt}],
            "regex": "wc -[lwc] <notes >answer",
        }
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            url = f"{endpoint}/chat/completions"
            async with client.post(url, json=request, raise_for_status=True) as reply:
                (choice,) = (await reply.json())["choices"]
        command = choice["message"]["content"]
        return await runtime.run(["sh", "-c", command], {})
""")

# %%
# ``runtime="docker"`` or ``"apptainer"`` would run the commands in a container, with an
# image that the taskset names. ``"subprocess"``, for a machine without them, is a new
# folder for each run: it keeps nothing from a command that means harm.

from torchrl_sglang.gateway.adapters.verifiers_agent import VerifiersAgent

agent = VerifiersAgent(
    "counting",
    harness="shell",
    runtime="subprocess",
    python=environment / "bin/python",
    environment={"PYTHONPATH": str(packages)},
)
tasks = agent.prompts()
print(len(tasks), "tasks, such as", tasks[0])

# %%
# Training
# --------
#
# Each run of the agent has a session of the gateway, which records the tokens of the
# model and their log-probs. The rewards of verifiers come back, and its metrics and
# named rewards are in the logs as ``metrics/NAME`` and ``metrics/reward/NAME``.
#
# A model with random weights gives nearly always the same command to a question. So its
# answers are compared with those to all questions of a batch: those to the same one, as
# by default, would not differ.

from torchrl_sglang import GRPO
from torchrl_sglang.testing.tiny_model import save_tiny_model


def compare(returns):
    """Return advantages among all answers of a batch."""
    return (returns - returns.mean()) / (returns.std() + 1e-6)


path = save_tiny_model(folder / "model", initializer_range=0.3)
run = GRPO(
    path,
    agent=agent,
    prompts=tasks,
    group_size=4,
    groups_per_batch=12,
    steps=14,
    lr=2e-3,
    advantage=compare,
    generate_kwargs={"max_new_tokens": 32},
    engine={"device": "cpu", "grammar_backend": "xgrammar"},
    show_samples=None,
    output=folder / "run",
)
run.train()
agent.close()  # The process of verifiers ends.

# %%
# The learning curve
# ------------------
#
# Choosing at random gives a third.

import matplotlib.pyplot as plt

rewards = [step["metrics/right"] for step in run.history if "metrics/right" in step]
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(range(1, len(rewards) + 1), rewards, marker=".")
axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.05))
axes.xaxis.get_major_locator().set_params(integer=True)

assert sum(rewards[-3:]) / 3 > 0.8, rewards

# %%
# With a GPU, ``VerifiersAgent("harbor", options={"dataset": "terminal-bench@2.0"},
# harness="mini_swe_agent", runtime="docker", python=...)`` takes the place of the agent
# above. :doc:`/guides/agent_frameworks` says what comes back of environments with
# several agents, and of rubrics that compare the attempts at a task.
