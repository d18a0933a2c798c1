"""Server-sent events of ``/v1/responses`` for growing responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.gateway.dialects.base import ItemEvents, event

_NOT_YET = ("usage", "error", "incomplete_details", "completed_at")
"""Fields of a complete response only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextEvents:
    """Events of an item's single text."""

    name: str
    """Prefix of the types of the text's events."""
    field: str = "text"
    """Field with the text, of the item's single part or of the item itself."""
    parts: str | None = None
    """Field of the item with its single part, if it has parts."""
    part: str = ""
    """Prefix of the types of the part's events."""
    index: str = ""
    """Field of the events with the part's index."""

    def holder(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the object with the text."""
        holder: Mapping[str, Any] = item if self.parts is None else item[self.parts][0]
        return holder


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
"""Type of an item, except reasoning -> its events."""


def _events_of(item: Mapping[str, Any]) -> _TextEvents:
    if item["type"] == "reasoning":
        return _SUMMARY if item["summary"] else _REASONING
    return _EVENTS[item["type"]]


class EventStream(ItemEvents):
    """Events of a response, in OpenAI's order, with their numbers.

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
        super().__init__()

    def begin(self) -> Iterator[bytes]:
        """Yields the first events, once."""
        if not self._number:
            yield self._event("response.created", {"response": self._head})
            yield self._event("response.in_progress", {"response": self._head})

    def wait(self) -> Iterator[bytes]:
        """Yields a keep-alive: the first events, or a repeated event."""
        if self._number:
            yield self._event("response.in_progress", {"response": self._head})
        else:
            yield from self.begin()

    def end(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the remaining part of a complete response."""
        yield from self.begin()
        yield from self.grow(response["output"])
        yield from self.close(response["output"])
        yield self._event(f"response.{response['status']}", {"response": response})

    def fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the last events of a failed response."""
        yield from self.begin()
        fields = {key: error.get(key) for key in ("code", "message", "param")}
        yield self._event("error", {**fields, "error": error})
        about = {"code": error.get("code") or "server_error"}
        about["message"] = error["message"]
        failed = {**self._head, "status": "failed", "error": about}
        yield self._event("response.failed", {"response": failed})

    def _event(self, kind: str, content: Mapping[str, Any]) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return event(numbered, kind)

    def _open(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        kind = _events_of(item)
        empty = {**item, kind.parts or kind.field: "" if kind.parts is None else []}
        if "status" in item:
            empty["status"] = "in_progress"
        if "encrypted_content" in item:
            empty["encrypted_content"] = ""
        place = {"output_index": self._index}
        yield self._event("response.output_item.added", {**place, "item": empty})
        if kind.parts is not None:
            part = {**kind.holder(item), kind.field: ""}
            if "logprobs" in part:
                part["logprobs"] = []
            fields = {**self._place(item, kind), "part": part}
            yield self._event(f"{kind.part}.added", fields)

    def _delta(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        kind = _events_of(item)
        holder = kind.holder(item)
        if new := self._more(holder[kind.field]):
            fields = {
                **self._place(item, kind),
                "delta": new,
                **_logprobs(item, holder),
            }
            yield self._event(f"{kind.name}.delta", fields)

    def _close(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        kind = _events_of(item)
        place, holder = self._place(item, kind), kind.holder(item)
        fields = {kind.field: holder[kind.field], **_logprobs(item, holder)}
        if item["type"] == "function_call":
            fields["name"] = item["name"]
        yield self._event(f"{kind.name}.done", {**place, **fields})
        if kind.parts is not None:
            yield self._event(f"{kind.part}.done", {**place, "part": holder})
        fields = {"output_index": self._index, "item": item}
        yield self._event("response.output_item.done", fields)

    def _place(self, item: Mapping[str, Any], own: _TextEvents) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": self._index}
        return place if own.parts is None else {**place, own.index: 0}


def _logprobs(item: Mapping[str, Any], holder: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the log-probs for events of messages, possibly an empty list."""
    if item["type"] != "message":
        return {}
    return {"logprobs": holder.get("logprobs", [])}
