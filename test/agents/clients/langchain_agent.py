"""LangChain's agent on LangGraph, with the models of three packages and protocols."""

from __future__ import annotations

import sys
from typing import Any

from common import Job, serve, tool_of
from langchain.agents import create_agent
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def model_of(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    if sys.argv[1] == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model="policy", base_url=job.url, api_key=job.key, max_tokens=2048, **given
        )
    from langchain_openai import ChatOpenAI

    responses = {"use_responses_api": True} if sys.argv[1] == "responses" else {}
    return ChatOpenAI(
        model="policy", base_url=job.base_url, api_key=job.key, **responses, **given
    )


async def run(job: Job) -> Any:
    if job.structured:
        agent = create_agent(model_of(job), [], response_format=Weather)
    else:
        agent = create_agent(model_of(job), [tool_of(job)])
    state: Any = {"messages": []}
    for content in job.messages:
        state["messages"].append({"role": "user", "content": content})
        if job.stream:
            async for _, kind, found in agent.astream(
                state, stream_mode=["messages", "values"], subgraphs=True
            ):
                state = found if kind == "values" else state
        else:
            state = await agent.ainvoke(state)
    if job.structured:
        return state["structured_response"].model_dump()
    return state["messages"][-1].text


if __name__ == "__main__":
    serve(run)
