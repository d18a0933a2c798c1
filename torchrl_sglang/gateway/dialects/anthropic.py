"""Anthropic's dialect: messages.

Source: the Anthropic API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from torchrl_sglang.chat.content import text_of
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.template import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import (
    AnswerInfo,
    Dialect,
    Endpoint,
    Failure,
    Writer,
)
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.request import Request, Usage, finish_reason
from torchrl_sglang.gateway.session import Turn
from torchrl_sglang.support.checks import nearest

_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}
"""Anthropic's name -> SGLang's."""

_ABOUT = frozenset({"metadata", "service_tier", "inference_geo", "cache_control"})
"""Accounting with Anthropic, which changes no response."""

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages(body: Any) -> Request:
    """Returns a request to ``/v1/messages``.

    Raises:
        ConfigurationError: for what is wrong or not supported.
    """
    if not isinstance(body, Mapping) or body.get("max_tokens") is None:
        raise ConfigurationError("max_tokens is required.")
    return read_count(body)


def read_count(body: Any) -> Request:
    """Returns a request to ``/v1/messages/count_tokens``.

    Raises:
        ConfigurationError: for what is wrong or not supported.
    """
    given = dict(body)
    messages = _system(given.pop("system", None))
    turns = given.pop("messages", None)
    if not isinstance(turns, list) or not turns:
        raise ConfigurationError("messages must be a list of at least one message.")
    for index, each in enumerate(turns):
        messages += _from_anthropic(f"messages[{index}]", each)
    if messages[-1]["role"] == "assistant":
        raise ConfigurationError(
            "The last message is the assistant's, and beginnings of responses are not "
            "supported; end with a message of the user."
        )
    tools = _tools(given.pop("tools", None) or (), given.pop("tool_choice", None))
    kwargs = _thinking(given.pop("thinking", None))
    model, stream = str(given.pop("model", "")), bool(given.pop("stream", None))
    params = {}
    for name, value in given.items():
        if value is None or name in _ABOUT:
            continue
        if name not in _SAMPLING:
            near = nearest(name, _SAMPLING)
            raise ConfigurationError(
                f"{name!r} is not supported by this endpoint."
                + (f" Did you mean {near!r}?" if near else "")
            )
        params[_SAMPLING[name]] = value
    return Request(
        messages=messages,
        setting=PromptSettings(tools=tools, template_kwargs=kwargs),
        sampling=Sampling(params=params),
        model=model,
        stream=stream,
    )


def _system(given: Any) -> list[Message]:
    text = text_of(given, "system")
    return [{"role": "system", "content": text}] if text else []


def _from_anthropic(name: str, given: Any) -> list[Message]:
    """Returns a message; results of tools are messages of their own."""
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
    found: list[Message] = []
    texts: list[Any] = []
    for block in content:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            found.append(
                {
                    "role": "tool",
                    "content": _result(block, name),
                    "tool_call_id": str(block.get("tool_use_id", "")),
                }
            )
        else:
            texts.append(block)
    if texts or not found:
        found.append({"role": role, "content": text_of(texts, name)})
    return found


def _result(block: Mapping[str, Any], name: str) -> str:
    text = text_of(block.get("content"), name)
    # Chat templates have no other place for it.
    return f"Error: {text}" if block.get("is_error") else text


def _assistant(name: str, blocks: Sequence[Any]) -> Message:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise ConfigurationError(f"{name} has a tool_use without a name.")
            own = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append(
                {"id": block.get("id", ""), "type": "function", "function": own}
            )
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts, name)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def _tools(tools: Any, choice: Any) -> list[Mapping[str, Any]]:
    """Returns the tools in OpenAI's form."""
    choice = {"type": choice} if not isinstance(choice, Mapping) else choice
    kind = choice.get("type")
    if kind == "none":
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConfigurationError(f"tools={tools!r:.200} must be a list.")
    alone = tools and choice.get("disable_parallel_tool_use")
    if kind not in (None, "auto") or alone:
        raise ConfigurationError(
            f"tool_choice={dict(choice)!r} is not supported: responses are sampled "
            f"freely; give auto or none."
        )
    found: list[Mapping[str, Any]] = []
    for tool in tools:
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str) or "input_schema" not in tool:
            raise ConfigurationError(
                f"{tool!r:.200} is not a tool with a name and an input_schema; tools "
                f"of Anthropic's own servers are not supported."
            )
        function = {
            "name": name,
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        found.append({"type": "function", "function": function})
    return found


def _thinking(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind is None:
        return {}
    # The variable that templates of several families know.
    return {"enable_thinking": kind != "disabled"}


class MessageWriter(Writer):
    """Writes the answers to one request.

    Args:
        request: of a client.
        info: of the answer.
    """

    def __init__(self, request: Request, info: AnswerInfo) -> None:
        self._head = {
            "id": f"msg_{info.name}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }

    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer."""
        (turn,) = turns
        return {
            **self._head,
            "content": list(_blocks(turn.reply)),
            **_stop(turn),
            "usage": _usage(usage, usage.response),
        }

    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events."""
        (turn,) = turns
        unset = {"stop_reason": None, "stop_sequence": None}
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            **unset,
            "usage": _usage(usage, 0),
        }
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(turn.reply)):
            empty, deltas = _as_deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        counted = {"output_tokens": usage.response}
        yield _event("message_delta", delta=_stop(turn), usage=counted)
        yield _event("message_stop")


def _blocks(said: Message) -> Iterator[dict[str, Any]]:
    if reasoning := said.get("reasoning_content"):
        signature = base64.b64encode(
            hashlib.blake2b(reasoning.encode(errors="replace")).digest()
        )
        yield {
            "type": "thinking",
            "thinking": reasoning,
            # Clients drop or rewrite blocks without one. What comes back is compared
            # with what was recorded, so it proves nothing here.
            "signature": signature.decode(),
        }
    calls = said.get("tool_calls", ())
    if said["content"] or not calls:
        yield {"type": "text", "text": said["content"]}
    for call in calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }


def _as_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a block before its content, and the content."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [delta, signature]
    text = json.dumps(block["input"])
    delta = {"type": "input_json_delta", "partial_json": text}
    return {**block, "input": {}}, [delta]


def _stop(turn: Turn) -> dict[str, Any]:
    matched = turn.completion.matched_stop
    if isinstance(matched, str) and not turn.reply.get("tool_calls"):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP[finish_reason(turn)], "stop_sequence": None}


def _usage(usage: Usage, response: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": response,
    }


def _event(kind: str, **content: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **content})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class Messages(Dialect):
    """Anthropic's messages."""

    endpoints = (
        Endpoint(path="/v1/messages", read=read_messages, write=MessageWriter),
        Endpoint(
            path="/v1/messages/count_tokens",
            read=read_count,
            count=lambda tokens: {"input_tokens": tokens},
        ),
    )

    def error(self, failure: Failure) -> dict[str, Any]:
        """Returns the content of an error."""
        message = failure.message
        if failure.too_long is not None:
            # The words that clients search for.
            tokens, longest = failure.too_long
            message = f"prompt is too long: {tokens} tokens > {longest} maximum"
        return {"type": "error", "error": {"type": failure.kind, "message": message}}
