"""Anthropic's SDK, with a loop of its user's."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from common import GET_WEATHER, WEATHER, Job, call_by_hand, serve

TOOL = {
    "name": GET_WEATHER["name"],
    "description": GET_WEATHER["description"],
    "input_schema": GET_WEATHER["parameters"],
}


def run(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    with anthropic.Anthropic(base_url=job.url, api_key=job.key, **given) as client:
        messages: list[Any] = []
        for content in job.messages:
            messages.append({"role": "user", "content": content})
            answer = respond(job, client, messages)
    return answer


def respond(job: Job, client: anthropic.Anthropic, messages: list[Any]) -> Any:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 2048, "messages": messages}
    if job.structured:
        format_ = {"format": {"type": "json_schema", "schema": WEATHER}}
        said = client.messages.create(extra_body={"output_config": format_}, **asked)
        return json.loads(said.content[-1].text)
    while True:
        if job.stream:
            with client.messages.stream(tools=[TOOL], **asked) as stream:
                said = stream.get_final_message()
        else:
            said = client.messages.create(tools=[TOOL], **asked)
        messages.append({"role": "assistant", "content": said.content})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return said.content[-1].text
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": call_by_hand(job, call.name, call.input),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    serve(run)
