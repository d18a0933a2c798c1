"""Rows of batches in the lines of their groups: written, and read again. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_sglang.observer import ResponseRecord, RowRecord
from torchrl_sglang.recording.format import key_of, pack, unpack
from torchrl_sglang.recording.lines import GroupLine, ResponseLine

NO_VERSION = -1

Ids = np.ndarray[Any, Any]
"""Token ids."""

ID_BYTES = 4
"""Bytes of a packed token id."""


class RowPacker:
    """Packs tokens of rows; a prompt that the responses of a group share, once."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def of(self, row: RowRecord) -> list[bytes]:
        """Returns the packed parts of the tokens of a row, which stays alive."""
        for part in row.tokens:
            if id(part) not in self._packed:
                self._packed[id(part)] = pack(part, "i4")
        return [self._packed[id(part)] for part in row.tokens]


def rows_of(
    response: ResponseRecord, packed: RowPacker, pieces: dict[bytes, int]
) -> list[dict[str, Any]]:
    """Returns the rows of a response, without the tokens of its turns.

    Args:
        response: with its rows.
        packed: of its group.
        pieces: tokens before and between turns, each with its number; new ones are
            added. Responses of a group share their prompt.
    """
    turns = {turn.number: turn for turn in response.turns}
    lines: list[dict[str, Any]] = []
    earlier = b""
    for row in response.rows:
        ids = b"".join(packed.of(row))
        # The prompt of a later turn begins with the row of an earlier turn.
        prompt = ids[: ID_BYTES * turns[row.turns[0]].prompt_tokens]
        goes_on = bool(earlier) and prompt.startswith(earlier)
        places, start = [], len(earlier) if goes_on else 0
        for number in row.turns:
            end = ID_BYTES * turns[number].prompt_tokens
            places.append(pieces.setdefault(ids[start:end], len(pieces)))
            start = end + ID_BYTES * len(turns[number].completion.token_ids)
        lines.append(
            {
                "turns": row.turns,
                "pieces": places,
                "goes_on": goes_on,
                "reward": row.reward,
            }
        )
        earlier = ids
    return lines


def prompt_key(responses: Sequence[ResponseRecord], packed: RowPacker) -> str:
    """Returns a digest of the first prompt's tokens; empty without rows."""
    for response in responses:
        for row in response.rows:
            first = next(t for t in response.turns if t.number == row.turns[0])
            ids = b"".join(packed.of(row))
            return key_of(ids[: ID_BYTES * first.prompt_tokens])
    return ""


def read_rows(group: GroupLine, texts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a group, with the columns of :func:`.batch_to_dataset`.

    Raises:
        ValueError: if tokens are not those of the batch, such as after an edit.
    """
    pieces = [unpack(piece, "i4").astype("i8") for piece in texts["pieces"]]
    for line, response in zip(group.responses, texts["responses"], strict=True):
        turns = {turn["number"]: _read_turn(turn) for turn in response["turns"]}
        trained = {number for number, turn in turns.items() if turn["trained"]}
        earlier: Ids = np.empty(0, "i8")
        for place, row in enumerate(response["rows"]):
            is_last = place == len(response["rows"]) - 1
            path = [turns[number] for number in row["turns"]]
            between = [pieces[number] for number in row["pieces"]]
            if row["goes_on"]:
                between[0] = np.concatenate([earlier, between[0]])
            columns = _tokens(path, between, trained)
            # A token that two rows share is trained in the first one.
            trained -= set(row["turns"])
            earlier = np.concatenate([columns["prompt_ids"], columns["completion_ids"]])
            if key_of(pack(earlier, "i4")) != line.keys[place]:
                raise ValueError("A row has other tokens than its batch had.")
            yield {
                **_conversation(path, turns),
                **columns,
                "reward": row["reward"] or 0.0,
                **(_named_rewards(line) if is_last else {}),
                **_ends(is_last=is_last, is_cut=response["truncated"]),
                "group": f"{group.writer}-{group.id}",
                "position": group.position,
                "status": group.status,
                **({"session": group.name} if group.name else {}),
            }


def _read_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    count = turn["count"]
    spans = np.array(turn["versions"], "i8").reshape(-1, 2)
    unknown = np.full(count, math.nan, "<f4")
    return {
        **turn,
        "ids": unpack(turn["ids"], "i4").astype("i8"),
        "log_probs": unpack(turn["log_probs"], "f4")
        if "log_probs" in turn
        else unknown,
        "versions": np.repeat(spans[:, 0], spans[:, 1]),
    }


def _tokens(
    path: Sequence[Mapping[str, Any]], pieces: Sequence[Ids], trained: set[int]
) -> dict[str, Any]:
    """Returns the columns with a value for each token."""
    ids, masks, log_probs, versions = [], [], [], []
    for place, (turn, piece) in enumerate(zip(path, pieces, strict=True)):
        is_trained = turn["number"] in trained
        between = piece if place else piece[:0]
        ids += [between, turn["ids"]]
        masks += [
            np.zeros(len(between), "i8"),
            np.full(turn["count"], is_trained, "i8"),
        ]
        written = turn["log_probs"] if is_trained else np.zeros(turn["count"])
        log_probs += [np.zeros(len(between)), written]
        versions += [np.full(len(between), NO_VERSION), turn["versions"]]
    of_policy = np.concatenate(versions)[np.concatenate(masks) == 1]
    numbers = of_policy[of_policy != NO_VERSION]
    return {
        "prompt_ids": pieces[0],
        "completion_ids": np.concatenate(ids),
        "env_mask": np.concatenate(masks),
        "logprobs": np.concatenate(log_probs),
        "weight_versions": np.concatenate(versions),
        "policy_version": int(numbers.min()) if len(numbers) else NO_VERSION,
    }


def _conversation(
    path: Sequence[Mapping[str, Any]], turns: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns prompt and completion as messages, or as texts of an environment."""
    prompt, turn = list(map(_message, path[0]["messages"])), path[0]
    while turn["parent"] is not None:
        turn = turns[turn["parent"]]
        messages = [*turn["messages"], turn["reply"]]
        prompt = [*map(_message, messages), *prompt]
    completion = [_message(path[0]["reply"])]
    for turn in path[1:]:
        completion += map(_message, [*turn["messages"], turn["reply"]])
    parts: dict[str, Any] = {"prompt": prompt, "completion": completion}
    if all(message["role"] != "prompt" for message in prompt):
        return parts
    return {k: "".join(m["content"] for m in part) for k, part in parts.items()}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with tool calls as JSON: their arguments have many types."""
    calls = message.get("tool_calls")
    return {**message, **({"tool_calls": json.dumps(calls)} if calls else {})}


def _named_rewards(line: ResponseLine) -> dict[str, float | None]:
    return {f"reward.{name}": value for name, value in line.rewards.items()}


def _ends(*, is_last: bool, is_cut: bool) -> dict[str, bool]:
    return {
        "done": is_last,
        "terminated": is_last and not is_cut,
        "truncated": is_last and is_cut,
    }
