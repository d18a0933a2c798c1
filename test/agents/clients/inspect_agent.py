"""A task of Inspect with a tool and a scorer, as an agent."""

from __future__ import annotations

import tasks
from common import Job, serve
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

from torchrl_sglang.gateway.adapters.inspect_task import InspectAgent


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Returns the weather of a city.

        Args:
            city: name of the city.
        """
        return tasks.get_weather(city)

    return execute


AGENT = InspectAgent(
    Task(
        dataset=[Sample(input=q, target=a) for q, a in tasks.QUESTIONS.items()],
        solver=[use_tools(get_weather()), generate()],
        scorer=includes(),
    )
)


async def run(job: Job) -> float:
    task = AGENT.prompts()[list(tasks.QUESTIONS).index(job.messages[0])]
    return await AGENT(task, base_url=job.base_url, api_key=job.key)


if __name__ == "__main__":
    serve(run)
