"""DSPy: programs of a signature, whose fields the model writes between headings."""

from __future__ import annotations

from typing import Any

import dspy
from common import Job, serve, tool_of


def run(job: Job) -> Any:
    lm = dspy.LM(
        "openai/policy",
        api_base=job.base_url,
        api_key=job.key,
        cache=False,
        **job.given(timeout="timeout", retries="num_retries"),
    )
    with dspy.context(lm=lm):
        if job.structured:
            said = dspy.Predict("question -> city: str, degrees: int")(
                question=job.messages[0]
            )
            return {"city": said.city, "degrees": said.degrees}
        if job.style == "react":
            program = dspy.ReAct("question -> answer", tools=[tool_of(job)])
            if job.stream:
                stream = dspy.streamify(program, async_streaming=False)
                *_, said = stream(question=job.messages[0])
                return said.answer
            return program(question=job.messages[0]).answer
        return converse(job)


def converse(job: Job) -> str:
    """Asks one question after the other; the earlier ones are the history."""

    class Talk(dspy.Signature):
        question: str = dspy.InputField()
        history: dspy.History = dspy.InputField()
        answer: str = dspy.OutputField()

    history: list[dict[str, str]] = []
    for question in job.messages:
        said = dspy.Predict(Talk)(
            question=question, history=dspy.History(messages=history)
        )
        history.append({"question": question, "answer": said.answer})
    return history[-1]["answer"]


if __name__ == "__main__":
    serve(run)
