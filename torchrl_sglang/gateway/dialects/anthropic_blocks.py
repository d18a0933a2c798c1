"""Messages and tools of Anthropic's dialect, as a conversation.

Source: the Anthropic API reference, "Messages".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrl_sglang.chat.content import text_of
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.repeated import read_once
from torchrl_sglang.errors import ConfigurationError

_WISHES = ("strict", "input_examples")
"""Fields of tools without effect on a prompt."""


def read_system(given: Any) -> list[Message]:
    """Returns the system prompt, if any."""
    text = text_of(given, "system")
    return [{"role": "system", "content": text}] if text else []


@read_once
def read_message(name: str, given: Any) -> list[Message]:
    """Returns a message; tool results become separate messages."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise ConfigurationError(f"{name} must have the role user or assistant.")
    content = given.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise ConfigurationError(f"{name}.content must be a text or a list of blocks.")
    if role == "assistant":
        return [_assistant(name, content)]
    messages: list[Message] = []
    texts: list[Any] = []
    for block in content:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "content": _result(block, name),
                    "tool_call_id": str(block.get("tool_use_id", "")),
                }
            )
        else:
            texts.append(block)
    if texts or not messages:
        messages.append({"role": role, "content": _text(texts, name)})
    return messages


def _result(block: Mapping[str, Any], name: str) -> str:
    text = _text(block.get("content"), name)
    # Chat templates have no other place for it.
    return f"Error: {text}" if block.get("is_error") else text


def _text(content: Any, name: str) -> str:
    """Returns blocks as a text, documents among them."""
    if not isinstance(content, list):
        return text_of(content, name)
    return text_of([_as_text(block, name) for block in content], name)


def _as_text(block: Any, name: str) -> Any:
    """Returns a document, a search result or a tool's name as a block of text."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "document":
        parts = [_line(block, "title"), _line(block, "context"), _source(block, name)]
    elif kind == "search_result":
        content = text_of(block.get("content"), name)
        parts = [_line(block, "title"), _line(block, "source"), content]
    elif kind == "tool_reference":
        parts = [_line(block, "tool_name")]
    else:
        return block
    return {"type": "text", "text": "\n".join(part for part in parts if part)}


def _line(block: Mapping[str, Any], field: str) -> str:
    return str(block.get(field) or "")


def _source(block: Mapping[str, Any], name: str) -> str:
    """Returns the text of a document."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind in ("text", "content"):
        return text_of(source.get("data" if kind == "text" else "content"), name)
    raise ConfigurationError(
        f"{name} has a document whose source is of type {kind!r}; the policy takes "
        f"sources of type text or content, and reads no files."
    )


def _assistant(name: str, blocks: Sequence[Any]) -> Message:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise ConfigurationError(f"{name} has a tool_use without a name.")
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append(
                {"id": block.get("id", ""), "type": "function", "function": function}
            )
        elif kind == "thinking":
            # Its signature proves nothing: the message is compared with the record.
            reasoning.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts, name)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def without_deferred(tools: Any, messages: Sequence[Any]) -> Any:
    """Returns the tools except deferred tools without a reference so far.

    Clients send all tools with each request, and let the model search for tools with
    ``defer_loading``: it knows a tool after the ``tool_reference`` of a result, or
    after a call.
    """
    if not isinstance(tools, list) or not any(map(_is_deferred, tools)):
        return tools
    referenced = set(_references(messages))
    return [t for t in tools if not _is_deferred(t) or t.get("name") in referenced]


def _is_deferred(tool: Any) -> bool:
    return isinstance(tool, Mapping) and bool(tool.get("defer_loading"))


def _references(blocks: Any) -> Iterator[str]:
    """Yields the names of tools that blocks, or messages of blocks, refer to."""
    for block in blocks if isinstance(blocks, list) else ():
        if isinstance(block, Mapping):
            kind = block.get("type")
            name = {"tool_reference": "tool_name", "tool_use": "name"}.get(str(kind))
            if name is not None:
                yield str(block.get(name))
            else:
                yield from _references(block.get("content"))


def read_tools(tools: Any) -> list[Mapping[str, Any]]:
    """Returns the tools in OpenAI's form."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConfigurationError(f"tools={tools!r:.200} must be a list.")
    functions: list[Mapping[str, Any]] = []
    for tool in tools:
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str) or "input_schema" not in tool:
            raise ConfigurationError(
                f"{tool!r:.200} is not a tool with a name and an input_schema; those "
                f"that Anthropic defines, whose schemas its models know, are not "
                f"supported."
            )
        function = {
            "name": name,
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        functions.append({"type": "function", "function": function})
    return functions


def tool_wishes(tools: Sequence[Mapping[str, Any]], *, free: bool) -> list[str]:
    """Returns the fields of tools without effect.

    ``free``: whether calls are generated without a grammar, which would be strict.
    """
    wishes = _WISHES if free else _WISHES[1:]
    return [f"tools.{wish}" for wish in wishes if any(t.get(wish) for t in tools)]
