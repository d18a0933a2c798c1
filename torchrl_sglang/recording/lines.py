"""Lines of a recording, as a reader has them. Pure.

Lines of groups are most of a recording: they become objects with the totals of their
responses. The responses themselves are made again of the line when somebody asks for
them: all of a long run would take seven times the memory, and most of the time to open
it. All other lines are dictionaries.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

ERRORS = (ValueError, RecursionError)
"""What is raised for a line that is no JSON."""

MOST_OF_INT = 2**1000
"""A whole number below it is a float, too."""


class ResponseLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response in the line of its group."""

    tokens: int
    """Tokens of the policy, over all turns."""
    keys: list[str]
    """The rows of a batch that it makes."""
    reward: float | None = None
    """Its return, where it is a finite number."""
    rewards: dict[str, float | None] = {}
    """Values of the reward functions that have a name, likewise."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all turns."""
    cached: int = 0
    """Prompt tokens from the prefix cache."""
    turns: int = 1
    tools: int = 0
    """Messages of tools."""
    cut: bool = False
    """Whether it was truncated."""
    end: str = ""
    """Why its last turn ended."""
    log_prob: float | None = None
    """Mean over its tokens."""
    versions: list[int] | None = None
    """The oldest and the newest policy version of its tokens."""


class _WholeLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of the stream of groups, as it was written."""

    id: int | str
    time: tuple[float, float]
    status: str
    responses: list[ResponseLine]
    position: int | None = None
    name: str = ""
    versions: list[int] | None = None
    prompt: str = ""
    prompt_key: str = ""
    texts: Any = None


class GroupLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of the stream of groups, with the totals of its responses."""

    id: int | str
    writer: str
    """The writer of its file, which has numbers of its own."""
    began: float
    """When it started, in seconds since the epoch."""
    ended: float
    status: str
    position: int | None
    """Position of its prompt."""
    name: str
    """Name of a gateway's session."""
    versions: list[int] | None
    """Policy versions when it started and when it ended."""
    prompt: str
    """The beginning of the prompt."""
    prompt_key: str
    """A digest of the prompt's tokens; empty in recordings of earlier versions."""
    texts: Any
    """File, offset and length of its conversations; ``None``: not recorded."""
    source: bytes
    """The line itself."""

    count: int
    """Number of its responses."""
    keys: list[str]
    """The rows of a batch that they make."""
    rewards: list[float]
    """Their returns, where they have one."""
    best: float | None
    """The largest of these."""
    worst: float | None
    """The smallest of these."""
    named: dict[str, tuple[float, int]]
    """Name of a reward function -> the sum of its values, and their number."""
    tokens: int
    """Tokens of all responses."""
    turns: int
    """Turns of the response that has the most."""
    tools: int
    """Messages of tools."""
    cut: int
    """Responses that were truncated."""
    oldest: int | None
    """The oldest policy version of a token."""

    @property
    def responses(self) -> list[ResponseLine]:
        """Its responses, which are made of the line again each time."""
        return _decode(self.source).responses


_WHOLE = msgspec.json.Decoder(_WholeLine)


def read_line(line: bytes) -> dict[str, Any]:
    """Returns a line as a dictionary, or raises one of :data:`ERRORS`."""
    try:
        record = msgspec.json.decode(line)
    except ValueError:
        # Python's own form of JSON has numbers that are not finite.
        record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("It is no record.")
    return record


def read_group(line: bytes, writer: str = "") -> GroupLine | None:
    """Returns a line of the stream of groups; ``None``: it is no group."""
    try:
        return _with_totals(_decode(line), line, writer)
    except (msgspec.ValidationError, LookupError, TypeError, AttributeError):
        return None


def _decode(line: bytes) -> _WholeLine:
    """Returns a line of the stream of groups, also one of Python's form of JSON."""
    try:
        return _WHOLE.decode(line)
    except ValueError:
        record = read_line(line)
    for response in record["responses"]:
        # Whatever a user's function returned.
        response["reward"] = number(response.get("reward"))
        named = response.get("rewards", {}).items()
        response["rewards"] = {name: number(value) for name, value in named}
    return msgspec.convert(record, _WholeLine)


def _with_totals(group: _WholeLine, line: bytes, writer: str) -> GroupLine:
    responses = group.responses
    rewards = [r.reward for r in responses if r.reward is not None]
    versions = [r.versions[0] for r in responses if r.versions]
    start, end = group.time
    return GroupLine(
        id=group.id,
        writer=writer,
        began=start,
        ended=end,
        status=group.status,
        position=group.position,
        name=group.name,
        versions=group.versions,
        prompt=group.prompt,
        prompt_key=group.prompt_key,
        texts=group.texts,
        source=line,
        count=len(responses),
        keys=[key for response in responses for key in response.keys],
        rewards=rewards,
        best=max(rewards, default=None),
        worst=min(rewards, default=None),
        named=_sums(responses),
        tokens=sum([response.tokens for response in responses]),
        turns=max([response.turns for response in responses], default=0),
        tools=sum([response.tools for response in responses]),
        cut=sum([response.cut for response in responses]),
        oldest=min(versions, default=None),
    )


def _sums(responses: list[ResponseLine]) -> dict[str, tuple[float, int]]:
    """Returns the sum and the number of the values that each name has."""
    sums: dict[str, tuple[float, int]] = {}
    for response in responses:
        for name, value in response.rewards.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + (value or 0.0), count + (value is not None)
    return sums


def number(value: Any) -> float | None:
    """Returns a finite number; ``None`` for anything else."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    is_small = isinstance(value, int) and abs(value) < MOST_OF_INT
    return float(value) if is_small else None
