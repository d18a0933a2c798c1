"""Responses of groups as events have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.conversations import Conversation
from torchrl_sglang.collectors.runtime.versions import PolicyVersions
from torchrl_sglang.observer import ResponseRecord, RowRecord, TurnRecord
from torchrl_sglang.requests.token_columns import TOKENS
from torchrl_sglang.types import Completion


def record_conversation(
    conversation: Conversation, versions: PolicyVersions
) -> ResponseRecord:
    """Returns a conversation of plain functions."""
    turns, first = [], 0
    for number, turn in enumerate(conversation.turns):
        completion, end = turn.completion, turn.prompt.num_messages
        turns.append(
            TurnRecord(
                messages=conversation.messages[first:end],
                reply=conversation.messages[end],
                completion=completion,
                spans=list(versions.spans(completion, turn.policy_version)),
                prompt_tokens=len(turn.prompt.token_ids),
                number=number,
                parent=number - 1 if number else None,
                start=turn.start,
                end=turn.end,
                reward=float(turn.reward),
            )
        )
        first = end + 1
    return ResponseRecord(
        turns=turns,
        rows=[
            RowRecord(
                tokens=(turn.prompt.token_ids, turn.token_ids),
                turns=(number,),
                reward=float(turn.reward),
            )
            for number, turn in enumerate(conversation.turns)
        ],
        reward=float(sum(turn.reward for turn in conversation.turns)),
        rewards={name: float(value) for name, value in conversation.rewards.items()},
        truncated=conversation.truncated,
        trailing=conversation.messages[first:],
    )


def record_episode(
    steps: Sequence[tuple[TensorDictBase, Completion, int]], versions: PolicyVersions
) -> ResponseRecord:
    """Returns the steps of an environment: each row, response and version."""
    turns, earlier, total = [], "", 0.0
    for number, (row, completion, version) in enumerate(steps):
        prompt, response = _texts(row)
        new = prompt.removeprefix(earlier)
        earlier = prompt + response
        reward = float(row["next", "reward"].sum())
        total += reward
        turns.append(
            TurnRecord(
                messages=[{"role": "prompt", "content": new}],
                reply={"role": "assistant", "content": response},
                completion=completion,
                spans=list(versions.spans(completion, version)),
                prompt_tokens=row[TOKENS].shape[-1] - len(completion.token_ids),
                number=number,
                parent=number - 1 if number else None,
                reward=reward,
            )
        )
    return ResponseRecord(
        turns=turns,
        rows=[
            RowRecord(
                tokens=[row[TOKENS].flatten().cpu().numpy()],
                turns=(turn.number,),
                reward=turn.reward,
            )
            for (row, _, _), turn in zip(steps, turns, strict=True)
        ],
        reward=total,
        truncated=bool(steps[-1][0]["next"].get("truncated", None)) if steps else False,
    )


def _texts(row: TensorDictBase) -> tuple[str, str]:
    """Returns the texts of prompt and response, where a row has them."""
    text: Any = row.get("text", None)
    if text is None:
        return "", ""
    parts = (getattr(text, "prompt", None), getattr(text, "response", None))
    prompt, response = (getattr(part, "data", part) for part in parts)
    return str(prompt or ""), str(response or "")
