"""The table of groups, and the conversations of a group."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any

from torchrl_sglang.recording.format import HELD_OUT, unpack
from torchrl_sglang.recording.lines import number
from torchrl_sglang.recording.reading import MOST_OF_LINE, Recording
from torchrl_sglang.viewer.curves import extremes
from torchrl_sglang.viewer.run import MALFORMED, Group, RunData

SHOWN_CHARACTERS = 120
"""Characters of a prompt in the table."""

SEARCH_SECONDS = 5.0
"""Longest time of a search."""

MOST_ROWS = 20_000
"""Most groups in the table of a page, the newest groups."""

LONGEST_SHARE = 0.1
"""Share of the groups with the longest responses, or the largest mismatch."""

FILTERS = {
    "wrong": ("All wrong", "every response has the run's worst reward"),
    "right": ("All right", "every response has the run's best reward"),
    "mixed": ("Mixed", "rewards differ, so that the group teaches something"),
    "truncated": ("Truncated", "a response was cut off"),
    "stale": ("Stale", "a token is older than the weights at its batch"),
    "untrained": ("Not trained", "filtered out, too old, or no batch had it yet"),
    "longest": ("Longest", "the tenth with the most tokens"),
    "mismatch": ("Largest mismatch", "the tenth where log-probs are furthest apart"),
    "tools": ("Tool calls", "a response called tools"),
    "held-out": ("Held out", "responses to prompts that are not trained on"),
}
"""Name of a filter -> its label and description."""

COLUMNS = (
    "id",
    "batch",
    "status",
    "prompt",
    "responses",
    "reward",
    "best",
    "worst",
    "advantage",
    "tokens",
    "turns",
    "truncated",
    "age",
    "gap",
    "seconds",
    "prompt_key",
    "tags",
)
"""Values of a row of the table."""


def table_of(run: RunData) -> dict[str, Any]:
    """Returns the rows of the newest groups, with their filters."""
    tags = _Tags(run)
    shown = run.groups[-MOST_ROWS:]
    prompts = Counter(group.line.prompt_key for group in shown)
    return {
        "columns": COLUMNS,
        "rows": [
            _row(group, tags.of(group), again=prompts[group.line.prompt_key] > 1)
            for group in reversed(shown)
        ],
        "total": len(run.groups),
        "responses": sum([group.line.count for group in run.groups]),
    }


def _row(group: Group, tags: Sequence[str], *, again: bool) -> list[Any]:
    """Returns a row of the table; ``again``: other groups have its prompt, too."""
    line, rewards = group.line, group.line.rewards
    advantages, gaps = group.advantages.values(), group.gaps.values()
    return [
        group.id,
        group.batch,
        group.status,
        line.prompt[:SHOWN_CHARACTERS],
        line.count,
        _rounded_again(sum(rewards) / len(rewards)) if rewards else None,
        _rounded_again(line.best),
        _rounded_again(line.worst),
        _rounded_again(max(map(abs, advantages))) if advantages else None,
        line.tokens,
        line.turns,
        line.cut,
        group.age,
        _rounded_again(max(gaps)) if gaps else None,
        _rounded(line.ended - line.began),
        line.prompt_key if again else "",
        tags,
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


_rounded_again = lru_cache(maxsize=1024)(_rounded)
"""For values shared by many groups."""


class _Tags:
    """Finds the filters of a group."""

    def __init__(self, run: RunData) -> None:
        self._best, self._worst = extremes(run)
        self._long = _largest({g.id: g.line.tokens for g in run.groups})
        gaps = {g.id: max(g.gaps.values()) for g in run.groups if g.gaps}
        self._apart = _largest(gaps)

    def of(self, group: Group) -> list[str]:
        """Returns the names of the filters."""
        line, id_ = group.line, group.id
        differ = self._best != self._worst and line.best is not None
        # In the order of FILTERS.
        held = (
            differ and line.best == self._worst,
            differ and line.worst == self._best,
            line.best != line.worst,
            line.cut > 0,
            group.status == "stale" or bool(group.age),
            group.status not in ("trained", "taken", HELD_OUT),
            id_ in self._long,
            id_ in self._apart,
            line.tools > 0,
            group.status == HELD_OUT,
        )
        return [name for name, holds in zip(FILTERS, held, strict=True) if holds]


def _largest(values: Mapping[str, float]) -> set[str]:
    """Returns the names of the largest tenth; none if all are equal."""
    if len(set(values.values())) < 2:
        return set()
    ordered = sorted(values, key=values.__getitem__, reverse=True)
    return set(ordered[: math.ceil(len(ordered) * LONGEST_SHARE)])


def counts_of(table: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of rows of each filter."""
    counter = Counter(tag for row in table["rows"] for tag in row[-1])
    return {name: counter[name] for name in FILTERS}


