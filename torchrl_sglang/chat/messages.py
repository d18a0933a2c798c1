"""Messages of a conversation as a session keeps and compares them. Pure."""

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
"""``role``, ``content`` (a text), and where there are any ``reasoning_content``,
``tool_calls`` (with arguments as objects), ``name``, ``tool_call_id``, and the other
fields of TorchRL's ``History``."""

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
    """Returns the messages of an OpenAI chat request.

    Raises:
        ConfigurationError: if they are not messages, or hold something else than text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigurationError("messages must be a list of at least one message.")
    return [_from_openai(f"messages[{i}]", each) for i, each in enumerate(messages)]


def read_messages(value: Any, name: str) -> list[Message]:
    """Returns a user's text, a message, or messages in OpenAI's form as messages.

    They are read as those of a request, and keep other fields: chat templates may read
    them.

    Args:
        value: a text, a message or messages.
        name: of the value, for errors.

    Raises:
        ConfigurationError: if it is something else, or holds something else than text.
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
    """Returns a prompt without the None that a table writes for absent arguments.

    All messages of a table have the same keys. In messages of different keys, None
    among the arguments of a call is a value.
    """
    if not isinstance(prompt, (list, tuple)):
        return prompt
    keys = {frozenset(each) if isinstance(each, Mapping) else None for each in prompt}
    return list(map(without_none, prompt)) if len(keys) == 1 else prompt


def without_none(message: Any) -> Any:
    """Returns a message without the arguments of its calls that are None.

    Arguments that are a JSON text keep their null.
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
        return {k: _drop_none(each) for k, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_drop_none(each) for each in value]
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
    others = {
        key: value
        for key, value in given.items()
        if key not in _READ and value is not None
    }
    check_text(name, others)
    return {**others, **message}


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
    own = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or "", "type": "function", "function": own}


def read_arguments(given: Any) -> Any:
    """Returns arguments of a call, which clients send as the text of an object.

    What it returns is read as the same once more.
    """
    while isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            # A model may have written it, so it is kept as it is.
            break
    return given or {}


def without_stop(text: str, stop: Any) -> str:
    """Returns a text up to the stop string that ended it, if one did."""
    # The last token can go on behind it.
    return text.partition(stop)[0] if stop and isinstance(stop, str) else text


def conversation_keys(
    messages: Sequence[Message], setting: Any
) -> Iterator[tuple[int, bytes]]:
    """Yields for each number of leading messages a key of that conversation.

    Conversations have the same key if they differ only in what clients change on the
    way: white space around texts, ids of tool calls, the order of arguments, how whole
    numbers are written, and reasoning. ``setting`` is what else a prompt depends on.
    """
    keys = ConversationKeys(settings_key(setting))
    for number, message in enumerate(messages, 1):
        yield number, keys.add(message)


def settings_key(setting: Any) -> bytes:
    """Returns the key of a conversation without messages."""
    return _digest(b"", setting)


class ConversationKeys:
    """Keys of a conversation that grows, as :func:`conversation_keys` returns them.

    Args:
        key: of its settings.

    Attributes:
        key (bytes): of the conversation so far.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._number = 0
        self._calls: dict[str, str] = {}

    def add(self, message: Message) -> bytes:
        """Returns the key of the conversation with one more message."""
        self.key = _digest(self.key, _compared(message, self._calls))
        self._number += 1
        _note_calls(self._calls, message, self._number)
        return self.key

    def copy(self) -> ConversationKeys:
        """Returns a copy, which grows by itself."""
        copied = ConversationKeys(self.key)
        copied._number, copied._calls = self._number, dict(self._calls)
        return copied


def _note_calls(calls: dict[str, str], message: Message, number: int) -> None:
    for position, call in enumerate(message.get("tool_calls", ())):
        calls[str(call.get("id"))] = f"{number}.{position}"


def _compared(message: Message, calls: Mapping[str, str]) -> list[Any]:
    """Returns what is compared of a message; ``calls`` are those before it by id."""
    parts = [message["role"], message["content"].strip()]
    if message["role"] == "assistant":
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return [*parts, _plain_numbers(functions)]
    # A result is compared by the call that it answers, not by that call's id.
    call_id = message.get("tool_call_id")
    return [*parts, message.get("name"), calls.get(str(call_id), call_id)]


def _plain_numbers(value: Any) -> Any:
    """Returns JSON with whole numbers as integers, as JavaScript writes them."""
    if isinstance(value, Mapping):
        return {str(key): _plain_numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + _TO_JSON(value).encode(), digest_size=16).digest()


def common(known: Sequence[Message], said: Sequence[Message]) -> int:
    """Returns how many leading messages have the same key in two conversations."""
    mine: dict[str, str] = {}
    others: dict[str, str] = {}
    for number, (own, given) in enumerate(zip(known, said, strict=False)):
        if _compared(own, mine) != _compared(given, others):
            return number
        for calls, message in ((mine, own), (others, given)):
            _note_calls(calls, message, number)
    return min(len(known), len(said))


def begins_with(said: Sequence[Message], known: Sequence[Message]) -> bool:
    """Returns whether a conversation has the keys of another one up to that one's end.

    Messages that are the same are not looked at any closer, unlike by :func:`common`.
    """
    if len(said) < len(known):
        return False
    mine: dict[str, str] = {}
    others: dict[str, str] = {}
    same_ids = True
    for number, (own, given) in enumerate(zip(known, said, strict=False)):
        same = own is given or (own == given and has_texts_only(own))
        if not (same and same_ids) and _TO_JSON(_compared(own, mine)) != _TO_JSON(
            _compared(given, others)
        ):
            return False
        same_ids = same_ids and (same or "tool_calls" not in own)
        for calls, message in ((mine, own), (others, given)):
            _note_calls(calls, message, number)
    return True


def changes(known: Sequence[Message], said: Sequence[Message]) -> int | None:
    """Returns how many messages a client changed that have the same keys.

    ``None`` if it says other reasoning than is known; it may leave it out.
    """
    number = 0
    for own, given in zip(known, said, strict=True):
        if own == given:
            continue
        number += 1
        reasoning = str(given.get("reasoning_content", "")).split()
        if reasoning and reasoning != str(own.get("reasoning_content", "")).split():
            return None
    return number


def rename_calls(
    after: Sequence[Message], said: Sequence[Message], known: Sequence[Message]
) -> list[Message]:
    """Returns messages whose ids of earlier calls are those known, not those said."""
    names: dict[str, Any] = {}
    for own, given in zip(known, said, strict=True):
        pairs = zip(own.get("tool_calls", ()), given.get("tool_calls", ()), strict=True)
        names |= {str(call.get("id")): mine.get("id") for mine, call in pairs}
    renamed: list[Message] = []
    for message in after:
        for call in message.get("tool_calls", ()):
            # A client that uses an id once more means the later call.
            names.pop(str(call.get("id")), None)
        old = message.get("tool_call_id")
        new = names.get(str(old), old)
        renamed.append(message if new == old else {**message, "tool_call_id": new})
    return renamed
