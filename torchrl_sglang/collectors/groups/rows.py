"""Complete conversations to TorchRL's layout, which is built once for each group.

A batch is a lazy stack of turns, the turns of a conversation one after the other, as
``LLMCollector(..., yield_completed_trajectories=True)`` returns it for a ``ChatEnv``
with a ``StepCounter`` and a reward. ``("next", "reward")`` has the shape ``(1, 1)``:
one reward for all tokens of a response, in ``GRPOLoss``'s layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict

from torchrl_sglang.collectors.groups.conversations import Conversation
from torchrl_sglang.collectors.groups.rewards import finite
from torchrl_sglang.collectors.runtime.columns import (
    ROW_COLUMNS,
    TURN_COLUMNS,
    check_names,
)
from torchrl_sglang.collectors.runtime.versions import PolicyVersions
from torchrl_sglang.policies.outputs import (
    ends,
    to_history,
    to_message,
    to_prompt,
    unchecked,
)
from torchrl_sglang.policies.turns import TurnCodec
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS


class GroupWriter:
    """Writes groups of conversations as TensorDicts.

    Attributes:
        columns (frozenset of str): names that a row uses itself.
    """

    def __init__(self, codec: TurnCodec, versions: PolicyVersions) -> None:
        self._codec = codec
        self._versions = versions
        self.columns = ROW_COLUMNS | codec.columns | TURN_COLUMNS

    def write(
        self, conversations: Sequence[Conversation], task: Mapping[str, Any]
    ) -> list[TensorDict]:
        """Returns one TensorDict for each turn."""
        columns = self.columns | frozenset(task)
        rows = []
        for conversation in conversations:
            check_names(conversation.rewards, columns, "a reward")
            rows += self._write_conversation(conversation, task)
        return rows

    def _write_conversation(
        self, conversation: Conversation, task: Mapping[str, Any]
    ) -> list[TensorDict]:
        messages = [to_message(message) for message in conversation.messages]
        turns = conversation.turns
        containers = self._codec.containers(
            [(turn, messages[: turn.prompt.num_messages + 1]) for turn in turns]
        )
        counts = [*(turn.prompt.num_messages for turn in turns[1:]), len(messages)]
        return [
            self._write_turn(conversation, number, values, messages[:count], task)
            for number, (values, count) in enumerate(
                zip(containers, counts, strict=True)
            )
        ]

    def _write_turn(
        self,
        conversation: Conversation,
        number: int,
        containers: dict[NestedKey, Any],
        messages: Sequence[TensorDict],
        task: Mapping[str, Any],
    ) -> TensorDict:
        turn = conversation.turns[number]
        is_last = number == len(conversation.turns) - 1
        oldest = self._versions.oldest([(turn.completion, turn.policy_version)])
        version = torch.full((), oldest)
        of_tokens = self._versions.of_tokens(turn.completion, turn.policy_version)
        rewards = {"reward": turn.reward, **(conversation.rewards if is_last else {})}
        following = {
            "history": to_prompt(to_history(messages)),
            **ends(
                terminated=is_last and not conversation.truncated,
                truncated=is_last and conversation.truncated,
            ),
            **task,
            "step_count": torch.full((1,), number + 1),
            **finite(rewards),
            "policy_version": version,
        }
        root = {
            **task,
            **ends(),
            "step_count": torch.full((1,), number),
            "policy_version": version,
            POLICY_VERSIONS: of_tokens,
            **{key: value for key, value in containers.items() if isinstance(key, str)},
            "next": unchecked(following),
        }
        row = unchecked(root)
        for key, value in containers.items():
            if not isinstance(key, str):
                row.set(key, value)
        return row
