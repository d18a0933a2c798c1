"""pydantic-ai: an agent with a tool, and an output type as a tool, its default."""

from __future__ import annotations

import sys
from typing import Any

from common import Job, serve, tool_of
from pydantic_ai import Agent
from weather import Weather


def model_of(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    if sys.argv[1] == "anthropic":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        anthropic = AsyncAnthropic(base_url=job.url, api_key=job.key, **given)
        return AnthropicModel(
            "policy", provider=AnthropicProvider(anthropic_client=anthropic)
        )
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = AsyncOpenAI(base_url=job.base_url, api_key=job.key, **given)
    return OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=openai))


async def run(job: Job) -> Any:
    tools = [] if job.structured else [tool_of(job)]
    kind: Any = Weather if job.structured else str
    agent = Agent(model_of(job), output_type=kind, tools=tools)
    history: Any = None
    for content in job.messages:
        result = await agent.run(
            content,
            message_history=history,
            event_stream_handler=_read if job.stream else None,
        )
        history = result.all_messages()
    return result.output.model_dump() if job.structured else result.output


async def _read(context: Any, events: Any) -> None:
    """Makes the agent stream; ``run_stream`` would end at the first text."""
    async for _ in events:
        pass


if __name__ == "__main__":
    serve(run)
