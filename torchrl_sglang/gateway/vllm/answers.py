"""Answers in vLLM's form: tokens, log-probs and further quantities of each token."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from torchrl_sglang.gateway.dialects.base import AnswerInfo, Writer, event
from torchrl_sglang.gateway.dialects.openai import CompletionWriter, usage_fields
from torchrl_sglang.gateway.drafts import Draft
from torchrl_sglang.gateway.request import Request, Usage, finish_reason
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.requests.token_columns import ROUTED_EXPERTS, SAMPLING_SUPPORT
from torchrl_sglang.requests.token_values import concatenate
from torchrl_sglang.types import Completion

UNKNOWN = -9999.0
"""vLLM's log-prob of a token without one."""


def token_name(token: int) -> str:
    """Returns vLLM's text for a token that is not decoded."""
    return f"token_id:{token}"


# An answer has some for each token, which the garbage collector need not track.
class _Entry(msgspec.Struct, frozen=True, gc=False):
    """Log-prob of a token, in JSON."""

    token: str
    logprob: float
    bytes: None = None


class _Row(msgspec.Struct, frozen=True, gc=False):
    """Log-prob of a sampled token, and of the likeliest tokens in its place."""

    token: str
    logprob: float
    top_logprobs: tuple[_Entry, ...]
    bytes: None = None


