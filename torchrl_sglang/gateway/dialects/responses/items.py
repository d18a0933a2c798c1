"""Conversion between items of ``/v1/responses`` and messages.

An assistant's message has up to three kinds of items: reasoning, text and calls. Items
of a message are consecutive, or share an id.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_sglang.chat.content import text_of
from torchrl_sglang.chat.messages import ROLES, Message, read_arguments
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.dialects.base import Asked, Recall
from torchrl_sglang.gateway.dialects.responses.tools import (
    INPUT,
    Tool,
    find_tools,
    model_name,
)
from torchrl_sglang.gateway.turns import Turn

_ITEM = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{24})([0-9a-f]{4})")
_RESPONSE = re.compile(r"resp_([0-9a-f]{24})")

MOST_ITEMS = 100

_OTHER = "_json"
"""Suffix of the id of a custom call with other arguments than its text.

Its text is their JSON then; the suffix distinguishes it from an equal plain text.
"""

_WRITTEN = "text:"
"""Prefix of reasoning in the field for encrypted content; nothing here is secret."""

_SAME_ROLE = {"developer": "system"}

_UNKNOWN = (
    "It was not stored, was deleted, or belongs to another session; send all items of "
    "the conversation as input instead."
)


def item_id(prefix: str, name: str, index: int) -> str:
    """Returns the id of an item of an answer."""
    return f"{prefix}_{name}{index:04x}"


def find_response(given: str, recall: Recall) -> Turn:
    """Returns the turn of the response with an id."""
    match = _RESPONSE.fullmatch(given)
    turn = recall(match[1]) if match else None
    if turn is None:
        raise GatewayError(
            f"Response with id {given!r:.80} not found. {_UNKNOWN}", status=404
        )
    return turn


def to_items(
    message: Message, name: str, tools: Mapping[str, Tool], *, summary: bool = False
) -> list[dict[str, Any]]:
    """Returns the items of an assistant's message.

    Reasoning is a summary for clients that show only summaries.
    """
    items: list[dict[str, Any]] = []
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
    if reasoning:
        items.append(
            {"id": item_id("rs", name, 0), **_reasoning_item(reasoning, summary)}
        )
    content = message.get("content")
    if content or (content is not None and not calls):
        part = {"type": "output_text", "text": content, "annotations": []}
        item = {"type": "message", "role": "assistant", "content": [part]}
        items.append({"id": item_id("msg", name, len(items)), **item})
    for call in calls:
        items.append(_call_item(call, name, len(items), tools))
    return items


def _reasoning_item(text: str, summary: bool) -> dict[str, Any]:
    kind = "summary_text" if summary else "reasoning_text"
    part = {"type": kind, "text": text}
    item = {"summary": [part]} if summary else {"summary": [], "content": [part]}
    # Some clients keep nothing else.
    encoded = base64.b64encode(text.encode(errors="replace")).decode()
    return {"type": "reasoning", **item, "encrypted_content": _WRITTEN + encoded}


def _call_item(
    call: Mapping[str, Any], name: str, index: int, tools: Mapping[str, Tool]
) -> dict[str, Any]:
    function, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = tools.get(function)
    about = {"call_id": call["id"], "name": tool.name if tool else function}
    if tool is not None and tool.namespace:
        about["namespace"] = tool.namespace
    if tool is None or not tool.is_custom:
        item = {"type": "function_call", "arguments": json.dumps(arguments)}
        return {"id": item_id("fc", name, index), **item, **about}
    text = arguments.get(INPUT) if isinstance(arguments, Mapping) else None
    if not isinstance(text, str) or len(arguments) != 1:
        about["call_id"] += _OTHER
        text = json.dumps(arguments)
    item = {"type": "custom_tool_call", "input": text}
    return {"id": item_id("ctc", name, index), **item, **about}


def read_items(given: Any, recall: Recall) -> list[Message]:
    """Returns the messages of a request's input."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ConfigurationError(
            f"input={given!r:.50} must be a text or a list of items."
        )
    reader = _ItemReader(recall)
    for index, item in enumerate(given):
        reader.read(f"input[{index}]", item)
    return list(reader.messages)


