"""The short way to a kind of groups: its arguments as the collector's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast

from torchrl_sglang.collectors.groups.environments import EnvironmentGroups
from torchrl_sglang.collectors.groups.functions import FunctionGroups
from torchrl_sglang.collectors.runtime.contract import GroupKind
from torchrl_sglang.errors import ConfigurationError

GROUP_ARGUMENTS = frozenset(
    {"env", "agent", "gateway", *(option.name for option in fields(FunctionGroups))}
)
"""Arguments of all kinds of groups."""


def choose_groups(groups: Any, arguments: Mapping[str, Any]) -> GroupKind:
    """Returns the kind of groups of a collector.

    Args:
        groups: a kind, or a function that makes an environment.
        arguments: of a kind, among ``GROUP_ARGUMENTS``; ``None`` for a default.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    if isinstance(groups, GroupKind):
        _refuse(options, "groups, which takes them itself")
        return groups
    if groups is not None:
        options["env"] = groups
    threads = {
        name: options.pop(name) for name in {"num_threads"}.intersection(options)
    }
    agent, gateway = options.pop("agent", None), options.pop("gateway", None)
    if agent is not None:
        _refuse(options, "agent, which is the whole conversation")
        if not hasattr(gateway, "agent_groups"):
            raise ConfigurationError(
                f"An agent needs a gateway, got {gateway!r}; give "
                f"gateway=Gateway(engine)."
            )
        return cast(GroupKind, gateway.agent_groups(agent, **threads))
    if gateway is not None:
        raise ConfigurationError("gateway is for agents; give an agent, too.")
    if "env" not in options:
        return FunctionGroups(**options, **threads)
    env = options.pop("env")
    _refuse(options, "env, whose transforms say what a conversation is")
    return EnvironmentGroups(env, **threads)


def _refuse(names: Iterable[str], beside: str) -> None:
    if names := list(names):
        raise ConfigurationError(
            f"{' and '.join(names)} cannot be given with {beside}."
        )
