"""Lines of a recording, made of the events of groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from torchrl_sglang.observer import GroupEnded, ResponseRecord, TurnRecord
from torchrl_sglang.recording.format import Bounds, key_of, pack
from torchrl_sglang.recording.rows import RowPacker, prompt_key, rows_of

PREVIEW = 200
"""Characters of a prompt in the line of its group."""

LEFT_OUT = ""
"""In place of a text that is not recorded."""


class Scores(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The log-probs that a trainer has of tokens."""

    rows: Sequence[Mapping[str, Any]]
    """Of each row its ``key``, and what :func:`mismatch_of` returns."""
    log_probs: Mapping[str, bytes]
    """Log-probs of the response of each row, as :func:`.pack` returns them, by key."""


def row_key(token_ids: Any) -> str:
    """Returns the identity of a row of a batch: a digest of all of its tokens.

    A trainer may cut rows, shuffle them, share them with other ranks or keep them in a
    buffer: its records of a row are found by this key.
    """
    return key_of(pack(token_ids, "i4"))


def summary_of(
    event: GroupEnded, responses: Sequence[ResponseRecord], bounds: Bounds
) -> dict[str, Any]:
    """Returns the line of a group, without the place of its texts."""
    first = next((turn for response in responses for turn in response.turns), None)
    prompt = _message(first.messages[-1], bounds) if first and first.messages else {}
    group, packed = event.group, RowPacker()
    return {
        "id": group.id,
        "position": group.position,
        **({"name": group.name} if group.name and bounds.prompts else {}),
        "time": [group.start, event.end],
        "status": event.status,
        "versions": list(event.versions),
        "prompt": prompt.get("content", LEFT_OUT)[:PREVIEW],
        "prompt_key": prompt_key(responses, packed),
        "responses": [
            {
                **_summary_of_response(response),
                "keys": [key_of(*packed.of(row)) for row in response.rows],
            }
            for response in responses
        ],
    }


def _summary_of_response(response: ResponseRecord) -> dict[str, Any]:
    tokens = prompt_tokens = cached = tools = count = 0
    total, cut, end = 0.0, response.truncated, "abort"
    versions: list[int] = []
    for turn in response.turns:
        done = turn.completion
        log_prob, number = sum_and_count(done.log_probs)
        total, count = total + log_prob, count + number
        tokens += len(done.token_ids)
        prompt_tokens += turn.prompt_tokens
        cached += done.cached_tokens
        for message in turn.messages:
            tools += message.get("role") == "tool"
        for version, _ in turn.spans:
            versions.append(version)
        end = done.finish_reason
        cut = cut or end == "length"
    return {
        "reward": response.reward,
        **({"rewards": dict(response.rewards)} if response.rewards else {}),
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "cached": cached,
        "turns": len(response.turns),
        "tools": tools,
        "cut": cut,
        "end": end,
        "log_prob": total / count if count else None,
        "versions": [min(versions), max(versions)] if versions else None,
    }


def sum_and_count(log_probs: Sequence[float] | None) -> tuple[float, int]:
    """Returns the sum of the finite log-probs, and their number."""
    if not log_probs:
        return 0.0, 0
    total = sum(log_probs)
    if math.isfinite(total):
        return total, len(log_probs)
    values = np.asarray(log_probs, "f8")
    finite = values[np.isfinite(values)]
    return float(finite.sum()), len(finite)


def mismatch_of(
    trainer: np.ndarray[Any, Any], engine: np.ndarray[Any, Any]
) -> dict[str, float]:
    r"""Compares two log-probs of the tokens that both know.

    Returns ``kl``, the mean of :math:`\log \pi_{engine} - \log \pi_{trainer}`, an
    estimate of their divergence, and ``gap``, the largest absolute difference.
    """
    both = np.isfinite(trainer) & np.isfinite(engine)
    if not both.any():
        return {}
    difference = engine[both] - trainer[both]
    return {"kl": float(difference.mean()), "gap": float(np.abs(difference).max())}


def texts_of(
    id_: int, responses: Sequence[ResponseRecord], bounds: Bounds
) -> dict[str, Any]:
    """Returns the conversations of a group with their tokens."""
    packed, pieces = RowPacker(), dict[bytes, int]()
    lines = []
    for response in responses:
        line: dict[str, Any] = {
            "turns": [_turn(turn, bounds) for turn in response.turns],
            "after": _messages(response.trailing, bounds),
            "truncated": response.truncated,
        }
        if bounds.prompts and bounds.responses:
            line["rows"] = rows_of(response, packed, pieces)
        lines.append(line)
    return {"id": id_, "responses": lines, "pieces": list(pieces)}


def _turn(turn: TurnRecord, bounds: Bounds) -> dict[str, Any]:
    completion = turn.completion
    line: dict[str, Any] = {
        "number": turn.number,
        "parent": turn.parent,
        "branch": turn.branch,
        "messages": _messages(turn.messages, bounds),
        "reply": _shown(turn.reply)
        if bounds.responses
        else {"role": "assistant", "content": LEFT_OUT},
        "time": [turn.start, turn.end],
        "reward": turn.reward,
        "trained": turn.is_trained,
        "finish": completion.finish_reason,
        "prompt_tokens": turn.prompt_tokens,
        "cached": completion.cached_tokens,
        "versions": [list(span) for span in turn.spans],
        "count": len(completion.token_ids),
    }
    if bounds.responses:
        line["ids"] = pack(completion.token_ids, "i4")
    if completion.log_probs is not None:
        line["log_probs"] = pack(completion.log_probs, "f4")
    columns = {
        name: pack(values.values, "f4")
        for name, values in completion.columns.items()
        if values.layout.shape == ()
    }
    return {**line, "columns": columns} if columns else line


def _messages(
    messages: Iterable[Mapping[str, Any]], bounds: Bounds
) -> list[dict[str, Any]]:
    return [_message(message, bounds) for message in messages]


def _message(message: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    role = str(message.get("role", ""))
    # What was said before may have examples, and what the policy wrote earlier.
    if not bounds.prompts or (role == "assistant" and not bounds.responses):
        return {"role": role, "content": LEFT_OUT}
    return _shown(message)


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message.get("role", ""))
    shown = {"role": role, "content": _text(message.get("content"))}
    for name in ("name", "reasoning_content", "tool_calls"):
        if message.get(name):
            shown[name] = message[name]
    return shown


def _text(content: Any) -> str:
    """Returns the text of a message's content, which may come in parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, (list, tuple)):
        parts = (
            part.get("text") if isinstance(part, Mapping) else part for part in content
        )
        return "".join(str(part or "") for part in parts)
    return str(content)
