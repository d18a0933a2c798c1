"""Lines of a recording, as a reader has them. Pure.

Lines of groups are most of a recording: they become objects with fields, which takes
half of the memory and of the time of dictionaries. All other lines are dictionaries.
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
    """Those of them that the prefix cache had."""
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


class GroupLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of the stream of groups."""

    id: int | str
    time: tuple[float, float]
    """When it started and ended, in seconds since the epoch."""
    status: str
    responses: list[ResponseLine]
    position: int | None = None
    """Position of its prompt."""
    name: str = ""
    """Name of a gateway's session."""
    versions: list[int] | None = None
    """Policy versions when it started and when it ended."""
    prompt: str = ""
    """The beginning of the prompt."""
    texts: Any = None
    """File, offset and length of its conversations; ``None``: not recorded."""
    writer: str = ""
    """The writer of its file: each numbers its groups from 1."""


_GROUP = msgspec.json.Decoder(GroupLine)


def read_line(line: bytes) -> dict[str, Any]:
    """Returns a line as a dictionary.

    Raises:
        ValueError: if it is none.
        RecursionError: if it is nested too deeply.

    Examples:
        >>> read_line(b'{"kind": "step", "step": 1}')
        {'kind': 'step', 'step': 1}
    """
    try:
        found = msgspec.json.decode(line)
    except ValueError:
        # Python's own form of JSON has numbers that are not finite.
        found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("It is no record.")
    return found


def read_group(line: bytes) -> GroupLine | None:
    """Returns a line of the stream of groups; ``None``: a record, but not of a group.

    Raises:
        ValueError: if it is no record.
        RecursionError: if it is nested too deeply.

    Examples:
        >>> line = b'{"id": 1, "time": [0, 1], "status": "complete", "responses": []}'
        >>> read_group(line).status
        'complete'
        >>> read_group(b'{"id": 1}')
    """
    try:
        return _GROUP.decode(line)
    except ValueError:
        found = read_line(line)
    try:
        for each in found["responses"]:
            # Whatever a user's function returned.
            each["reward"] = number(each.get("reward"))
            named = each.get("rewards", {}).items()
            each["rewards"] = {name: number(value) for name, value in named}
        return msgspec.convert(found, GroupLine)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError):
        return None


def number(value: Any) -> float | None:
    """Returns a finite number; ``None`` for anything else."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    is_small = isinstance(value, int) and abs(value) < MOST_OF_INT
    return float(value) if is_small else None
