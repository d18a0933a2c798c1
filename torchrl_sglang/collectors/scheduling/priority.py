"""Which requests a server begins first, where more wait than it can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.requests.plan import check_priorities
from torchrl_sglang.types import ServerCapabilities

RequestOrder: TypeAlias = Literal["arrival", "oldest"]
"""Requests as they come, or those of the groups that started first."""

PriorityOf: TypeAlias = Callable[[int], "int | None"]
"""Returns the priority of a group's requests, by the position of its prompt."""


def no_priority(position: int) -> None:
    """Requests of all groups are alike."""


def oldest_first(position: int) -> int:
    """Prompts are taken in turn, so that an earlier one started with older weights."""
    return -position


def choose_priority(
    order: RequestOrder, capabilities: ServerCapabilities
) -> PriorityOf:
    """Returns the priorities of an order."""
    if order != "oldest":
        return no_priority
    check_priorities(capabilities)
    if not capabilities.args.disable_priority_preemption:
        raise UnsupportedByServerError(
            "request_order='oldest' needs servers that let running requests end: start "
            "them with disable_priority_preemption=True."
        )
    return oldest_first
