"""CrewAI: an agent that is kicked off with the conversation so far."""

from __future__ import annotations

from typing import Any

from common import Job, serve, tool_of
from crewai import LLM, Agent
from crewai.tools import tool
from weather import Weather


def run(job: Job) -> Any:
    llm = LLM(
        model="openai/policy",
        base_url=job.base_url,
        api_key=job.key,
        stream=job.stream,
        **job.given(timeout="timeout", retries="max_retries"),
    )
    agent = Agent(
        role="Forecaster",
        goal="Know the weather",
        backstory="You know the weather of all cities.",
        llm=llm,
        tools=[] if job.structured else [tool(tool_of(job))],
    )
    messages: list[Any] = []
    for content in job.messages:
        messages.append({"role": "user", "content": content})
        said = agent.kickoff(
            messages, response_format=Weather if job.structured else None
        )
        messages.append({"role": "assistant", "content": said.raw})
    return said.pydantic.model_dump() if job.structured else said.raw


if __name__ == "__main__":
    serve(run)
