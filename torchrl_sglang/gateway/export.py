"""Conversion of sessions to TorchRL's layout.

A row is a trajectory: the first prompt, and everything after it as the response. The
assistant mask covers the policy's tokens absent from earlier rows. All other log-probs
are NaN: losses exclude these tokens under each of their masking strategies. The rows of
a session end with the last row: ``MCAdvantage`` counts sessions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.trajectories import Trajectory
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.policies import outputs
from torchrl_sglang.requests.token_values import (
    LOG_PROB,
    WEIGHT_VERSION,
    concatenate,
    unknown_values,
    values_of,
)
from torchrl_sglang.types import TokenLayout, TokenValues

NO_VERSION = -1

CONTAINERS = frozenset(
    {
        *("generation_info", "group", "history", "log_probs", "masks", "request"),
        *("session", "tokens", "turn_returns", "turn_rewards"),
    }
)
"""Columns of a row, beside the common columns of a collector's rows."""


def to_rows(sessions: Iterable[Session]) -> list[TensorDict]:
    """Returns the trajectories of sessions, a TensorDict for each."""
    rows = []
    for session in sessions:
        trajectories = session.trajectories()
        for number, trajectory in enumerate(trajectories, 1):
            rows.append(_to_row(session, trajectory, last=number == len(trajectories)))
    return rows


def _to_row(session: Session, trajectory: Trajectory, *, last: bool) -> TensorDict:
    ids, layouts = trajectory.token_ids, _layouts(trajectory)
    length = trajectory.turns[0].prompt.num_tokens
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mixed, cached = False, 0
    for turn, trained, start, end in trajectory.spans():
        done = turn.completion
        mask[start:end] = trained
        mixed |= done.mixed_state
        cached += done.cached_tokens
    values = torch.from_numpy(_column(trajectory, LOG_PROB).values)
    values[~mask] = math.nan
    versions = torch.from_numpy(_column(trajectory, WEIGHT_VERSION).values)
    final = trajectory.turns[-1]
    tokens = torch.tensor(ids, dtype=torch.int64)
    reason = final.completion.finish_reason
    sample: outputs.Sample = {
        "tokens": _parts(tokens, length),
        "masks": {
            "all_attention_mask": torch.ones(len(ids), dtype=torch.bool),
            "all_assistant_mask": mask,
        },
        "log_probs": {"response": values[length:].clone(), "full": values},
        "generation_info": {
            "finish_reason": outputs.non_tensor("stop" if final.ended else reason),
            "truncated": torch.full((), reason == "length" and not final.ended),
            "cached_tokens": torch.full((), cached),
            "weight_version": versions[length:].clone(),
            "mixed_state": torch.full((), mixed),
            "logprobs_mode": outputs.non_tensor(final.completion.logprobs_mode or ""),
        },
        "history": _history(trajectory),
    }
    for layout in layouts:
        full = _column(trajectory, layout)
        sample[layout.name] = outputs.column_rows(full[length:], full)
    containers = outputs.assemble(
        [sample], (), pad_output=False, padding_value=0, device=None, layouts=layouts
    )
    written = versions[mask & (versions != NO_VERSION)]
    root: dict[str, Any] = {
        **containers,
        **_turn_rewards(trajectory, length),
        "request": outputs.unchecked(_request(final)),
        "session": outputs.non_tensor(session.name),
        "group": outputs.non_tensor(session.group or session.name),
        "policy_version": written.min()
        if written.numel()
        else torch.tensor(NO_VERSION),
        **outputs.ends(),
    }
    reward = 0.0 if trajectory.reward is None else trajectory.reward
    following = {"reward": torch.full((1, 1), reward), **outputs.ends(terminated=last)}
    if session.metrics:
        numbers = {k: torch.full((1, 1), v) for k, v in session.metrics.items()}
        following["metrics"] = outputs.unchecked(numbers)
    return outputs.unchecked({**root, "next": outputs.unchecked(following)})


def _turn_rewards(trajectory: Trajectory, length: int) -> dict[str, torch.Tensor]:
    """Returns rewards and returns of the tokens after the first prompt."""
    rewards = torch.zeros(trajectory.turns[-1].num_tokens)
    returns = torch.zeros_like(rewards)
    of_turns = zip(trajectory.rewards, trajectory.returns, strict=True)
    for (_, _, start, end), (reward, value) in zip(
        trajectory.spans(), of_turns, strict=True
    ):
        returns[start:end] = value
        if end > start:
            rewards[end - 1] = reward
    return {
        "turn_rewards": rewards[length:].clone(),
        "turn_returns": returns[length:].clone(),
    }


def _request(turn: Turn) -> dict[str, Any]:
    """Returns the metadata of a turn's request, as texts."""
    about = {
        "model": turn.model,
        "user": turn.user or "",
        "metadata": json.dumps(turn.metadata),
        "request_id": turn.request_id or "",
    }
    return {name: outputs.non_tensor(value) for name, value in about.items()}


def _layouts(trajectory: Trajectory) -> list[TokenLayout]:
    layouts = {}
    for turn in trajectory.turns:
        for name, values in turn.completion.columns.items():
            layouts[name] = values.layout
    return list(layouts.values())


def _column(trajectory: Trajectory, layout: TokenLayout) -> TokenValues:
    """Returns a token column of all tokens of a trajectory.

    A token read by several turns has the value of the first turn.
    """
    parts, name, covered = [], layout.name, 0
    for turn, _, start, end in trajectory.spans():
        prompt = turn.completion.prompt_columns.get(name)
        parts += [
            unknown_values(layout, start - covered)
            if prompt is None
            else prompt[covered:start],
            values_of(turn.completion, layout),
        ]
        covered = end
    return concatenate(parts)


def _parts(full: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
    return {
        "prompt": full[:length].clone(),
        "response": full[length:].clone(),
        "full": full,
    }


def _history(trajectory: Trajectory) -> dict[str, Any]:
    """Returns the conversation, with responses as the model wrote them."""
    final = trajectory.turns[-1]
    written = {len(turn.prompt.messages): turn.text for turn in trajectory.turns}
    for turn in trajectory.turns:
        # A client may have extended a response.
        edited = (turn.prompt.said or {}).get("content", "")
        index = len(turn.prompt.messages) - len(turn.prompt.new_messages) - 1
        if edited and edited.startswith(written[index].strip()):
            written[index] = edited
    messages: list[TensorDictBase] = [
        outputs.to_message(
            {"role": message["role"], "content": written.get(i, message["content"])}
        )
        for i, message in enumerate([*final.prompt.messages, final.reply])
    ]
    first = len(trajectory.turns[0].prompt.messages)
    return {
        "prompt": _conversation(messages[:first]),
        "response": _conversation(messages[first:]),
        "full": _conversation(messages),
    }


def _conversation(messages: Sequence[Any]) -> Any:
    return outputs.to_history(list(messages))
