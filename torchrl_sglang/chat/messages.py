"""Messages of a conversation, in the form for storage and comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrl_sglang.chat.content import text_of
from torchrl_sglang.chat.repeated import has_texts_only, read_once
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.texts import check_text

Message = Mapping[str, Any]
"""``role``, ``content`` (a text), and optionally ``reasoning_content``, ``tool_calls``
(with arguments as objects), ``name``, ``tool_call_id``, and the other fields of
TorchRL's ``History``."""

ROLES = ("system", "user", "assistant", "tool")
_SAME_ROLE = {"developer": "system", "function": "tool", "ipython": "tool"}
_KEPT = ("name", "tool_call_id")
_READ = {
    *("role", "content", "reasoning_content", "reasoning", "tool_calls"),
    *("function_call", *_KEPT),
}
# json.dumps would make an encoder for each message.
_TO_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


def from_openai(messages: Any) -> list[Message]:
    """Returns the messages of an OpenAI chat request."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigurationError("messages must be a list of at least one message.")
    return [_from_openai(f"messages[{i}]", m) for i, m in enumerate(messages)]


def read_messages(value: Any, name: str) -> list[Message]:
    """Returns a prompt as messages: a text, a message, or messages in OpenAI's form.

    They are read like a request's messages, and keep other fields: chat templates may
    read them.
    """
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if isinstance(value, Mapping):
        return [_read_message(name, value)]
    if not isinstance(value, Sequence) or not value:
        raise ConfigurationError(
            f"{name} must be a text, a message with 'role' and 'content', or a list of "
            f"messages, got {value!r:.200}."
        )
    return [_read_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def from_row(prompt: Any) -> Any:
    """Returns a prompt without None in place of a table's absent arguments.

    All messages of a table have the same keys. In messages of different keys, None
    among the arguments of a call is a value.
    """
    if not isinstance(prompt, (list, tuple)):
        return prompt
    keys = {
        frozenset(message) if isinstance(message, Mapping) else None
        for message in prompt
    }
    return list(map(without_none, prompt)) if len(keys) == 1 else prompt


def without_none(message: Any) -> Any:
    """Returns a message without None among the arguments of its calls.

    Arguments in a JSON text keep their null.
    """
    if not isinstance(message, Mapping):
        return message
    calls = {
        key: _drop_none(message[key])
        for key in ("tool_calls", "function_call")
        if message.get(key)
    }
    return {**message, **calls}


def _drop_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _drop_none(item) for k, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_drop_none(item) for item in value]
    return value


def check_last_message(messages: Sequence[Message], name: str = "The prompt") -> None:
    """Raises :class:`.ConfigurationError` if the assistant wrote the last message."""
    if messages and messages[-1]["role"] == "assistant":
        raise ConfigurationError(
            f"{name} ends in a message of the assistant, and beginnings of responses "
            f"are not supported; end with a message of the user or of a tool."
        )


def _read_message(name: str, given: Any) -> Message:
    message = _from_openai(name, given)
    extra = {
        key: value
        for key, value in given.items()
        if key not in _READ and value is not None
    }
    check_text(name, extra)
    return {**extra, **message}


@read_once
def _from_openai(name: str, given: Any) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ConfigurationError(
            f"{name} must be an object with a role, got {given!r:.200}."
        )
    role = _SAME_ROLE.get(given["role"], given["role"])
    if role not in ROLES:
        raise ConfigurationError(
            f"{name} has the role {given['role']!r}; roles are {', '.join(ROLES)}."
        )
    message: dict[str, Any] = {
        "role": role,
        "content": text_of(given.get("content"), name),
    }
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if reasoning:
        message["reasoning_content"] = text_of(reasoning, name)
    if calls := _tool_calls(name, given):
        message["tool_calls"] = calls
    message |= {key: given[key] for key in _KEPT if given.get(key)}
    if message.keys() == {"role", "content"} and "content" not in given:
        raise ConfigurationError(f"{name} has no content; it has {', '.join(given)}.")
    check_text(name, message)
    return message


def _tool_calls(name: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = given.get("tool_calls")
    if not calls and given.get("function_call"):
        # OpenAI's form before there were several calls.
        calls = [given["function_call"]]
    if calls and not isinstance(calls, (list, tuple)):
        raise ConfigurationError(f"{name}.tool_calls must be a list.")
    return [
        _tool_call(f"{name}.tool_calls[{i}]", call)
        for i, call in enumerate(calls or ())
    ]


def _tool_call(name: str, call: Any) -> dict[str, Any]:
    # TorchRL and some datasets have calls without an object around the function.
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(f"{name} must be a function call with a name.")
    for other in ("parameters", "input"):
        if function.get(other) and "arguments" not in function:
            raise ConfigurationError(
                f"{name} has {other!r} instead of 'arguments'; rename it."
            )
    arguments = read_arguments(function.get("arguments"))
    called = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or "", "type": "function", "function": called}


def read_arguments(arguments: Any) -> Any:
    """Parses arguments of a call, which clients send as the JSON text of an object.

    The function is idempotent.
    """
    while isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            # Possibly the model's own text, so it is kept.
            break
    return arguments or {}


def without_stop(text: str, stop: Any) -> str:
    """Returns a text up to its stop string, if any."""
    # The last token can extend beyond it.
    return text.partition(stop)[0] if stop and isinstance(stop, str) else text


def conversation_keys(
    messages: Sequence[Message], setting: Any
) -> Iterator[tuple[int, bytes]]:
    """Yields numbers of leading messages, with the key of their conversation.

    Conversations have the same key if they differ only in typical client changes: white
    space around texts, ids of tool calls, the order of arguments, the format of whole
    numbers, and reasoning. ``setting`` has the other inputs of a prompt.
    """
    keys = ConversationKeys(settings_key(setting))
    for number, message in enumerate(messages, 1):
        yield number, keys.add(message)


def settings_key(setting: Any) -> bytes:
    """Returns the key of a conversation without messages."""
    return _digest(b"", setting)


class ConversationKeys:
    """Keys of a growing conversation, as :func:`conversation_keys` returns them.

    Attributes:
        key (bytes): key of the conversation so far.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._number = 0
        self._calls: dict[str, str] = {}

    def add(self, message: Message) -> bytes:
        """Returns the key of the conversation with a further message."""
        self.key = _digest(self.key, _compared(message, self._calls))
        self._number += 1
        _note_calls(self._calls, message, self._number)
        return self.key

    def copy(self) -> ConversationKeys:
        """Returns an independent copy."""
        copied = ConversationKeys(self.key)
        copied._number, copied._calls = self._number, dict(self._calls)
        return copied


