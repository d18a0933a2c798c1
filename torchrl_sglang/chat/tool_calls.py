"""Tool calls in a model's text.

:func:`find_calls` parses the format of Qwen and Hermes, and :func:`read_calls` the
result of SGLang's parsers for any other format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from torchrl_sglang.chat.messages import read_arguments

CALL_MARK = "<tool_call>"
"""Text before a call of Qwen's and Hermes's models."""

_THINK = ("<think>", "</think>")

REASONING_MARKS: dict[str, tuple[str, str]] = {
    "deepseek-r1": _THINK,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "interns1": _THINK,
    "kimi": ("◁think▷", "◁/think▷"),
    "mistral": ("[THINK]", "[/THINK]"),
    "nemotron_3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK,
    "step3": _THINK,
}
"""SGLang's name of a parser of reasoning -> texts before and after reasoning."""

_END = "</tool_call>"
_REASONING = dict(REASONING_MARKS.values())
_MARKS = re.compile("|".join(map(re.escape, (CALL_MARK, *chain(*_REASONING.items())))))
_SPACE = re.compile(r"\s*")
# Up to the first character foreign to JSON outside of its strings.
_JSON = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_WRITTEN_ID = re.compile(r'"id"\s*:\s*"([A-Za-z0-9]{9})"\s*[,}]')


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments by name."""
    id: str | None = None
    """Id in the model's text."""

    def to_message(self, call_id: str | None = None) -> dict[str, Any]:
        """Returns the call in the form of messages, with a new id if it has none."""
        return {
            "id": call_id or self.id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableCall:
    """A call whose tool and arguments cannot be read."""

    reason: str
    """Clause of a sentence."""


FoundCall = ToolCall | UnreadableCall


def find_calls(text: str) -> tuple[str, list[FoundCall]]:
    """Returns a text without its readable calls, and all its calls.

    A call is ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``. Calls
    in reasoning do not count: between ``<think>`` and ``</think>``, or before an
    unopened ``</think>``. The time is linear in the text's length.
    """
    calls: list[FoundCall] = []
    texts: list[str] = []
    start = place = 0
    last_end = text.rfind(_END)
    unended: list[FoundCall] = []
    while mark := _MARKS.search(text, place):
        place = mark.end()
        if mark[0] in _REASONING:
            end = _REASONING[mark[0]]
            close = text.find(end, place)
            place = close + len(end) if close >= 0 else len(text)
        elif mark[0] != CALL_MARK:
            # Everything so far was reasoning.
            calls, texts, start, unended = [], [], 0, []
        elif place <= last_end:
            read, place = _read_call(text, place)
            calls += read
            if read and isinstance(read[0], ToolCall):
                texts.append(text[start : mark.start()])
                start = place
        elif text.startswith("{", _behind_space(text, place)):
            # Several of them count as one, however often a model repeats itself.
            unended = [UnreadableCall(reason=f"it does not end with {_END}")]
    return "".join([*texts, text[start:]]), calls + unended


def behind_reasoning(text: str, prompt: str = "") -> str:
    """Returns a response without its reasoning; empty if the reasoning has no end.

    Args:
        text: the response.
        prompt: text of its prompt, which may have begun the reasoning.
    """
    for begin, end in _REASONING.items():
        if text.lstrip().startswith(begin) or prompt.rstrip().endswith(begin):
            return text.partition(end)[2]
    return text


def _behind_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return space.end() if space else place


def _read_call(text: str, place: int) -> tuple[Sequence[FoundCall], int]:
    """Returns the calls in a closed block, and the position after it.

    A block has a single call, or a list; none if the mark is only mentioned.
    """
    if text[_behind_space(text, place)] not in "{[":
        following = text.find(CALL_MARK, place)
        if text.find(_END, place, following if following >= 0 else None) < 0:
            return [], place
    written = _JSON.match(text, place)
    assert written is not None
    end = place
    try:
        value = json.loads(written[0])
        end = written.end()
        if not text.startswith(_END, end):
            raise ValueError(f"{_END} is missing behind its JSON")
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        unreadable = UnreadableCall(reason=f"it is not JSON ({reason})")
        close = text.find(_END, end)
        close = text.index(_END, place) if close < 0 else close
        return [unreadable], close + len(_END)
    entries = value if isinstance(value, list) else [value]
    calls = [_call(entry) for entry in entries]
    if not calls or None in calls:
        reason = "it is not an object with a name and with arguments by name"
        return [UnreadableCall(reason=reason)], end + len(_END)
    return [call for call in calls if call is not None], end + len(_END)


def read_calls(found: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Returns calls from a server's parser, in the form of messages.

    They have the ids in the model's text, if any. None are returned if a call among
    them is unreadable for clients.
    """
    ids = written_ids(text, len(found))
    calls = []
    for index, raw in enumerate(found):
        try:
            arguments = msgspec.json.decode(raw.get("parameters") or "{}")
        except (ValueError, RecursionError):
            return []
        call = _call({"name": raw.get("name"), "arguments": arguments})
        if call is None:
            return []
        calls.append(call.to_message(ids[index] if ids else None))
    return calls


def _call(given: Any) -> ToolCall | None:
    """Parses a call in JSON, with the rules of SGLang's parsers."""
    if not isinstance(given, Mapping):
        return None
    name = given.get("name")
    arguments = read_arguments(given.get("parameters") or given.get("arguments"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    written = given.get("id")
    call_id = written if isinstance(written, str) and written else None
    return ToolCall(name=name, arguments=arguments, id=call_id)


def written_ids(text: str, number: int) -> list[str]:
    """Returns the ids written with a model's calls, as by Mistral's.

    They distinguish the results of several calls. None are returned unless each of
    ``number`` calls has an id.
    """
    ids = _WRITTEN_ID.findall(text)
    return ids if len(ids) == number == len(set(ids)) else []
