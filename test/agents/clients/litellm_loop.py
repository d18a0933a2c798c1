"""LiteLLM, with a loop of its user's."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import litellm
from common import GET_WEATHER, Job, call_by_hand, serve
from weather import Weather

TOOL = {"type": "function", "function": GET_WEATHER}


def run(job: Job) -> Any:
    bases = {"openai": job.base_url, "hosted_vllm": job.base_url, "anthropic": job.url}
    asked: dict[str, Any] = {
        "model": f"{sys.argv[1]}/policy",
        "api_base": bases[sys.argv[1]],
        "api_key": job.key,
        **job.given(timeout="timeout", retries="max_retries"),
    }
    messages: list[Any] = []
    for content in job.messages:
        messages.append({"role": "user", "content": content})
        answer = respond(job, asked, messages)
    return answer


def respond(job: Job, asked: dict[str, Any], messages: list[Any]) -> Any:
    if job.structured:
        said = litellm.completion(messages=messages, response_format=Weather, **asked)
        return json.loads(said.choices[0].message.content)
    while True:
        said = litellm.completion(
            messages=messages, tools=[TOOL], stream=job.stream, **asked
        )
        if job.stream:
            said = litellm.stream_chunk_builder(list(said), messages=messages)
        message = said.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = call_by_hand(job, call.function.name, call.function.arguments)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )


if __name__ == "__main__":
    # LiteLLM leaves streams open. httpcore waits for itself for ever when one of them
    # is collected while its pool is locked.
    gc.disable()
    serve(run)
