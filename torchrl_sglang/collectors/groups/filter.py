"""Filter of complete groups: a function of the user on their returns."""

from __future__ import annotations

import inspect
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


def make_filter(
    function: Any, *, of_agents: bool
) -> Callable[[list[TensorDictBase]], Any] | None:
    """Returns a function from rows of a group to whether it is kept, or a coroutine."""
    if function is None:
        return None
    if not callable(function):
        raise ConfigurationError(
            f"keep_group={function!r} must be a function of a group's returns, such "
            f"as has_variance."
        )
    check_call(_ROLE, function, "returns")

    def keeps(rows: list[TensorDictBase]) -> Any:
        how: TrajectoryReturn = "mean" if of_agents else "sum"
        stack = LazyStackedTensorDict(*rows)
        returns, conversation = conversation_returns(stack, how)
        if of_agents:
            compared = groups_of_agents(stack, conversation, len(returns))
            if rewards := [values for _, _, values in compared]:
                returns = torch.cat(rewards)
        with naming(_ROLE):
            verdict = function(returns.tolist())
        return (
            _await_decision(verdict)
            if inspect.isawaitable(verdict)
            else _decision(verdict)
        )

    return keeps


async def _await_decision(verdict: Awaitable[Any]) -> bool:
    with naming(_ROLE):
        value = await verdict
    return _decision(value)


def _decision(verdict: Any) -> bool:
    """Returns a truth value or a number as a bool, also of NumPy and PyTorch."""
    if getattr(verdict, "shape", None) == () and hasattr(verdict, "item"):
        verdict = verdict.item()
    if not isinstance(verdict, (bool, int, float)):
        raise UserFunctionError(f"{_ROLE} returned {verdict!r}; return True or False.")
    return bool(verdict)
