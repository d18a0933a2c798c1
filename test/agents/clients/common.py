"""What a client does, whichever it is: it takes jobs, runs them, and reports.

It runs in the client's own environment, so that it needs the standard library only. A
job is a line of JSON from the test, and a report a line of JSON to it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GET_WEATHER = {
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
"""The tool as a function of OpenAI's."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
"""Schema of the structured answer."""
DEGREES = {"Rome": 21, "Oslo": 7}
RETRIES = None
"""The number of retries that a client has by itself."""


class UnknownCityError(ValueError):
    """The tool's own error."""


@dataclass(kw_only=True)
class Job:
    """One conversation, against one session of a gateway."""

    url: str
    """Base URL for Anthropic's clients."""
    base_url: str
    """Base URL for OpenAI's clients."""
    key: str
    """API key of the session."""
    messages: list[str]
    """What the user says, one turn after the other."""
    timeout: float
    """Time-out of a request, in seconds."""
    retries: int | None = RETRIES
    """Most retries; ``None``: leave it to the client."""
    stream: bool = False
    """Whether responses are streamed."""
    structured: bool = False
    """Whether the answer is a city and its degrees."""
    style: str = ""
    """Which of its ways a client takes."""
    folder: str = ""
    """An empty folder."""
    called: list[Any] = field(default_factory=list)
    """Arguments of the tool's calls."""

    def get_weather(self, city: str) -> str:
        """Returns the weather of a city."""
        self.called.append(city)
        if city not in DEGREES:
            raise UnknownCityError(f"There is no city {city!r}.")
        return f"It is {DEGREES[city]} degrees in {city}."

    def read_calls(self) -> None:
        """Reads the file that the model's commands append to."""
        calls = Path(self.folder) / "calls"
        self.called += calls.read_text().split() if calls.exists() else []

    def given(self, **names: str) -> dict[str, Any]:
        """Returns time-out and retries, under a client's names for them."""
        values = {"timeout": self.timeout, "retries": self.retries}
        return {
            name: values[key] for key, name in names.items() if values[key] is not None
        }


def tool_of(job: Job) -> Callable[[str], str]:
    """Returns the job's tool as a plain function, which frameworks read."""

    def get_weather(city: str) -> str:
        """Returns the weather of a city.

        Args:
            city: name of the city.
        """
        return job.get_weather(city)

    return get_weather


def call_by_hand(job: Job, name: str, arguments: str | Mapping[str, Any]) -> str:
    """Calls the tool, for clients that leave that to their user."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name != "get_weather" or set(given) != {"city"}:
            return f"Error: {name} does not take {sorted(given)}; it takes a city."
        return job.get_weather(**given)
    except ValueError as error:
        return f"Error: {error}"


def serve(run: Callable[[Job], Any]) -> None:
    """Runs jobs until there are no more; those of a list at once."""
    # Frameworks print, and so do their tools.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        given = json.loads(line)
        if isinstance(given, list):
            found: Any = asyncio.run(_report_all(run, given))
        else:
            found = _report(run, Job(**given))
        reports.write(json.dumps(found) + "\n")
        reports.flush()


def _report(run: Callable[[Job], Any], job: Job) -> dict[str, Any]:
    """Returns what became of a job."""
    try:
        answer = run(job)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_finish(answer))
    except Exception as error:
        return _failed(job, error)
    return {"answer": answer, "error": None, "called": job.called}


async def _report_all(
    run: Callable[[Job], Any], given: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    async def one(job: Job) -> dict[str, Any]:
        try:
            answer = await run(job)
        except Exception as error:
            return _failed(job, error)
        return {"answer": answer, "error": None, "called": job.called}

    return await asyncio.gather(*(one(Job(**each)) for each in given))


def _failed(job: Job, error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {
        "answer": None,
        "called": job.called,
        "error": type(error).__name__,
        "errors": [kind.__name__ for kind in _kinds(error)],
        "message": str(error)[:2000],
    }


def _kinds(error: BaseException | None) -> list[type]:
    """Returns the types of an error and of its causes."""
    found: list[type] = []
    while error is not None and len(found) < 100:
        found += type(error).__mro__
        error = error.__cause__ or error.__context__
    return found


async def _finish(awaitable: Any) -> Any:
    return await awaitable
