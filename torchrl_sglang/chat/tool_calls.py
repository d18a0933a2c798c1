"""Tool calls that a model wrote: who finds them, and what they are. Pure.

:func:`find_calls` reads the format of Qwen and Hermes, and :func:`read_calls` what the
parsers of SGLang's servers found in any other.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_WRITTEN_ID = re.compile(r'"id"\s*:\s*"([A-Za-z0-9]{9})"\s*[,}]')


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """By name."""

    def to_message(self, call_id: str | None = None) -> dict[str, Any]:
        """Returns the call as messages hold it, with a new id if it has none."""
        return {
            "id": call_id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def find_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Returns a text without its calls, and those that can be read.

    They are ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``.
    """
    calls = []
    for found in _CALL.findall(text):
        try:
            given = json.loads(found)
        except (ValueError, RecursionError):
            continue
        calls.append(_call(given.get("name"), given.get("arguments", {})))
    return _CALL.sub("", text), [call for call in calls if call is not None]


def read_calls(found: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Returns calls that a server's parser found in a text, as messages hold them.

    They have the ids that the model wrote, if it did. None are returned if there is one
    among them that no client could read.
    """
    ids = written_ids(text, len(found))
    calls = []
    for index, given in enumerate(found):
        try:
            arguments = msgspec.json.decode(given.get("parameters") or "{}")
        except (ValueError, RecursionError):
            return []
        call = _call(given.get("name") or None, arguments)
        if call is None:
            return []
        calls.append(call.to_message(ids[index] if ids else None))
    return calls


def _call(name: Any, arguments: Any) -> ToolCall | None:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=arguments)


def written_ids(text: str, number: int) -> list[str]:
    """Returns the ids that a model wrote beside its calls, as Mistral's do.

    The results of several calls are told apart by them. None are returned unless there
    is one for each of ``number`` calls.
    """
    ids = _WRITTEN_ID.findall(text)
    return ids if len(ids) == number == len(set(ids)) else []
