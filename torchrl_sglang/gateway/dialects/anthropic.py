"""Anthropic's dialect: messages.

Source: the Anthropic API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrl_sglang.chat.call_grammars import FREE, ToolChoice
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.anthropic_blocks import (
    read_message,
    read_system,
    read_tools,
    tool_wishes,
    without_deferred,
)
from torchrl_sglang.gateway.dialects.base import (
    THINKING,
    AnswerInfo,
    Dialect,
    Endpoint,
    Failure,
    ItemEvents,
    Writer,
    event,
    pop_object,
)
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.policy import Sampling
from torchrl_sglang.gateway.request import Hint, Request, Usage, finish_reason
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.support.checks import nearest

_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}
"""Anthropic's name -> SGLang's."""

_ABOUT = frozenset(
    {
        *("service_tier", "inference_geo", "cache_control", "speed"),
        *("billing_policy", "diagnostics", "user_profile_id", "workspace_id"),
    }
)
"""Fields for Anthropic's accounting, which change no response."""

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""Type of thinking -> whether the model thinks."""

_DISPLAYS = (None, "summarized", "omitted")

_CHOICE = ("tool_choice",)


def read_messages(body: Any) -> Request:
    """Returns a request to ``/v1/messages``."""
    if not isinstance(body, Mapping) or body.get("max_tokens") is None:
        raise ConfigurationError("max_tokens is required.")
    return read_count(body)


def read_count(body: Any) -> Request:
    """Returns a request to ``/v1/messages/count_tokens``."""
    fields = dict(body)
    messages = read_system(fields.pop("system", None))
    turns = fields.pop("messages", None)
    if not isinstance(turns, list) or not turns:
        raise ConfigurationError("messages must be a list of at least one message.")
    for index, turn in enumerate(turns):
        messages += read_message(f"messages[{index}]", turn)
    offered, wish = (fields.pop("tools", None) or (), fields.pop("tool_choice", None))
    offered = without_deferred(offered, turns)
    tools = read_tools(() if _kind(wish) == "none" else offered)
    choice = _choice(wish, tools)
    hints, shown = _thinking(fields.pop("thinking", None))
    format_, effort = _output(fields.pop("output_config", None))
    edits = fields.pop("context_management", None)
    metadata = pop_object(fields, "metadata")
    ignored = tool_wishes(offered if tools else (), free=choice.is_free)
    if not _keeps_all(edits):
        ignored.append("context_management")
    schema = _schema(format_ or fields.pop("output_format", None))
    return Request(
        messages=messages,
        setting=PromptSettings(tools=tools),
        hints=[*hints, *effort],
        choice=choice,
        model=str(fields.pop("model", "")),
        user=None if metadata.get("user_id") is None else str(metadata["user_id"]),
        metadata=metadata,
        stream=bool(fields.pop("stream", None)),
        sampling=Sampling(params={**_params(fields), **schema}),
        reasoning=shown,
        edits=edits is not None,
        ignored=tuple(ignored),
    )


def _kind(given: Any) -> Any:
    """Returns the type of an option; the type alone may stand for the option."""
    return given.get("type") if isinstance(given, Mapping) else given


def _params(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters under SGLang's names."""
    params = {}
    for name, value in given.items():
        if value is None or name in _ABOUT or (name == "mcp_servers" and value == []):
            continue
        if name not in _SAMPLING:
            guess = nearest(name, _SAMPLING)
            raise ConfigurationError(
                f"{name!r} is not supported by this endpoint."
                + (f" Did you mean {guess!r}?" if guess else "")
                + f" A gateway with ignored_params=[{name!r}] leaves it out."
            )
        params[_SAMPLING[name]] = value
    return params