def choose(run: RunData, most_bytes: int) -> list[Group]:
    """Returns groups whose conversations fit into a file.

    The newest thirty, the newest ten of each filter, and as many others as fit, evenly
    spread over the run.
    """
    tags = _Tags(run)
    with_texts = [group for group in run.groups if group.line.texts]
    chosen = dict.fromkeys(range(len(with_texts))[-30:])
    of_filter: Counter[str] = Counter()
    for place in range(len(with_texts) - 1, -1, -1):
        for tag in tags.of(with_texts[place]):
            if of_filter[tag] < 10:
                of_filter[tag] += 1
                chosen[place] = None
    stride = max(len(with_texts) // 400, 1)
    chosen |= dict.fromkeys(range(0, len(with_texts), stride))
    groups, size = list[Group](), 0
    for place in chosen:
        group = with_texts[place]
        # Text, log-probs and versions of a token, as JSON.
        size += 40 * group.line.tokens + 2_000
        if size > most_bytes and groups:
            break
        groups.append(group)
    return groups


def search(
    recording: Recording,
    groups: Sequence[Group],
    text: str,
    *,
    seconds: float = SEARCH_SECONDS,
) -> dict[str, Any]:
    """Returns the groups with a text in their conversations, the newest groups first.

    Args:
        recording: their recording.
        groups: all groups, the oldest first.
        text: in any message, reasoning or tool call; its case does not count.
        seconds: of the search, after which older groups are left out.
    """
    end, count, ids = time.monotonic() + seconds, 0, []
    for group in reversed(groups):
        if time.monotonic() > end:
            break
        count += 1
        with suppress(*MALFORMED):
            texts = recording.read_texts(group.line.texts)
            if texts is not None and text.lower() in _said(texts):
                ids.append(group.id)
    return {"ids": ids, "searched": count, "total": len(groups)}


def _said(texts: Mapping[str, Any]) -> str:
    """Returns all texts of conversations, in small letters."""
    parts = []
    for response in texts["responses"]:
        turns = response["turns"]
        messages = [m for turn in turns for m in (*turn["messages"], turn["reply"])]
        for message in (*messages, *response.get("after", ())):
            calls = message.get("tool_calls")
            parts += [message["content"], message.get("reasoning_content", "")]
            parts.append(_write_calls(calls) if calls else "")
    return "\n".join(parts).lower()


def conversations_of(recording: Recording, group: Group) -> dict[str, Any] | None:
    """Returns the conversations of a group with their tokens.

    ``None``: they were not recorded, were replaced by newer rows, or are damaged.
    """
    texts = recording.read_texts(group.line.texts)
    if texts is None:
        return None
    try:
        return _conversations(recording, group, texts)
    except MALFORMED:
        return None


def _conversations(
    recording: Recording, group: Group, texts: Mapping[str, Any]
) -> dict[str, Any]:
    scores = _scores(recording, group)
    responses = []
    for line, text in zip(group.line.responses, texts["responses"], strict=False):
        keys = line.keys
        advantage = next(
            (group.advantages[key] for key in keys if key in group.advantages), None
        )
        turns = text["turns"]
        of_turns = _scores_of_turns(turns, [scores.get(key) for key in keys])
        responses.append(
            {
                "reward": number(line.reward),
                "rewards": line.rewards,
                "advantage": advantage,
                "tokens": line.tokens,
                "cut": line.cut,
                "end": line.end,
                "turns": [
                    _turn(turn, recording.pieces, scores_of_turn)
                    for turn, scores_of_turn in zip(turns, of_turns, strict=True)
                ],
                "after": text.get("after", []),
            }
        )
    return {"id": group.id, "responses": responses}


def _scores(recording: Recording, group: Group) -> dict[str, list[float | None]]:
    """Returns the recorded trainer's log-probs of each row of a group."""
    by_row: dict[str, list[float | None]] = {}
    for key, place in group.scores.items():
        line = recording.read_texts(place)
        packed = (line or {}).get("scores", {}).get(key)
        if isinstance(packed, str):
            by_row[key] = _floats(packed)
    return by_row


def _scores_of_turns(
    turns: Sequence[Mapping[str, Any]], rows: Sequence[list[float | None] | None]
) -> list[list[float | None] | None]:
    """Returns the log-probs of each turn, if turns are separate rows."""
    if len(turns) != len(rows):
        return [None] * len(turns)
    return [
        row[len(row) - turn["count"] :]
        if row is not None and len(row) >= turn["count"]
        else None
        for turn, row in zip(turns, rows, strict=True)
    ]


def _floats(packed: str) -> list[float | None]:
    try:
        return [_rounded(number(value)) for value in unpack(packed, "f4").tolist()]
    except ValueError:
        return []


def _write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each tool call: its name and its arguments."""
    called = (call.get("function", call) for call in calls)
    return "\n".join(
        f"{call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)}"
        for call in called
    )


def _turn(
    turn: Mapping[str, Any],
    pieces: Mapping[int, str],
    trainer: list[float | None] | None,
) -> dict[str, Any]:
    ids = unpack(turn["ids"], "i4").tolist() if "ids" in turn else []
    count = int(turn["count"])
    spans = (repeat(int(version), tokens) for version, tokens in turn["versions"])
    if not 0 <= count <= MOST_OF_LINE:
        raise ValueError(f"A turn has no {count} tokens.")
    versions = list(islice(chain.from_iterable(spans), count))
    calls = turn["reply"].get("tool_calls")
    return {
        "number": turn["number"],
        "parent": turn["parent"],
        "branch": turn.get("branch", ""),
        "messages": turn["messages"],
        "reply": {
            **turn["reply"],
            **({"tool_calls": _write_calls(calls)} if calls else {}),
        },
        "finish": turn["finish"],
        "reward": number(turn.get("reward")),
        "trained": turn.get("trained", True),
        "time": turn.get("time", [None, None]),
        "count": count,
        "prompt_tokens": turn.get("prompt_tokens"),
        "cached": turn.get("cached"),
        "pieces": [pieces.get(i, f"<{i}>") for i in ids],
        "ids": ids,
        "log_probs": _floats(turn["log_probs"]) if "log_probs" in turn else None,
        "trainer": trainer,
        "versions": versions,
        "columns": {
            name: _floats(packed) for name, packed in turn.get("columns", {}).items()
        },
    }
