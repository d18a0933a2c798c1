"""Checks of a run's tasks before servers are started."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torchrl_sglang.collectors.groups.reward_functions import RewardFunction
from torchrl_sglang.collectors.scheduling.prompts import (
    is_read_by_index,
    read_once,
    refuse_table,
    to_task,
)
from torchrl_sglang.errors import ConfigurationError


def as_list(name: str, prompts: Any) -> list[Any]:
    """Returns tasks as a list, which can be read more than once.

    The batches of a data loader are split into tasks.
    """
    _check_tasks(name, prompts)
    if not isinstance(prompts, Iterable):
        return [prompts[place] for place in range(len(prompts))]
    return list(prompts if is_read_by_index(prompts) else read_once(prompts))


def check_prompts(
    name: str,
    prompts: Any,
    query_key: str | None,
    taken: Collection[str],
    rewards: Sequence[RewardFunction] = (),
) -> None:
    """Checks the tasks of a list, or the first task of another indexed dataset.

    ``query_key`` is None for an agent, which reads any task; no task may have a
    ``taken`` column.
    """
    _check_tasks(name, prompts)
    if not is_read_by_index(prompts):
        return
    if not len(prompts):
        raise ConfigurationError(f"{name} is empty; give at least one task.")
    in_memory = isinstance(prompts, (list, tuple))
    for place, row in enumerate(prompts if in_memory else [_first(name, prompts)]):
        label = f"Task {place} of {name}" if place else f"The first task of {name}"
        task = to_task(row, query_key or "query")
        if query_key is not None and query_key not in task:
            raise ConfigurationError(
                f"{label} has no {query_key!r}; it has {', '.join(map(repr, task))}. "
                f"Name the key of the prompt with query_key=...."
            )
        if ADVANTAGE in task:
            raise taken_column(label)
        if columns := sorted(task.keys() & taken):
            raise ConfigurationError(
                f"{label} has a column {columns[0]!r}, and a batch has a column of "
                f"that name; rename it. Taken are: {', '.join(sorted(taken))}."
            )
        for function in rewards:
            function.check_columns(task)


def _first(name: str, prompts: Any) -> Any:
    try:
        return prompts[0]
    except Exception as error:
        raise ConfigurationError(
            f"The first task of {name} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _check_tasks(name: str, prompts: Any) -> None:
    refuse_table(name, prompts)
    if isinstance(prompts, (str, os.PathLike, Mapping)):
        raise ConfigurationError(
            f"{name} must be a list or another iterable of tasks, got {prompts!r}; "
            f"read a file first, such as with datasets.load_dataset."
        )
    if not isinstance(prompts, Iterable) and not hasattr(prompts, "__getitem__"):
        raise ConfigurationError(
            f"{name} must be a list or another iterable of tasks, got {prompts!r}."
        )


ADVANTAGE = "advantage"
"""Column that a run adds to batches."""


def taken_column(label: str) -> ConfigurationError:
    """Returns the error for tasks with a column that the run writes."""
    return ConfigurationError(
        f"{label} has a column {ADVANTAGE!r}, which the run writes the advantages to; "
        f"name it otherwise."
    )
