"""AutoGen's assistant, which reflects on what tools return."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import Job, serve, tool_of
from weather import Weather

INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family="unknown",
    structured_output=True,
)


async def run(job: Job) -> Any:
    client = OpenAIChatCompletionClient(
        model="policy",
        base_url=job.base_url,
        api_key=job.key,
        model_info=INFO,
        **job.given(timeout="timeout", retries="max_retries"),
    )
    agent: AssistantAgent = AssistantAgent(
        "weather",
        model_client=client,
        tools=[] if job.structured else [tool_of(job)],
        output_content_type=Weather if job.structured else None,
        model_client_stream=job.stream,
        max_tool_iterations=4,
    )
    for content in job.messages:
        result = await agent.run(task=content)
    await client.close()
    answer = result.messages[-1].content
    return answer.model_dump() if job.structured else answer


if __name__ == "__main__":
    serve(run)
