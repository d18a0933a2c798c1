"""Finds a model's response in what a chat template renders of it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.chat.messages import Message

# Letters only: no template trims, escapes or splits them.
_MARK = "QxmarkZ"
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatResponse:
    """A response of the model, as a message and as a text."""

    message: Message
    """The response as a message, tool calls and reasoning apart."""
    text: str
    """The response as a text, without the stop string that ended it, and without an end
    that the template writes."""
    end: str | None
    """Text of that token; ``None`` if no token ended it."""


def after_text(body: str, text: str) -> str | None:
    """Returns the rest behind a text that ``body`` begins with, white space apart.

    ``None`` if it begins with another text. White space at the end of ``text`` is not
    returned once more.
    """
    end = _end_of(body, text)
    if end is None:
        return None
    for space in text[len(text.rstrip()) :]:
        if not body.startswith(space, end):
            break
        end += 1
    return body[end:]


def _end_of(body: str, text: str) -> int | None:
    """Returns where a text ends that ``body`` begins with, white space apart."""
    stripped = text.strip()
    start = len(body) - len(body.lstrip())
    if not stripped:
        return 0
    if body.startswith(stripped, start):
        return start + len(stripped)
    wanted = _squeeze(text)
    left = len(wanted)
    for word in _WORD.finditer(body):
        if left <= word.end() - word.start():
            end = word.start() + left
            return end if _squeeze(body[:end]) == wanted else None
        left -= word.end() - word.start()
    return None


def keeps(messages: Sequence[Message], rendered: str, written: str) -> bool:
    """Returns whether texts that differ in white space alone say the same.

    Templates trim what the model wrote, and tokenizers put spaces behind special
    tokens. What the model was told has to be there as it is, ends apart.
    """
    told = (m["content"] for m in messages if m["role"] != "assistant")
    return rendered == written or all(
        text in written for text in told if isinstance(text, str) and text in rendered
    )


def marked(reply: Message) -> tuple[Message, list[str]]:
    """Returns a response with a mark behind each of its parts, and the marks.

    A template that renders a part renders its mark, too.
    """
    marks: list[str] = []

    def mark() -> str:
        marks.append(f"{_MARK}{len(marks)}{_MARK}")
        return marks[-1]

    copy = dict(reply)
    for name in ("reasoning_content", "content"):
        if str(reply.get(name, "")).strip():
            copy[name] = reply[name] + mark()
    if reply.get("tool_calls"):
        copy["tool_calls"] = [_marked_call(c, mark()) for c in reply["tool_calls"]]
    return copy, marks


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    # Names are left alone: templates write them beside the call's result, too.
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = {**arguments, mark: mark}
    elif isinstance(arguments, str):
        arguments += mark
    return {**call, "function": {**function, "arguments": arguments}}


def after_marks(
    body: str,
    marked_body: str,
    marks: Sequence[str],
    response: ChatResponse,
    ids: Sequence[str],
) -> str | None:
    """Returns the rest behind a response that is rendered in other words than its own.

    Args:
        body: what is rendered behind the response's prompt.
        marked_body: the same, rendered of the response with ``marks``.
        marks: see :func:`marked`.
        response: that was ended by a token.
        ids: of its tool calls, as they are rendered.

    Returns:
        What follows the end; ``None`` if the template drops a part of the response, or
        tells apart several calls by ids that the model did not write.
    """
    if _MARK in body or any(mark not in marked_body for mark in marks):
        return None
    end = str(response.end)
    last = max(marked_body.rindex(mark) + len(mark) for mark in marks)
    _, found, rest = marked_body[last:].partition(end)
    if not found or not body.endswith(end + rest):
        return None
    written = body[: len(body) - len(end + rest)]
    told = len(ids) < 2 or all(each in response.text for each in ids if each in written)
    return rest if told and _has_all(written, response.message) else None


def _has_all(written: str, reply: Message) -> bool:
    """Returns whether a text has all that a message has, white space apart."""
    squeezed = _squeeze(written)
    parts = [reply["content"], reply.get("reasoning_content", "")]
    for call in reply.get("tool_calls", ()):
        function = call["function"]
        parts += [function["name"], *_leaves(function["arguments"])]
    return all(_has(squeezed, part) for part in parts)


def _has(squeezed: str, part: Any) -> bool:
    """Returns whether a part is there as it is, as JSON, or as Python writes it."""
    if not isinstance(part, str):
        return json.dumps(part) in squeezed or str(part) in squeezed
    ways = (part, *(json.dumps(part, ensure_ascii=a)[1:-1] for a in (False, True)))
    return any(_squeeze(way) in squeezed for way in (*ways, repr(part)[1:-1]))


def _leaves(value: Any) -> Iterator[Any]:
    """Yields keys and values of an object of JSON."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _squeeze(text: str) -> str:
    return "".join(text.split())
