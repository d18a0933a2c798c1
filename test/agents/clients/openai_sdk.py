"""OpenAI's SDK, with a loop of its user's."""

from __future__ import annotations

from typing import Any

import openai
from common import GET_WEATHER, Job, call_by_hand, serve
from weather import Weather

TOOL = {"type": "function", "function": GET_WEATHER}


def run(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    with openai.OpenAI(base_url=job.base_url, api_key=job.key, **given) as client:
        messages: list[Any] = []
        for content in job.messages:
            messages.append({"role": "user", "content": content})
            answer = respond(job, client, messages)
    return answer


def respond(job: Job, client: openai.OpenAI, messages: list[Any]) -> Any:
    asked: dict[str, Any] = {"model": "policy", "messages": messages}
    if job.structured:
        said = client.chat.completions.parse(response_format=Weather, **asked)
        return said.choices[0].message.parsed.model_dump()
    while True:
        if job.stream:
            with client.chat.completions.stream(tools=[TOOL], **asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(tools=[TOOL], **asked)
            message = said.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = call_by_hand(job, call.function.name, call.function.arguments)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )


if __name__ == "__main__":
    serve(run)
