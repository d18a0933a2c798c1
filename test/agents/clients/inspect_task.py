"""Inspect: a task whose solver is its ReAct agent."""

from __future__ import annotations

import sys
from typing import Any

from common import Job, serve
from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.tool import Tool, tool


class SampleError(Exception):
    """The error of a sample, as its log tells it."""


def tool_of(job: Job) -> Tool:
    @tool
    def get_weather() -> Tool:
        async def execute(city: str) -> str:
            """Returns the weather of a city.

            Args:
                city: name of the city.
            """
            return job.get_weather(city)

        return execute

    return get_weather()


def run(job: Job) -> Any:
    model = get_model(
        sys.argv[1],
        base_url=job.url if sys.argv[1].startswith("anthropic") else job.base_url,
        api_key=job.key,
        memoize=False,
    )
    task = Task(
        dataset=[Sample(input=job.messages[0])], solver=react(tools=[tool_of(job)])
    )
    (log,) = eval(
        task,
        model=model,
        log_dir=job.folder,
        display="none",
        **job.given(timeout="attempt_timeout", retries="max_retries"),
    )
    if log.error or log.samples is None:
        raise SampleError(log.error and log.error.message)
    (sample,) = log.samples
    if sample.error:
        raise SampleError(sample.error.message)
    if sample.limit:
        raise SampleError(sample.limit.type)
    if sample.output.stop_reason == "model_length":
        raise SampleError(sample.output.stop_reason)
    return sample.output.completion


if __name__ == "__main__":
    serve(run)