def earlier_messages(given: Any, recall: Recall) -> list[Message]:
    """Returns the conversation up to an earlier response, without its instructions."""
    try:
        turn = find_response(str(given), recall)
    except GatewayError as error:
        raise GatewayError(
            f"Previous response with id {given!r:.80} not found. {_UNKNOWN}",
            status=400,
            code="previous_response_not_found",
            param="previous_response_id",
        ) from error
    prompt = turn.prompt.messages
    return [*(prompt[1:] if turn.about.get("instructions") else prompt), turn.reply]


class _ItemReader:
    """Collects the messages of items."""

    def __init__(self, recall: Recall) -> None:
        self.messages: list[dict[str, Any]] = []
        self._recall = recall
        self._open: dict[str, Any] | None = None
        self._open_name = ""
        self._answers: dict[str, dict[str, Any]] = {}
        self._seen: set[str] = set()

    def read(self, where: str, item: Any) -> None:
        """Reads an item; ``where`` is its position in the request."""
        if not isinstance(item, Mapping):
            raise ConfigurationError(f"{where} must be an object.")
        # The types of messages and references may be omitted.
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference":
            self._read_reference(where, item)
        elif kind == "message":
            self._read_message(where, item)
        elif kind == "reasoning":
            message = self._assistant(item, kind)
            earlier = message.get("reasoning_content", "")
            if text := earlier + _reasoning(item, where):
                message["reasoning_content"] = text
        elif kind in ("function_call", "custom_tool_call"):
            call = _read_call(where, item, kind)
            self._assistant(item, kind).setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._read_output(where, item)
        else:
            raise ConfigurationError(
                f"{where} has the type {kind!r:.50}; items are messages, reasoning, "
                f"calls of functions and custom tools, and their outputs. Tools "
                f"on OpenAI's servers are not supported; leave their items out."
            )

    def _read_reference(self, where: str, item: Mapping[str, Any]) -> None:
        reference = item.get("id")
        match = _ITEM.fullmatch(reference) if isinstance(reference, str) else None
        turn = self._recall(match[1]) if match else None
        for earlier in turn_items(turn) if turn else ():
            if earlier["id"] == reference:
                self.read(where, earlier)
                return
        raise GatewayError(
            f"Item with id {reference!r:.80} not found. {_UNKNOWN}",
            status=404,
            param="input",
        )

    def _read_message(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        role = _SAME_ROLE.get(role, role) if isinstance(role, str) else role
        if role not in ROLES or role == "tool":
            raise ConfigurationError(
                f"{where} has the role {role!r:.50}; roles are user, assistant, system "
                f"and developer."
            )
        text = text_of(item.get("content"), where)
        if role == "assistant":
            self._assistant(item, "message")["content"] += text
        else:
            self._append({"role": role, "content": text})

    def _read_output(self, where: str, item: Mapping[str, Any]) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise ConfigurationError(f"{where}.call_id={call_id!r:.50} must be a text.")
        self._append(
            {
                "role": "tool",
                "content": text_of(item.get("output"), where),
                "tool_call_id": call_id.removesuffix(_OTHER),
            }
        )

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._open = None

    def _assistant(self, item: Mapping[str, Any], kind: str) -> dict[str, Any]:
        reference = item.get("id")
        match = _ITEM.fullmatch(reference) if isinstance(reference, str) else None
        name = match[1] if match else ""
        if name and reference in self._seen:
            raise ConfigurationError(
                f"Duplicate item found with id {reference!r}. Remove duplicate items "
                f"from your input and try again."
            )
        self._seen.add(str(reference))
        if name and name in self._answers:
            # Results may stand between the calls of an answer.
            return self._answers[name]
        message = self._open
        if (
            message is None
            or (name and self._open_name)
            # The first item kind of a response begins another message.
            or (not kind.endswith("_call") and _has_text_or_calls(message))
        ):
            message = {"role": "assistant", "content": ""}
            self._append(message)
            self._open, self._open_name = message, ""
        if name:
            self._answers[name], self._open_name = message, name
        return message


def turn_items(turn: Turn) -> list[dict[str, Any]]:
    """Returns the items of the answer to a kept request."""
    return to_items(turn.reply, turn.name, find_tools(turn.about.get("tools", ())))


def _has_text_or_calls(message: Message) -> bool:
    return bool(message["content"] or message.get("tool_calls"))


def input_items(asked: Asked) -> dict[str, Any]:
    """Returns the conversation of an earlier response, without its instructions."""
    turn, query = asked.turn, asked.query
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isdecimal() and 1 <= int(limit) <= MOST_ITEMS):
        raise ConfigurationError(
            f"limit={limit!r:.50} must be an integer in [1, {MOST_ITEMS}]."
        )
    if order not in ("asc", "desc"):
        raise ConfigurationError(f"order={order!r:.50} must be 'asc' or 'desc'.")
    items = _told_items(turn)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    page = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }


