"""Names and values of the columns of rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError, TaskError
from torchrl_sglang.policies.outputs import non_tensor
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS
from torchrl_sglang.support.user_code import describe

ROW_COLUMNS = frozenset(
    {
        "done",
        "next",
        "policy_version",
        "reward",
        "terminated",
        "truncated",
        POLICY_VERSIONS,
    }
)
"""Columns of the rows of every kind of group, beside the policy's containers."""

POLICY_COLUMNS = frozenset({"history", "log_probs", "masks", "text", "tokens"})
"""Columns of the containers of a policy with its default keys."""

TURN_COLUMNS = frozenset({"history", "step_count"})
"""Further columns of the turns of plain functions."""


def check_names(names: Iterable[Any], columns: frozenset[str], what: str) -> None:
    """Checks names that become columns of rows."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f"The name of {what} must be a text, got {name!r}."
            )
        if name in columns:
            raise ConfigurationError(
                f"{what[0].upper()}{what[1:]} is named {name!r}, and a batch has a "
                f"column of that name; rename it. Taken are: "
                f"{', '.join(sorted(columns))}."
            )


def check_task(task: Mapping[str, Any], columns: frozenset[str]) -> dict[str, Any]:
    """Checks that a task can be written, before anything is generated for it.

    Returns:
        dict: its columns. The functions of the user, which get the task itself, cannot
        change them.
    """
    try:
        check_names(task, columns, "a value of the task")
    except ConfigurationError as error:
        raise TaskError(str(error)) from error
    return to_values(task)


def to_values(task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a task as a TensorDict holds them."""
    values = {}
    for name, value in task.items():
        try:
            values[name] = _to_value(value)
        except Exception as error:
            raise TaskError(
                f"The value {name!r} of a task cannot be a column: {describe(error)}"
            ) from error
    return values


def _to_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, float)):
        return torch.tensor(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return torch.tensor(value)
    return non_tensor(value)
