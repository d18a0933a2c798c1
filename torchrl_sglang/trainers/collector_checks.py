"""Checks of the functions and the collector of a run, before servers start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torchrl_sglang.collectors.groups.functions import FunctionGroups
from torchrl_sglang.collectors.groups.reward_functions import (
    RewardFunction,
    read_functions,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.arguments import RunArguments

FUNCTIONS = ("rewards", "group_rewards", "step", "tools", "max_turns", "system_prompt")
"""Arguments of conversations that plain functions make, as the collector has them."""

OF_THE_RUN = ({field.name for field in fields(RunArguments)} - {"recorder"}) | {
    *("policy", "total_groups", "weight_sync_schemes", "groups")
}
"""Arguments of the collector that a run gives it."""

NOT_OF_A_FUNCTION = ("prompts", "keep_group", "epochs", "max_staleness", "on_stale")
"""Arguments that a user's own collector does not get, beside its conversations."""


def read_rewards(arguments: RunArguments) -> dict[tuple[str, str], RewardFunction]:
    """Returns the reward functions by argument and name; checks the other functions."""
    rewards: dict[tuple[str, str], RewardFunction] = {}
    for argument, of_group in (("rewards", False), ("group_rewards", True)):
        functions = read_functions(
            argument,
            getattr(arguments, argument),
            of_group=of_group,
            query_key=arguments.query_key,
        )
        rewards |= {(argument, name): function for name, function in functions.items()}
    if arguments.step is None and not rewards:
        raise ConfigurationError(
            "There is nothing to learn from: give rewards=... or group_rewards=..., "
            "functions of a conversation and its task, a step that sets rewards, or a "
            "teacher=...."
        )
    FunctionGroups(**{name: getattr(arguments, name) for name in FUNCTIONS})
    return rewards


def check_collector(arguments: RunArguments) -> None:
    """Refuses arguments that define conversations twice, or not at all."""
    names = (*FUNCTIONS, "agent", "env")
    makers = [name for name in names if getattr(arguments, name) is not None]
    if callable(arguments.collector):
        _check_beside_a_function(makers, arguments)
        return
    _check_mapping_of_collector(arguments.collector or {})
    if arguments.prompts is None:
        raise ConfigurationError("Give the prompts to train on as prompts=....")
    for maker in ("agent", "env"):
        functions = [name for name in makers if name != maker]
        if maker in makers and functions:
            raise ConfigurationError(
                f"{' and '.join(functions)} cannot be given with {maker}, which is "
                f"the whole conversation."
            )


def _check_mapping_of_collector(collector: Mapping[str, Any]) -> None:
    for name in OF_THE_RUN.intersection(collector):
        raise ConfigurationError(
            f"collector has {name!r}, which a run sets by arguments of GRPO: groups by "
            f"rewards, env or agent, total_groups by steps times groups_per_batch, and "
            f"most others by the argument of the same name; leave it out of collector."
        )
    if collector.get("batches_per_update", 1) != 1:
        raise _one_update_a_batch("collector has")
    if collector.get("replay_buffer") is not None:
        raise ConfigurationError(
            "collector has 'replay_buffer', and a run trains on batches as they come; "
            "leave it out, or write your own loop."
        )


def _check_beside_a_function(makers: Sequence[str], arguments: RunArguments) -> None:
    """Refuses arguments that a user's own collector would not get."""
    if arguments.eval_prompts is not None:
        raise ConfigurationError(
            "eval_prompts are scored by the rewards of the run, and collector is a "
            "function that makes a collector with its own; give rewards=... and "
            "further arguments as collector={...}, or evaluate in your own loop."
        )
    refused = list(makers)
    for name in NOT_OF_A_FUNCTION:
        value, default = getattr(arguments, name), getattr(RunArguments, name)
        if value is not default and (default is None or value != default):
            refused.append(name)
    if refused:
        raise ConfigurationError(
            f"collector=... makes the whole collector, so that {' and '.join(refused)} "
            f"cannot be given beside it; give them to the collector there."
        )


def _one_update_a_batch(subject: str) -> ConfigurationError:
    return ConfigurationError(
        f"{subject} batches_per_update, and a run sends weights after each batch, so "
        f"that groups for later ones would be too old; leave it out, and make batches "
        f"larger with groups_per_batch=.... minibatches=... has several optimizer "
        f"steps in one."
    )


def check_made(made: Any, group_size: int) -> None:
    """Checks a user's own collector by its attributes."""
    if not hasattr(made, "increment_version"):
        raise ConfigurationError(
            f"collector returned {made!r}; return a collector, as "
            f"AsyncLLMCollector(policy=policy, ...)."
        )
    size = getattr(made, "group_size", group_size)
    if size != group_size:
        raise ConfigurationError(
            f"collector returned one with group_size={size}, and the run compares "
            f"group_size={group_size} responses with each other; give both the same."
        )
    if getattr(made, "batches_per_update", 1) != 1:
        raise _one_update_a_batch("collector returned one with")


def check_groups(queries: Sequence[str], group_size: int) -> None:
    """Checks that conversations whose rewards are compared have one prompt."""
    for start in range(0, len(queries), group_size):
        for query in queries[start : start + group_size]:
            if query != queries[start]:
                raise ConfigurationError(
                    f"A group of group_size={group_size} has the prompts "
                    f"{queries[start]!r:.80} and {query!r:.80}; give GRPO the "
                    f"group_size of the collector, which yields whole groups."
                )
