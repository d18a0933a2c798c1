"""Server-sent events of ``/v1/responses``, for responses that grow. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchrl_sglang.gateway.dialects.base import more

_NOT_YET = ("usage", "error", "incomplete_details", "completed_at")
"""Fields that a response has when it is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextEvents:
    """Events of the one text that an item has."""

    name: str
    """Beginning of the types of the text's events."""
    field: str = "text"
    """Field with the text: of the item's one part, or of the item itself."""
    parts: str | None = None
    """Field of the item with its one part, if it has parts."""
    part: str = ""
    """Beginning of the types of the part's events."""
    index: str = ""
    """Field of the events with the part's index."""

    def holder(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what has the text."""
        found: Mapping[str, Any] = item if self.parts is None else item[self.parts][0]
        return found


_REASONING = _TextEvents(
    name="response.reasoning_text",
    parts="content",
    part="response.content_part",
    index="content_index",
)
_SUMMARY = _TextEvents(
    name="response.reasoning_summary_text",
    parts="summary",
    part="response.reasoning_summary_part",
    index="summary_index",
)
_EVENTS = {
    "message": _TextEvents(
        name="response.output_text",
        parts="content",
        part="response.content_part",
        index="content_index",
    ),
    "function_call": _TextEvents(
        name="response.function_call_arguments", field="arguments"
    ),
    "custom_tool_call": _TextEvents(
        name="response.custom_tool_call_input", field="input"
    ),
}
"""Type of an item, but for reasoning -> its events."""


def _events_of(item: Mapping[str, Any]) -> _TextEvents:
    if item["type"] == "reasoning":
        return _SUMMARY if item["summary"] else _REASONING
    return _EVENTS[item["type"]]


class EventStream:
    """Events of one response, in OpenAI's order, with their numbers.

    Args:
        head: the response before the model has written anything.

    Examples:
        >>> from torchrl_sglang.gateway.dialects.responses.events import EventStream
        >>> item = {"type": "function_call", "id": "fc_1", "arguments": '{"a'}
        >>> events = EventStream({"id": "resp_1", "status": "in_progress"})
        >>> begun, grown = list(events.begin()), list(events.grow([item]))
        >>> longer = {**item, "arguments": '{"a": 1}'}
        >>> next(events.grow([longer])).splitlines()[0]
        b'event: response.function_call_arguments.delta'
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = {**head, "output": [], **dict.fromkeys(_NOT_YET)}
        self._head["status"] = "in_progress"
        self._number = 0
        self._index = -1
        self._told = ""

    def begin(self) -> Iterator[bytes]:
        """Yields the first events, unless they have been."""
        if not self._number:
            yield self._event("response.created", {"response": self._head})
            yield self._event("response.in_progress", {"response": self._head})

    def wait(self) -> Iterator[bytes]:
        """Yields a sign of life: the first events, or one of them again."""
        if self._number:
            yield self._event("response.in_progress", {"response": self._head})
        else:
            yield from self.begin()

    def grow(self, items: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yields what items have more than before; all but the last are complete.

        Raises:
            GatewayError: if they begin otherwise.
        """
        for index in range(max(self._index, 0), len(items)):
            if index > self._index:
                if self._index >= 0:
                    yield from self._delta(items[self._index])
                    yield from self._close(items[self._index])
                self._index, self._told = index, ""
                yield from self._open(items[index])
            yield from self._delta(items[index])

    def end(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the rest of a complete response."""
        yield from self.begin()
        yield from self.grow(response["output"])
        if response["output"]:
            yield from self._close(response["output"][-1])
        yield self._event(f"response.{response['status']}", {"response": response})

    def fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the last events of a response that failed.

        Args:
            error: with a ``code`` and a ``message``, and what else clients are told.
        """
        yield from self.begin()
        told = {key: error.get(key) for key in ("code", "message", "param")}
        yield self._event("error", {**told, "error": error})
        about = {"code": error.get("code") or "server_error"}
        about["message"] = error["message"]
        failed = {**self._head, "status": "failed", "error": about}
        yield self._event("response.failed", {"response": failed})

    def _event(self, kind: str, content: Mapping[str, Any]) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        data = msgspec.json.encode(numbered)
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _open(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        own = _events_of(item)
        empty = {**item, own.parts or own.field: "" if own.parts is None else []}
        if "status" in item:
            empty["status"] = "in_progress"
        if "encrypted_content" in item:
            empty["encrypted_content"] = ""
        place = {"output_index": self._index}
        yield self._event("response.output_item.added", {**place, "item": empty})
        if own.parts is not None:
            part = {**own.holder(item), own.field: ""}
            if "logprobs" in part:
                part["logprobs"] = []
            told = {**self._place(item, own), "part": part}
            yield self._event(f"{own.part}.added", told)

    def _delta(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        own = _events_of(item)
        holder = own.holder(item)
        text = holder[own.field]
        new, self._told = more(text, self._told), text
        if new:
            told = {**self._place(item, own), "delta": new, **_logprobs(item, holder)}
            yield self._event(f"{own.name}.delta", told)

    def _close(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        own = _events_of(item)
        place, holder = self._place(item, own), own.holder(item)
        told = {own.field: holder[own.field], **_logprobs(item, holder)}
        if item["type"] == "function_call":
            told["name"] = item["name"]
        yield self._event(f"{own.name}.done", {**place, **told})
        if own.parts is not None:
            yield self._event(f"{own.part}.done", {**place, "part": holder})
        told = {"output_index": self._index, "item": item}
        yield self._event("response.output_item.done", told)

    def _place(self, item: Mapping[str, Any], own: _TextEvents) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": self._index}
        return place if own.parts is None else {**place, own.index: 0}


def _logprobs(item: Mapping[str, Any], holder: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the log-probs that events of messages have, if only an empty list."""
    if item["type"] != "message":
        return {}
    return {"logprobs": holder.get("logprobs", [])}
