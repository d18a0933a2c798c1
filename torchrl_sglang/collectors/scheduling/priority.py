"""Which requests a server begins first, where more wait than it can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.collectors.scheduling.slots import Slots
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.request import RequestSlot, check_priorities
from torchrl_sglang.types import ServerCapabilities

RequestOrder: TypeAlias = Literal["arrival", "oldest", "longest"]
"""Requests as they come, those of the groups that started first, or those of the
earliest batch that are expected to be longest."""

BatchOrder: TypeAlias = Literal["arrival", "longest"]
"""The same for the requests of one batch, whose groups start together."""

PriorityOf: TypeAlias = Callable[[int], "int | None"]
"""Returns the priority of a group's requests, by the position of its prompt."""


SlotOf: TypeAlias = Callable[[int, Sequence[int]], "RequestSlot | None"]
"""Returns what a group's request waits for, by the position and the prompt."""


def no_priority(position: int) -> None:
    """Requests of all groups are alike."""


def no_slot(position: int, prompt: Sequence[int]) -> None:
    """Requests are sent at once."""


def oldest_first(position: int) -> int:
    """Prompts are taken in turn, so that an earlier one started with older weights."""
    return -position


def choose_priority(
    order: RequestOrder, capabilities: ServerCapabilities
) -> PriorityOf:
    """Returns the priorities of an order.

    Raises:
        UnsupportedByServerError: if the servers ignore them, or would interrupt what
            runs, which computes it twice.
    """
    if order != "oldest":
        return no_priority
    check_priorities(capabilities)
    if not capabilities.args.disable_priority_preemption:
        raise UnsupportedByServerError(
            "request_order='oldest' needs servers that let running requests end: start "
            "them with disable_priority_preemption=True."
        )
    return oldest_first


def check_one_response(order: RequestOrder, further: Mapping[str, Any]) -> None:
    """Checks that conversations have one response each, where an order needs it.

    Args:
        order: of the requests.
        further: arguments that make conversations of more than one response.

    Raises:
        ConfigurationError: if one of them is given for ``"longest"``.
    """
    given = [name for name, value in further.items() if value is not None]
    if order == "longest" and given:
        raise ConfigurationError(
            f"request_order='longest' compares responses to one prompt, and with "
            f"{' and '.join(given)} a conversation has several; take 'oldest', or "
            f"max_turns=1 with plain functions."
        )


def choose_slots(
    order: RequestOrder,
    engine: RLSGLangEngine,
    groups_per_update: int,
) -> SlotOf:
    """Returns what the requests of an order wait for.

    Args:
        order: of the requests.
        engine: that they are sent with.
        groups_per_update: groups of the batches between two weight updates; those of
            earlier ones go first.

    Raises:
        UnsupportedByServerError: if servers do not tell how many requests they run.
    """
    if order != "longest":
        return no_slot
    slots = Slots(engine)
    return lambda position, prompt: slots.slot(
        prompt, batch=position // groups_per_update
    )