def _choice(given: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Returns the allowed tools, and whether a call is required."""
    kind = _kind(given)
    if kind not in (None, "auto", "any", "tool", "none"):
        raise ConfigurationError(
            f"tool_choice={given!r} must be of type auto, any, tool or none."
        )
    if kind in ("any", "tool") and not tools:
        raise ConfigurationError(f"tool_choice={given!r} needs tools.")
    alone = isinstance(given, Mapping) and given.get("disable_parallel_tool_use")
    if kind == "tool":
        name = given.get("name") if isinstance(given, Mapping) else None
        offered = [tool["function"]["name"] for tool in tools]
        if not isinstance(name, str) or name not in offered:
            raise ConfigurationError(
                f"tool_choice names {name!r}, and tools has {', '.join(offered)}."
            )
        return ToolChoice(required=True, names=(name,), parallel=False, fields=_CHOICE)
    required, parallel = kind == "any", not (alone and tools)
    if parallel and not required:
        return FREE
    return ToolChoice(required=required, parallel=parallel, fields=_CHOICE)


def _thinking(given: Any) -> tuple[list[Hint], bool]:
    """Returns the hints on thinking for templates, and whether thinking is returned."""
    kind = _kind(given)
    if kind is None:
        return [], True
    options = given if isinstance(given, Mapping) else {}
    display = options.get("display")
    if not isinstance(kind, str) or kind not in _THINKS:
        raise ConfigurationError(
            f"thinking={given!r:.200} must be of type {', '.join(_THINKS)}."
        )
    hints = [Hint(name="thinking", variables=THINKING, value=_THINKS[kind])]
    if display not in _DISPLAYS:
        # How reasoning is shown changes no response.
        hints.append(Hint(name="thinking.display", variables=(), value=display))
    if (budget := options.get("budget_tokens")) is not None:
        name, variables = "thinking.budget_tokens", ("thinking_budget",)
        hints.append(Hint(name=name, variables=variables, value=budget))
    return hints, display != "omitted"


def _output(given: Any) -> tuple[Any, list[Hint]]:
    """Returns the response format, and the hints on effort for templates."""
    if given is None:
        return None, []
    names = ("effort", "format", "task_budget")
    if not isinstance(given, Mapping) or not set(given) <= {*names}:
        raise ConfigurationError(
            f"output_config={given!r:.200} may have effort, format and task_budget."
        )
    hints = []
    if (effort := given.get("effort")) is not None:
        name, variables = "output_config.effort", ("reasoning_effort",)
        hints.append(Hint(name=name, variables=variables, value=effort))
    if (budget := given.get("task_budget")) is not None:
        hints.append(Hint(name="output_config.task_budget", variables=(), value=budget))
    return given.get("format"), hints


def _schema(given: Any) -> dict[str, Any]:
    """Returns the sampling parameter for a response's format."""
    if given is None:
        return {}
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if _kind(given) != "json_schema" or not isinstance(schema, Mapping):
        raise ConfigurationError(
            f"The output format {given!r:.200} must be of type json_schema, with a "
            f"schema."
        )
    return {"json_schema": json.dumps(schema)}


def _keeps_all(given: Any) -> bool:
    """Returns whether the edits of a conversation have no effect."""
    if given is None:
        return True
    edits = given.get("edits") if isinstance(given, Mapping) else given
    if not isinstance(edits, list | None):
        raise ConfigurationError(
            f"context_management={given!r:.200} must have a list of edits."
        )
    return all(
        _kind(edit) == "clear_thinking_20251015" and _kind(edit.get("keep")) == "all"
        for edit in edits or ()
        if isinstance(edit, Mapping)
    )


class MessageWriter(Writer):
    """Formats the answers to a request."""

    def __init__(self, request: Request, info: AnswerInfo) -> None:
        self._head = {
            "id": f"msg_{info.name}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        # No conversation is edited.
        edits: dict[str, Any] = {"context_management": {"applied_edits": []}}
        self._edits = edits if request.edits else {}
        self._reasoning = request.reasoning
        self._blocks = _BlockEvents()
        self._has_begun = False

    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer."""
        (turn,) = turns
        return {
            **self._head,
            "content": list(_blocks(turn.reply, self._reasoning)),
            **_stop(turn),
            "usage": _usage(usage, usage.response),
            **self._edits,
        }

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yields the start of the message; the cached tokens follow at its end."""
        yield from self._start(Usage(prompt=prompt_tokens, cached=0, response=0))

    def _start(self, usage: Usage) -> Iterator[bytes]:
        if self._has_begun:
            return
        self._has_begun = True
        unset = {"stop_reason": None, "stop_sequence": None}
        content: dict[str, Any] = {"content": [], **unset, "usage": _usage(usage, 0)}
        yield _event("message_start", message={**self._head, **content})

    def grow(self, number: int, draft: Draft) -> Iterator[bytes]:
        """Yields the new part of the response."""
        if draft.reasoning or draft.content:
            message = draft.message
            if not draft.content:
                del message["content"]
            yield from self._blocks.grow(list(_blocks(message, self._reasoning)))

    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events, or its remaining part."""
        (turn,) = turns
        blocks = list(_blocks(turn.reply, self._reasoning))
        remaining = [*self._blocks.grow(blocks), *self._blocks.close(blocks)]
        yield from self._start(usage)
        yield from remaining
        counted = _usage(usage, usage.response)
        yield _event("message_delta", delta=_stop(turn), usage=counted, **self._edits)
        yield _event("message_stop")


class _BlockEvents(ItemEvents):
    """Events of a message's blocks."""

    def _open(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        empty = {**block, **_EMPTY[block["type"]]}
        yield _event("content_block_start", index=self._index, content_block=empty)

    def _delta(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        kind, name, text = _text_of(block)
        new = self._more(text)
        # A text block has a delta even if it is empty.
        if new or (block["type"] == "text" and not text):
            yield self._of_block({"type": kind, name: new})

    def _close(self, block: Mapping[str, Any]) -> Iterator[bytes]:
        if block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield self._of_block(signature)
        yield _event("content_block_stop", index=self._index)

    def _of_block(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""Type of a block -> its fields before its content."""


def _text_of(block: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the type of a block's deltas, their field, and the whole text."""
    if block["type"] == "text":
        return "text_delta", "text", block["text"]
    if block["type"] == "thinking":
        return "thinking_delta", "thinking", block["thinking"]
    return "input_json_delta", "partial_json", json.dumps(block["input"])


def _blocks(said: Message, shown: bool) -> Iterator[dict[str, Any]]:
    """Yields the blocks of a response, optionally without its reasoning."""
    if reasoning := said.get("reasoning_content"):
        signature = base64.b64encode(
            hashlib.blake2b(reasoning.encode(errors="replace")).digest()
        )
        yield {
            "type": "thinking",
            "thinking": reasoning if shown else "",
            # Clients drop or rewrite blocks without a signature. A returned block is
            # compared with the record, so the signature proves nothing here.
            "signature": signature.decode(),
        }
    calls, content = said.get("tool_calls", ()), said.get("content")
    if content or (content is not None and not calls):
        yield {"type": "text", "text": content}
    for call in calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }


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
    return event({"type": kind, **content}, kind)


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
            # The wording that clients search for.
            tokens, longest = failure.too_long
            message = f"prompt is too long: {tokens} tokens > {longest} maximum"
        return {"type": "error", "error": {"type": failure.kind, "message": message}}
