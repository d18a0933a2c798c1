"""Filter of complete groups: a function of the user on their returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.collectors.groups.user_functions import check_call, naming
from torchrl_sglang.errors import ConfigurationError, UserFunctionError
from torchrl_sglang.objectives.advantages import (
    TrajectoryReturn,
    conversation_returns,
    groups_of_agents,
)
from torchrl_sglang.support.blocking import BlockingCalls

KeepGroup: TypeAlias = Callable[[Sequence[float]], bool | Awaitable[bool]]
"""Returns whether a group is trained on, from the returns that are compared."""

_ROLE = "The function keep_group"


def has_variance(returns: Sequence[float]) -> bool:
    """Whether the conversations of a group differ in their returns.

    Args:
        returns: of the conversations.

    Examples:
        >>> has_variance([1.0, 1.0]), has_variance([1.0, 0.5])
        (False, True)
    """
    return max(returns) - min(returns) > 1e-9


class GroupFilter:
    """Asks a user's function whether a complete group is kept.

    Args:
        function: ``keep_group``.
        of_agents: whether the groups are of agents, whose returns are means.

    Raises:
        ConfigurationError: if it cannot be called with the returns of a group.
    """

    def __init__(self, function: Any, *, of_agents: bool) -> None:
        if not callable(function):
            raise ConfigurationError(
                f"keep_group={function!r} must be a function of a group's returns, "
                f"such as has_variance."
            )
        check_call(_ROLE, function, "returns")
        self._function = function
        self._of_agents = of_agents

    async def keeps(
        self, rows: list[TensorDictBase], calls: BlockingCalls, seconds: float
    ) -> bool:
        """Returns the decision on the rows of a group.

        Raises:
            UserFunctionError: if the function fails, decides nothing or takes longer.
        """
        returns = await calls.run(lambda: self.returns(rows), seconds=seconds)
        with naming(_ROLE):
            verdict = await calls.call(self._function, returns, seconds=seconds)
        return _decision(verdict)

    def returns(self, rows: list[TensorDictBase]) -> list[float]:
        """Returns the compared returns of a group, the argument of the function."""
        how: TrajectoryReturn = "mean" if self._of_agents else "sum"
        stack = LazyStackedTensorDict(*rows)
        returns, conversation = conversation_returns(stack, how)
        if self._of_agents:
            compared = groups_of_agents(stack, conversation, len(returns))
            if rewards := [values for _, _, values in compared]:
                returns = torch.cat(rewards)
        values: list[float] = returns.tolist()
        return values


def _decision(verdict: Any) -> bool:
    """Returns a truth value or a number as a bool, also of NumPy and PyTorch."""
    if getattr(verdict, "shape", None) == () and hasattr(verdict, "item"):
        verdict = verdict.item()
    if not isinstance(verdict, (bool, int, float)):
        raise UserFunctionError(f"{_ROLE} returned {verdict!r}; return True or False.")
    return bool(verdict)