def _note_calls(calls: dict[str, str], message: Message, number: int) -> None:
    for position, call in enumerate(message.get("tool_calls", ())):
        calls[str(call.get("id"))] = f"{number}.{position}"


def _compared(message: Message, calls: Mapping[str, str]) -> list[Any]:
    """Returns the compared fields of a message; ``calls`` has earlier calls by id."""
    parts = [message["role"], message["content"].strip()]
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return [*parts, _plain_numbers(functions)]
    # A result is compared by its call, not by the call's id.
    call_id = message.get("tool_call_id")
    return [*parts, message.get("name"), calls.get(str(call_id), call_id)]


def _plain_numbers(value: Any) -> Any:
    """Returns JSON with whole numbers as integers, as JavaScript writes them."""
    if isinstance(value, Mapping):
        return {str(key): _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + _TO_JSON(value).encode(), digest_size=16).digest()


def common(known: Sequence[Message], said: Sequence[Message]) -> int:
    """Returns the number of leading messages with equal keys in two conversations."""
    known_calls: dict[str, str] = {}
    said_calls: dict[str, str] = {}
    same_ids = True
    for number, (stored, other) in enumerate(zip(known, said, strict=False)):
        # Identical messages are not examined further.
        is_same = stored is other or (stored == other and has_texts_only(stored))
        if not (is_same and same_ids) and _TO_JSON(
            _compared(stored, known_calls)
        ) != _TO_JSON(_compared(other, said_calls)):
            return number
        same_ids = same_ids and (is_same or "tool_calls" not in stored)
        for calls, message in ((known_calls, stored), (said_calls, other)):
            _note_calls(calls, message, number)
    return min(len(known), len(said))


def begins_with(said: Sequence[Message], known: Sequence[Message]) -> bool:
    """Returns whether a conversation starts with the keys of another."""
    return len(said) >= len(known) and common(known, said) == len(known)


def changes(known: Sequence[Message], said: Sequence[Message]) -> int | None:
    """Returns the number of client-changed messages with equal keys.

    ``None`` if the client's reasoning differs; it may omit reasoning.
    """
    number = 0
    for stored, other in zip(known, said, strict=True):
        if stored == other:
            continue
        number += 1
        reasoning = str(other.get("reasoning_content", "")).split()
        if reasoning and reasoning != str(stored.get("reasoning_content", "")).split():
            return None
    return number


def rename_calls(
    after: Sequence[Message], said: Sequence[Message], known: Sequence[Message]
) -> list[Message]:
    """Returns messages with the original ids of earlier calls, not the client's."""
    names: dict[str, Any] = {}
    for stored, other in zip(known, said, strict=True):
        pairs = zip(
            stored.get("tool_calls", ()), other.get("tool_calls", ()), strict=True
        )
        names |= {str(call.get("id")): original.get("id") for original, call in pairs}
    renamed: list[Message] = []
    for message in after:
        for call in message.get("tool_calls", ()):
            # Clients with a reused id mean the later call.
            names.pop(str(call.get("id")), None)
        old = message.get("tool_call_id")
        new = names.get(str(old), old)
        renamed.append(message if new == old else {**message, "tool_call_id": new})
    return renamed
