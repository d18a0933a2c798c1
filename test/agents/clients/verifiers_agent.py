"""An environment of verifiers with a tool, as an agent."""

from __future__ import annotations

from typing import Any

import tasks
import verifiers as vf
from common import Job, serve
from datasets import Dataset

from torchrl_sglang.gateway.adapters.verifiers_env import VerifiersAgent


def says_it(completion: Any, answer: str) -> float:
    return float(answer in str(completion[-1].content))


def make() -> VerifiersAgent:
    rows = [{"question": q, "answer": a} for q, a in tasks.QUESTIONS.items()]
    environment = vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[tasks.get_weather],
        rubric=vf.Rubric(funcs=[says_it]),
        max_turns=5,
    )
    return VerifiersAgent(environment, sampling_args={"max_tokens": 100})


AGENT = make()


async def run(job: Job) -> float:
    task = AGENT.prompts()[list(tasks.QUESTIONS).index(job.messages[0])]
    return await AGENT(task, base_url=job.base_url, api_key=job.key)


if __name__ == "__main__":
    serve(run)
