"""Formats a turn as a response of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import AnswerInfo, Asked, Writer
from torchrl_sglang.gateway.dialects.openai import logprob_rows
from torchrl_sglang.gateway.dialects.responses.events import EventStream
from torchrl_sglang.gateway.dialects.responses.items import to_items
from torchrl_sglang.gateway.dialects.responses.read import LOGPROBS
from torchrl_sglang.gateway.dialects.responses.tools import find_tools
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.request import Request, Usage, finish_reason, usage_of
from torchrl_sglang.gateway.turns import Turn

TokenText = Callable[[int], str]

_DEFAULTS: dict[str, Any] = {
    "background": False,
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
}


class ResponseWriter(Writer):
    """Formats the answers to a request."""

    def __init__(self, request: Request, info: AnswerInfo) -> None:
        self._about = {**request.about, "created_at": info.created}
        self._info = info
        self._stream = EventStream(_head(info.name, self._about))

    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer."""
        (turn,) = turns
        name, text_of = self._info.name, self._info.token_text
        return _response(turn, name, self._about, usage, text_of)

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yields the events of a response that has begun."""
        yield from self._stream.begin()

    def grow(self, number: int, draft: Draft) -> Iterator[bytes]:
        """Yields the new part of the response."""
        # Log-probs are only available for whole responses.
        if _tells_logprobs(self._about):
            return
        message = draft.message
        if not draft.content:
            del message["content"]
        items = to_items(message, self._info.name, {}, summary=_summarizes(self._about))
        complete = [{**item, "status": "completed"} for item in items]
        yield from self._stream.begin()
        yield from self._stream.grow(complete)

    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events, or its remaining part."""
        yield from self._stream.end(self.answer(turns, usage))

    def waiting(self) -> bytes:
        """Returns events: some clients do not accept comments as keep-alive events."""
        return b"".join(self._stream.wait())

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """Returns the events of a stream whose answer failed."""
        return b"".join(self._stream.fail(error["error"]))


def kept_response(asked: Asked) -> dict[str, Any]:
    """Returns an earlier response on a client's request."""
    if asked.query.get("stream", "false") == "true":
        raise ConfigurationError(
            "stream=true is for responses that run in the background, which there are "
            "none of; ask for the response without it."
        )
    turn, about = asked.turn, dict(asked.turn.about)
    if LOGPROBS in asked.query.values():
        about["include"] = [*about.get("include", ()), LOGPROBS]
    return _response(turn, turn.name, about, usage_of([turn]), asked.token_text)


def _head(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a response without output."""
    fields = {key: value for key, value in about.items() if key != "include"}
    for key in ("text", "reasoning"):
        fields[key] = {**_DEFAULTS[key], **fields.get(key, {})}
    return {"id": f"resp_{name}", "object": "response", **_DEFAULTS, **fields}


def _summarizes(about: Mapping[str, Any]) -> bool:
    """Returns whether reasoning is returned as a summary."""
    reasoning = about.get("reasoning", {})
    return bool(reasoning.get("summary") or reasoning.get("generate_summary"))


def _tells_logprobs(about: Mapping[str, Any]) -> bool:
    return LOGPROBS in about.get("include", ()) or bool(about.get("top_logprobs"))


def _response(
    turn: Turn, name: str, about: Mapping[str, Any], usage: Usage, text_of: TokenText
) -> dict[str, Any]:
    is_cut = finish_reason(turn) == "length"
    tools, with_logprobs = find_tools(about.get("tools", ())), _tells_logprobs(about)
    items = to_items(turn.reply, name, tools, summary=_summarizes(about))
    for item in items:
        # OpenAI's custom calls have no status.
        if item["type"] != "custom_tool_call":
            item["status"] = "completed"
        if item["type"] == "message" and with_logprobs:
            logprobs = logprob_rows(turn.completion, text_of)
            item["content"][0]["logprobs"] = logprobs
    if is_cut and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return {
        **_head(name, about),
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(turn.created),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": _usage(turn, usage, text_of),
    }


def _usage(turn: Turn, usage: Usage, text_of: TokenText) -> dict[str, Any]:
    reasoning = turn.reply.get("reasoning_content")
    thought = _tokens_until(turn, reasoning, text_of) if reasoning else 0
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.response,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.prompt + usage.response,
    }


def _tokens_until(turn: Turn, text: str, text_of: TokenText) -> int:
    """Returns the number of tokens up to the end of a text in a response."""
    remaining = turn.text.find(text) + len(text)
    for number, token in enumerate(turn.completion.token_ids, 1):
        remaining -= len(text_of(token))
        if remaining <= 0:
            return number
    return len(turn.completion.token_ids)
