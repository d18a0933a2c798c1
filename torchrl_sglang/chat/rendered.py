"""Locates a model's response in a rendered conversation."""

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
    """The response as a message, with separate tool calls and reasoning."""
    text: str
    """The response as a text, without its stop string and the template's end."""
    end: str | None
    """Text of its end token; ``None`` if no token ended it."""


def after_text(body: str, text: str) -> str | None:
    """Returns the text after a prefix, with white space ignored.

    ``None`` if the prefix differs. White space at the end of ``text`` is not returned
    again.
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
    """Returns the end of a text at the begin of ``body``, with white space ignored."""
    stripped = text.strip()
    start = len(body) - len(body.lstrip())
    if not stripped:
        return 0
    if body.startswith(stripped, start):
        return start + len(stripped)
    squeezed = _squeeze(text)
    remaining = len(squeezed)
    for word in _WORD.finditer(body):
        if remaining <= word.end() - word.start():
            end = word.start() + remaining
            return end if _squeeze(body[:end]) == squeezed else None
        remaining -= word.end() - word.start()
    return None


def keeps(messages: Sequence[Message], rendered: str, written: str) -> bool:
    """Returns whether two texts differ only in white space.

    Templates trim the model's text, and tokenizers put spaces after special tokens.
    Other messages must be unchanged, except at their ends.
    """
    inputs = (m["content"] for m in messages if m["role"] != "assistant")
    return rendered == written or all(
        text in written for text in inputs if isinstance(text, str) and text in rendered
    )


def marked(reply: Message) -> tuple[Message, list[str]]:
    """Returns a response with a mark after each of its parts, and the marks.

    A template renders the mark of each rendered part, too.
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
    """Returns the text after a response rendered in other words.

    Args:
        body: rendered text after the response's prompt.
        marked_body: the same for the response with ``marks``.
        marks: see :func:`marked`.
        response: a response ended by a token.
        ids: ids of its tool calls in the rendered text.

    Returns:
        The text after the end; ``None`` if the template drops a part of the response,
        or distinguishes calls by ids not written by the model.
    """
    if _MARK in body or any(mark not in marked_body for mark in marks):
        return None
    end = str(response.end)
    position = max(marked_body.rindex(mark) + len(mark) for mark in marks)
    _, separator, remaining = marked_body[position:].partition(end)
    if not separator or not body.endswith(end + remaining):
        return None
    written = body[: len(body) - len(end + remaining)]
    has_ids = len(ids) < 2 or all(e in response.text for e in ids if e in written)
    return remaining if has_ids and _has_all(written, response.message) else None


def _has_all(written: str, reply: Message) -> bool:
    """Returns whether a text has all parts of a message, with white space ignored."""
    squeezed = _squeeze(written)
    parts = [reply["content"], reply.get("reasoning_content", "")]
    for call in reply.get("tool_calls", ()):
        function = call["function"]
        parts += [function["name"], *_leaves(function["arguments"])]
    return all(_has(squeezed, part) for part in parts)


def _has(squeezed: str, part: Any) -> bool:
    """Returns whether a part is present as plain text, JSON or Python literal."""
    if not isinstance(part, str):
        return json.dumps(part) in squeezed or str(part) in squeezed
    ways = (part, *(json.dumps(part, ensure_ascii=a)[1:-1] for a in (False, True)))
    return any(_squeeze(way) in squeezed for way in (*ways, repr(part)[1:-1]))


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the keys and values of a JSON object."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _squeeze(text: str) -> str:
    return "".join(text.split())