class GenerateWriter(Writer):
    """Formats the answers of ``/inference/v1/generate``.

    A stream has each response in one event: their tokens are whole.
    """

    def __init__(self, request: Request, info: AnswerInfo) -> None:
        self._request, self._info = request, info

    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer."""
        first = turns[0]
        return {
            **self._head,
            "model": self._request.about["model"],
            "created": self._info.created,
            "choices": self._choices(turns),
            "usage": usage_fields(usage),
            "prompt_logprobs": prompt_logprobs(first, self._info.token_text),
            "prompt_token_ids": prompt_ids(first, self._request),
            "kv_transfer_params": None,
        }

    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events."""
        head, ids = self._head, prompt_ids(turns[0], self._request)
        first = {} if ids is None else {"prompt_token_ids": ids}
        for choice in self._choices(turns):
            yield event({**head, **first, "choices": [choice]})
            first = {}
        if self._request.usage:
            yield event({**head, "choices": [], "usage": usage_fields(usage)})
        yield b"data: [DONE]\n\n"

    @property
    def _head(self) -> dict[str, Any]:
        return {"request_id": self._request.request_id or self._info.name}

    def _choices(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        rows = None
        choices = []
        for index, turn in enumerate(turns):
            if self._request.logprobs:
                rows = {"content": self._rows(turn.completion)}
            choices.append(
                {
                    "index": index,
                    "logprobs": rows,
                    "finish_reason": turn.completion.finish_reason,
                    **token_fields(turn, self._request),
                }
            )
        return choices

    def _rows(self, done: Completion) -> list[_Row]:
        """Returns log-probs: each token, and then the likeliest other tokens."""
        values = done.log_probs or [math.nan] * len(done.token_ids)
        sampled = _entries(done.token_ids, values)
        if done.top_token_ids is None or done.top_log_probs is None:
            return [_Row(s.token, s.logprob, (s,)) for s in sampled]
        number = max(self._request.sampling.top_logprobs, 1)
        tops = zip(sampled, done.top_token_ids, done.top_log_probs, strict=True)
        rows = []
        for entry, ids, log_probs in tops:
            rivals = [e for e in _entries(ids, log_probs) if e.token != entry.token]
            entries = (entry, *rivals[: number - 1])
            rows.append(_Row(entry.token, entry.logprob, entries))
        return rows


class VLLMWriter(CompletionWriter):
    """Formats OpenAI's completions with vLLM's fields."""

    def __init__(self, request: Request, info: AnswerInfo) -> None:
        super().__init__(request, info)
        self._about = {**self._about, "model": request.about["model"]}
        self._is_chat = request.text is None and request.token_ids is None
        self._with_ids = bool(request.about.get("return_token_ids"))
        self._decode = info.token_text
        if request.about.get("return_tokens_as_token_ids"):
            self._token_text = token_name

    def answer(self, turns: Sequence[Turn], usage: Usage) -> dict[str, Any]:
        """Returns the whole answer."""
        number = self._request.sampling.number
        # One of each prompt.
        firsts = turns[::number]
        prompt = sum(turn.prompt.num_tokens for turn in firsts)
        cached = sum(turn.completion.cached_tokens for turn in firsts)
        answer = super().answer(turns, replace(usage, prompt=prompt, cached=cached))
        about = [
            {
                "prompt_logprobs": prompt_logprobs(turn, self._decode),
                "prompt_token_ids": prompt_ids(turn, self._request),
            }
            for turn in firsts
        ]
        if self._is_chat:
            return {**answer, **about[0]}
        choices = [
            {**choice, **about[index // number]}
            for index, choice in enumerate(answer["choices"])
        ]
        return {**answer, "choices": choices}

    def events(self, turns: Sequence[Turn], usage: Usage) -> Iterator[bytes]:
        """Yields the answer as server-sent events, or its remaining part."""
        if self._is_chat and self._with_ids:
            ids = prompt_ids(turns[0], self._request)
            self._about = {**self._about, "prompt_token_ids": ids}
        yield from super().events(turns, usage)

    def _choice(self, turn: Turn) -> dict[str, Any]:
        choice = super()._choice(turn)
        if self._is_chat:
            _name_reasoning(choice["message"])
        return choice

    def _new(self, index: int, draft: Draft) -> Iterator[dict[str, Any]]:
        for new in super()._new(index, draft):
            if self._is_chat:
                _name_reasoning(new["delta"])
            yield new

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        logprobs = super()._logprobs(turn)
        if logprobs is not None and not self._is_chat:
            sampled = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
            logprobs["top_logprobs"] = [
                {token: value, **tops}
                for (token, value), tops in zip(
                    sampled, logprobs["top_logprobs"], strict=True
                )
            ]
            start = len(self._request.text or "")
            offsets = logprobs["text_offset"]
            logprobs["text_offset"] = [offset - start for offset in offsets]
        return logprobs

    def _end(self, turn: Turn) -> dict[str, Any]:
        end, done = super()._end(turn), turn.completion
        reason = "abort" if done.finish_reason == "abort" else finish_reason(turn)
        stop = done.matched_stop
        # vLLM gives no stop reason for the model's own end.
        ids = self._request.sampling.params.get("stop_token_ids", ())
        stop = stop if isinstance(stop, str) or stop in ids else None
        end |= {"finish_reason": reason, "stop_reason": stop}
        if self._with_ids:
            end |= token_fields(turn, self._request)
            if not self._is_chat:
                end["prompt_token_ids"] = prompt_ids(turn, self._request)
        return end


def prompt_ids(turn: Turn, request: Request) -> Sequence[int] | None:
    """Returns the tokens of the prompt, if the client asks for tokens."""
    return turn.prompt.token_ids if request.about.get("return_token_ids") else None


def _name_reasoning(message: dict[str, Any]) -> None:
    """Adds reasoning under vLLM's name, too."""
    if "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]


def token_fields(turn: Turn, request: Request) -> dict[str, Any]:
    """Returns a response's tokens, their weight versions and further quantities."""
    done = turn.completion
    fields: dict[str, Any] = {
        "token_ids": done.token_ids,
        "weight_version": done.weight_version,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end}
            for span in done.versions
        ],
        "mixed_state": done.mixed_state,
    }
    if ROUTED_EXPERTS in done.columns:
        start = request.about.get("routed_experts_prompt_start", 0)
        fields[ROUTED_EXPERTS] = routed_experts(done, start)
    if SAMPLING_SUPPORT in done.columns:
        support = done.columns[SAMPLING_SUPPORT]
        ends = np.cumsum(support.counts if support.counts is not None else [])[:-1]
        fields["sampling_mask"] = [p.tolist() for p in np.split(support.values, ends)]
    return fields


def routed_experts(completion: Completion, start: int) -> str:
    """Returns the experts of all tokens but the last, as base64 of a ``.npy`` file.

    Its shape is ``(tokens - 1 - start, layers, chosen)``.
    """
    parts = [completion.columns[ROUTED_EXPERTS]]
    if ROUTED_EXPERTS in completion.prompt_columns:
        parts.insert(0, completion.prompt_columns[ROUTED_EXPERTS])
    values = concatenate(parts).values[start:-1]
    buffer = io.BytesIO()
    np.save(buffer, values)
    return base64.b64encode(buffer.getvalue()).decode()


def prompt_logprobs(
    turn: Turn, decode: Callable[[int], str]
) -> list[dict[str, Any] | None] | None:
    """Returns each prompt token's log-prob, by its id; ``None`` for the first token."""
    values = turn.completion.prompt_log_probs
    if values is None:
        return None
    pairs = zip(turn.prompt.token_ids, values, strict=True)
    return [
        {str(token): {"logprob": _finite(value), "rank": None, "decoded_token": text}}
        if index
        else None
        for index, (token, value) in enumerate(pairs)
        for text in [decode(token)]
    ]


def _entries(ids: Sequence[int], values: Sequence[float]) -> list[_Entry]:
    # Inlines token_name(): an answer has hundreds.
    return [
        _Entry(f"token_id:{token}", value if math.isfinite(value) else UNKNOWN)
        for token, value in zip(ids, values, strict=True)
    ]


def _finite(value: float) -> float:
    return max(value, UNKNOWN) if math.isfinite(value) else UNKNOWN
