"""Reward functions: one or several, of single conversations or of whole groups.

:func:`finite` is the one check of rewards, wherever they come from; it is applied where
rows are written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.conversations import Conversation
from torchrl_sglang.collectors.groups.reward_functions import (
    RewardFunction,
    RewardFunctions,
    read_functions,
)
from torchrl_sglang.collectors.groups.user_functions import naming
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.checks import as_reward
from torchrl_sglang.support.user_code import together


class Rewards:
    """Adds the rewards of a complete group to the last turn of each conversation.

    ``each`` score single conversations, ``group`` all conversations of a group.

    Attributes:
        names (list of str): of the functions that have one.
    """

    def __init__(
        self,
        each: RewardFunctions | None,
        group: RewardFunctions | None,
        *,
        seconds: float,
        blocking: BlockingCalls,
        query_key: str = "query",
    ) -> None:
        read = partial(read_functions, query_key=query_key)
        self._functions = [
            *read("rewards", each, of_group=False).items(),
            *read("group_rewards", group, of_group=True).items(),
        ]
        self._seconds = seconds
        self._blocking = blocking
        self.names = [name for name, _ in self._functions if not name.isdigit()]
        if len(set(self.names)) != len(self.names):
            raise ConfigurationError(
                f"Give each reward function its own name, got {', '.join(self.names)}."
            )

    def __bool__(self) -> bool:
        return bool(self._functions)

    def check_columns(self, names: Collection[str]) -> None:
        """Checks that tasks have the columns that the functions need."""
        for _, function in self._functions:
            function.check_columns(names)

    async def add(self, conversations: Sequence[Conversation]) -> None:
        """Calls all functions, side by side, and adds their weighted values."""
        scored = await together(
            self._score(function, conversations) for _, function in self._functions
        )
        for (name, function), values in zip(self._functions, scored, strict=True):
            for conversation, value in zip(conversations, values, strict=True):
                turn = conversation.turns[-1]
                reward = _number("A turn's reward", turn.reward, "is")
                turn.reward = reward + function.weight * value
                if not name.isdigit():
                    conversation.rewards[name] = value

    async def _score(
        self, function: RewardFunction, conversations: Sequence[Conversation]
    ) -> list[float]:
        """Returns the value of each conversation, not weighted."""
        if function.of_group:
            task = conversations[0].task
            values = await self._call(function, list(conversations), task)
        else:
            values = await together(
                self._call(function, conversation, conversation.task)
                for conversation in conversations
            )
        if hasattr(values, "tolist"):
            values = values.tolist()
        if (
            not isinstance(values, Sequence)
            or isinstance(values, str)
            or len(values) != len(conversations)
        ):
            raise ConfigurationError(
                f"{function.role} is called with all conversations of a group and "
                f"returns {len(conversations)} numbers, one for each; it returned "
                f"{values!r}."
            )
        return [_number(function.role, value) for value in values]

    async def _call(self, function: RewardFunction, *given: Any) -> Any:
        with naming(function.role):
            return await self._blocking.call(
                function.call, *given, seconds=self._seconds
            )


def finite(rewards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the rewards of a turn for a row: float32, of shape ``(1, 1)``."""
    return {
        name: torch.full(
            (1, 1), _number(f"The reward {name!r}", value, "is"), dtype=torch.float32
        )
        for name, value in rewards.items()
    }


def check_rewards(rows: Sequence[TensorDictBase]) -> None:
    """Checks the rewards of rows that an environment or a gateway wrote.

    They become float32 where they are integers.
    """
    for row in rows:
        reward = row.get(("next", "reward"), None)
        if reward is None:
            continue
        if not reward.is_floating_point():
            reward = reward.to(torch.float32)
            row.set(("next", "reward"), reward)
        if not reward.isfinite().all():
            raise ConfigurationError(
                f"A reward must be a finite number, and a row has the reward "
                f"{reward.tolist()}."
            )


def _number(role: str, value: Any, verb: str = "returned") -> float:
    try:
        return as_reward(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{role} {verb} {value!r}, and a reward is one finite number of float32 "
            f"for each conversation."
        ) from error
