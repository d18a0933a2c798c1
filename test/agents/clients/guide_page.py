"""A framework as the guide uses it: the example of one section of its page."""

from __future__ import annotations

import sys
from typing import Any

from common import Job, serve, tool_of
from page_examples import PAGE, read_example
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def reward_of(task: dict[str, str], output: Any) -> float:
    """Returns 1 for an answer with the degrees of Rome."""
    return float("21" in str(output))


async def run(job: Job) -> Any:
    names: dict[str, Any] = {
        "Weather": Weather,
        "get_weather": tool_of(job),
        "reward_of": reward_of,
    }
    exec(compile(read_example(sys.argv[1]), str(PAGE), "exec"), names)
    task = {"text": job.messages[0]}
    return await names["answer"](task, base_url=job.base_url, api_key=job.key)


if __name__ == "__main__":
    serve(run)
