"""Optimizers and schedules of learning rates."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from torchrl_sglang.errors import ConfigurationError


def optimizer_of(
    given: Any, lr: float | None, default: float = 1e-6
) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns a function that makes the optimizer, after a trial.

    ``given`` is a function, or arguments of AdamW, whose learning rate is ``lr`` or
    ``default``. On a GPU it is the fused AdamW, which is faster and needs no memory
    beside its moments. Raises :class:`.ConfigurationError` if these make no optimizer,
    or the learning rate is given twice.
    """
    elsewhere = callable(given) or "lr" in (given or ())
    if lr is not None and elsewhere:
        raise ConfigurationError(
            f"lr={lr!r} is not used, since optimizer={given!r} has a learning rate of "
            f"its own; leave one of them out."
        )
    if callable(given):
        made: Callable[[Any], torch.optim.Optimizer] = given
        return made
    try:
        rate = default if lr is None else lr
        arguments = {"lr": rate, "weight_decay": 0.0, **(given or {})}
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"lr={lr!r} and optimizer={given!r} make no AdamW: {error}. Give other "
            f"arguments of it, or a function that makes an optimizer of parameters."
        ) from error
    return partial(_adamw, **arguments)


def _adamw(parameters: Iterable[nn.Parameter], **arguments: Any) -> torch.optim.AdamW:
    parameters = list(parameters)
    on_gpu = all(parameter.is_cuda for parameter in parameters)
    if on_gpu and not {"fused", "foreach", "capturable"} & set(arguments):
        arguments["fused"] = True
    return torch.optim.AdamW(parameters, **arguments)


def make_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    total_steps: int | None,
) -> Any:
    """Returns a schedule of transformers for an optimizer's learning rate.

    ``total_steps`` is None if the length of the run is unknown. Raises
    :class:`.ConfigurationError` for an unknown name, or if it needs that length.
    """
    try:
        return get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
        )
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"schedule={name!r} cannot be used here: {error} Give "
            f"'constant_with_warmup', 'linear' or 'cosine', the last two with "
            f"steps=... where prompts have no length."
        ) from error


def check_schedule(name: str, warmup_steps: int, total_steps: int | None) -> None:
    """Tries a schedule for a step; refuses a warmup that it would ignore."""
    if name == "constant" and warmup_steps:
        raise ConfigurationError(
            f"schedule='constant' has no warmup, and warmup_steps={warmup_steps}; give "
            f"schedule='constant_with_warmup'."
        )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    schedule = make_schedule(name, optimizer, warmup_steps, total_steps)
    optimizer.step()
    try:
        schedule.step()
    except TypeError as error:
        raise ConfigurationError(
            f"schedule={name!r} cannot be used here: {error}. Give "
            f"'constant_with_warmup', 'linear' or 'cosine'."
        ) from error


def check_steps_alone(schedule: Any) -> None:
    """Refuses a schedule whose step needs more than a step's number."""
    try:
        inspect.signature(schedule.step).bind()
    except TypeError as error:
        raise ConfigurationError(
            f"schedule={type(schedule).__name__} cannot be used here: its step() is "
            f"called without arguments, after each optimizer step, and has a "
            f"{error}. Give a schedule whose learning rate depends on the number of "
            f"steps alone, such as CosineAnnealingLR."
        ) from error


@dataclass(frozen=True, kw_only=True)
class ScheduleStart:
    """Optimizer and schedule before their first step.

    PyTorch's schedules make a learning rate from the one before, so that a run that
    goes on takes all steps of its own schedule again.
    """

    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    groups: list[dict[str, Any]]
    """Values of the optimizer's groups, without parameters."""
    state: dict[str, Any]

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, schedule: LRScheduler | None
    ) -> ScheduleStart:
        """Returns the present state as the one before the first step."""
        groups = [{**group, "params": None} for group in optimizer.param_groups]
        state = {} if schedule is None else schedule.state_dict()
        groups, state = copy.deepcopy(groups), _copy_state(state)
        return cls(optimizer=optimizer, schedule=schedule, groups=groups, state=state)

    def advance(self, steps: int) -> None:
        """Sets learning rates and other values to those after so many steps."""
        values_of = copy.deepcopy(self.groups)
        for group, values in zip(self.optimizer.param_groups, values_of, strict=True):
            group.update({**values, "params": group["params"]})
        if self.schedule is None:
            return
        self.schedule.load_state_dict(_copy_state(self.state))
        with warnings.catch_warnings():
            # PyTorch's: that there was no optimizer step in between.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(steps):
                self.schedule.step()


def _copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a schedule's state; model and optimizer stay the same."""
    shared = (nn.Module, torch.optim.Optimizer)
    memo = {id(part): part for part in state.values() if isinstance(part, shared)}
    return copy.deepcopy(dict(state), memo)
