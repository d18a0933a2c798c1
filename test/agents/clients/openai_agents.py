"""openai-agents: an agent with a tool, and a conversation that the user keeps."""

from __future__ import annotations

import sys
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from common import Job, serve, tool_of
from weather import Weather

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def run(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    client = openai.AsyncOpenAI(base_url=job.base_url, api_key=job.key, **given)
    agent = Agent(
        name="weather",
        instructions="You know the weather.",
        model=MODELS[sys.argv[1]](model="policy", openai_client=client),
        tools=[] if job.structured else [function_tool(tool_of(job))],
        output_type=Weather if job.structured else None,
        model_settings=ModelSettings(),
    )
    messages: list[Any] = []
    for content in job.messages:
        messages.append({"role": "user", "content": content})
        if job.stream:
            result = Runner.run_streamed(agent, messages)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, messages)
        messages = result.to_input_list()
    answer = result.final_output
    return answer.model_dump() if job.structured else answer


if __name__ == "__main__":
    serve(run)
