"""Reward functions: one or several, of single conversations or of whole groups.

:func:`finite` is the one check of rewards, wherever they come from; it is applied where
rows are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.conversations import Conversation
from torchrl_sglang.collectors.groups.user_functions import check_call, name_of, naming
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.session import as_reward
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.user_code import together

RewardFunctions: TypeAlias = (
    Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]]
)
"""One function, several, or several with names."""


class Rewards:
    """Adds the rewards of a complete group to the last turn of each conversation.

    Args:
        each: functions of a conversation and its task, which return a number.
        group: functions of a group's conversations and their task, which return a
            number for each conversation.
        seconds: timeout of each call.
        blocking: for functions that are not coroutines.

    Attributes:
        names (list of str): of the functions that have one.

    Raises:
        ConfigurationError: if something is not a function, or takes other arguments, or
            two have one name.
    """

    def __init__(
        self,
        each: RewardFunctions | None,
        group: RewardFunctions | None,
        *,
        seconds: float,
        blocking: BlockingCalls,
    ) -> None:
        self._each = _named("rewards", each)
        self._group = _named("group_rewards", group)
        self._seconds = seconds
        self._blocking = blocking
        both = (*self._each, *self._group)
        self.names = [name for name in both if not name.isdigit()]
        if len(set(self.names)) != len(self.names):
            raise ConfigurationError(
                f"Give each reward function its own name, got {', '.join(self.names)}."
            )
        for name, function in self._each.items():
            check_call(_role(name, function), function, "conversation", "task")
        for name, function in self._group.items():
            check_call(_role(name, function), function, "conversations", "task")

    def __bool__(self) -> bool:
        return bool(self._each or self._group)

    async def add(self, conversations: Sequence[Conversation]) -> None:
        """Calls all functions, side by side, and adds their values."""
        calls = [self._score_each(*item, conversations) for item in self._each.items()]
        calls += [
            self._score_group(*item, conversations) for item in self._group.items()
        ]
        for name, values in await together(calls):
            for conversation, value in zip(conversations, values, strict=True):
                turn = conversation.turns[-1]
                turn.reward = value + _number("A turn's reward", turn.reward, "is")
                if not name.isdigit():
                    conversation.rewards[name] = value

    async def _score_each(
        self,
        name: str,
        function: Callable[..., Any],
        conversations: Sequence[Conversation],
    ) -> tuple[str, list[float]]:
        values = await together(
            self._call(name, function, one, one.task) for one in conversations
        )
        role = _role(name, function)
        return name, [_number(role, value) for value in values]

    async def _score_group(
        self,
        name: str,
        function: Callable[..., Any],
        conversations: Sequence[Conversation],
    ) -> tuple[str, list[float]]:
        values = await self._call(
            name, function, list(conversations), conversations[0].task
        )
        role = _role(name, function)
        if hasattr(values, "tolist"):
            values = values.tolist()
        if (
            not isinstance(values, Sequence)
            or isinstance(values, str)
            or len(values) != len(conversations)
        ):
            raise ConfigurationError(
                f"{role} is called with (conversations, task) and returns "
                f"{len(conversations)} numbers, one for each conversation; it returned "
                f"{values!r}."
            )
        return name, [_number(role, value) for value in values]

    async def _call(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        with naming(_role(name, function)):
            return await self._blocking.call(function, *given, seconds=self._seconds)


def finite(rewards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the rewards of a turn as a row holds them: float32, of shape ``(1, 1)``.

    Raises:
        ConfigurationError: if one is not a finite number; the error names it.
    """
    return {
        name: torch.full(
            (1, 1), _number(f"The reward {name!r}", value, "is"), dtype=torch.float32
        )
        for name, value in rewards.items()
    }


def check_rewards(rows: Sequence[TensorDictBase]) -> None:
    """Checks the rewards of rows that an environment or a gateway wrote.

    They become float32 where they are integers.

    Raises:
        ConfigurationError: if one is not finite.
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


def _named(
    argument: str, given: RewardFunctions | None
) -> dict[str, Callable[..., Any]]:
    """Returns functions by name; those without a name have a number."""
    if given is None:
        return {}
    if callable(given):
        given = [given]
    if isinstance(given, (list, tuple)):
        given = {str(number): function for number, function in enumerate(given)}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"{argument} takes a function, a list of functions or a mapping of names "
            f"to functions, got {given!r}."
        )
    for name, function in given.items():
        if not callable(function) or not isinstance(name, str):
            raise ConfigurationError(
                f"{argument} takes a function, a list of functions or a mapping of "
                f"names to functions, got {name!r}: {function!r}."
            )
    return dict(given)


def _role(name: str, function: Callable[..., Any]) -> str:
    spelt = name_of(function) if name.isdigit() else name
    return f"The reward function {spelt!r}"


def _number(role: str, value: Any, verb: str = "returned") -> float:
    try:
        return as_reward(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{role} {verb} {value!r}, and a reward is one finite number of float32 "
            f"for each conversation."
        ) from error
