"""smolagents: its agents that call tools and that write code."""

from __future__ import annotations

import sys
from typing import Any

from common import Job, serve
from smolagents import CodeAgent, OpenAIServerModel, Tool, ToolCallingAgent


class GetWeather(Tool):
    name = "get_weather"
    description = "Returns the weather of a city."
    inputs = {"city": {"type": "string", "description": "name of the city"}}  # noqa: RUF012
    output_type = "string"

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def forward(self, city: str) -> str:
        return self._job.get_weather(city)


def run(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    model = OpenAIServerModel(
        "policy", api_base=job.base_url, api_key=job.key, client_kwargs=given
    )
    kind = CodeAgent if sys.argv[1:] == ["code"] else ToolCallingAgent
    agent = kind(tools=[GetWeather(job)], model=model, stream_outputs=job.stream)
    for content in job.messages:
        if job.stream:
            *_, last = agent.run(content, reset=False, stream=True)
            answer = last.output
        else:
            answer = agent.run(content, reset=False)
    return answer


if __name__ == "__main__":
    serve(run)