def _told_items(turn: Turn) -> list[dict[str, Any]]:
    """Returns the items of the prompt of a turn."""
    tools = find_tools(turn.about.get("tools", ()))
    messages = turn.prompt.messages
    if turn.about.get("instructions"):
        messages = messages[1:]
    items: list[dict[str, Any]] = []
    custom: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            converted = to_items(message, turn.name, tools)
            custom |= {item["call_id"] for item in converted if "input" in item}
        else:
            converted = [_told_item(message, custom)]
        items += converted
    # Clients page by ids, which differ from the ids of outputs.
    return [
        {**item, "id": item_id("in", turn.name, index)}
        for index, item in enumerate(items)
    ]


def _told_item(message: Message, custom: set[str]) -> dict[str, Any]:
    if message["role"] != "tool":
        part = {"type": "input_text", "text": message["content"]}
        about = {"role": message["role"], "status": "completed"}
        return {"type": "message", "content": [part], **about}
    call_id = str(message.get("tool_call_id", ""))
    other = call_id + _OTHER
    is_custom = call_id in custom or other in custom
    return {
        "type": "custom_tool_call_output" if is_custom else "function_call_output",
        "call_id": other if other in custom else call_id,
        "output": message["content"],
    }


def _read_call(where: str, item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    name, call_id = item.get("name"), item.get("call_id") or ""
    if not isinstance(name, str) or not name or not isinstance(call_id, str):
        raise ConfigurationError(
            f"{where} is a {kind}, which must have a name and a call_id."
        )
    namespace = item.get("namespace")
    if kind == "function_call":
        arguments = read_arguments(item.get("arguments"))
    else:
        arguments = _custom_arguments(item.get("input"), call_id, where)
    call = {
        "name": model_name(name, namespace if isinstance(namespace, str) else None),
        "arguments": arguments,
    }
    return {"id": call_id.removesuffix(_OTHER), "type": "function", "function": call}


def _custom_arguments(text: Any, call_id: str, where: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise ConfigurationError(f"{where}.input={text!r:.50} must be a text.")
    arguments = read_arguments(text) if call_id.endswith(_OTHER) else None
    return arguments if isinstance(arguments, dict) else {INPUT: text}


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Returns the text of reasoning, from any field kept by the client."""
    if item.get("content"):
        return _texts(item["content"], where)
    encoded = item.get("encrypted_content")
    if isinstance(encoded, str) and encoded.startswith(_WRITTEN):
        try:
            return base64.b64decode(encoded[len(_WRITTEN) :], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            pass
    return _texts(item.get("summary") or (), where)


def _texts(parts: Any, where: str) -> str:
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise ConfigurationError(f"{where} has reasoning that is not a list of parts.")
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ConfigurationError(f"{where} has a part of reasoning without a text.")
        texts.append(text)
    return "".join(texts)
