"""instructor in its default mode: the answer is a call of a tool with that name."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from common import Job, serve
from weather import Weather


def run(job: Job) -> Any:
    given = job.given(timeout="timeout", retries="max_retries")
    with openai.OpenAI(base_url=job.base_url, api_key=job.key, **given) as client:
        ask = instructor.from_openai(client).chat.completions
        messages: list[Any] = []
        for content in job.messages:
            messages.append({"role": "user", "content": content})
            asked = {"model": "policy", "messages": messages}
            if job.stream:
                *_, answer = ask.create_partial(response_model=Weather, **asked)
            else:
                answer = ask.create(response_model=Weather, **asked)
            messages.append({"role": "assistant", "content": answer.model_dump_json()})
    return answer.model_dump()


if __name__ == "__main__":
    serve(run)
