"""Rules for trained turns, and the returns of their rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torchrl_sglang.errors import ConfigurationError

TrainedRule: TypeAlias = Callable[[Any], bool]
"""Returns whether a :class:`.Turn` is trained."""


def every_turn(turn: Any) -> bool:
    """Returns True: without a rule, all turns are trained."""
    return True


def trained_rule(given: Any) -> TrainedRule:
    """Returns the rule for an argument ``trained``.

    Args:
        given: a function of a turn, a regular expression that a turn's whole ``model``
            matches, or None for all turns.

    ConfigurationError: if it is none of these. The rule raises it if the function
        fails, or does not return a bool.

    Examples:
        >>> from types import SimpleNamespace
        >>> rule = trained_rule("claude-(opus|sonnet).*")
        >>> [rule(SimpleNamespace(model=name)) for name in ("claude-opus-4", "haiku")]
        [True, False]
    """
    if given is None:
        return every_turn
    if isinstance(given, str):
        try:
            pattern = re.compile(given)
        except re.error as error:
            raise ConfigurationError(
                f"trained={given!r} is not a regular expression: {error}."
            ) from error
        return lambda turn: pattern.fullmatch(turn.model) is not None
    if callable(given):
        return lambda turn: _ask(given, turn)
    raise ConfigurationError(
        f"trained={given!r} must be a function of a turn, or a regular expression for "
        f"the names of models."
    )


def _ask(function: Callable[[Any], Any], turn: Any) -> bool:
    try:
        answer = function(turn)
    except Exception as error:
        raise ConfigurationError(
            f"The function trained={function!r} failed on turn {turn.number} with "
            f"model={turn.model!r}: {type(error).__name__}: {error}"
        ) from error
    if isinstance(answer, bool):
        return answer
    raise ConfigurationError(
        f"The function trained={function!r} returned {answer!r} for a turn, and has "
        f"to return a bool."
    )


def check_discount(given: Any) -> float:
    """Returns a discount over turns."""
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if is_number and 0 <= given <= 1:
        return float(given)
    raise ConfigurationError(f"discount={given!r} must be a number in [0, 1].")


def discounted(rewards: Sequence[float], discount: float) -> list[float]:
    r"""Returns the return of each turn: :math:`G_t = \sum_{k \ge t} d^{k-t} r_k`.

    Args:
        rewards: :math:`r_k` of the turns of a path, in their order.
        discount: :math:`d`, per turn.

    Examples:
        >>> discounted([1.0, 0.0, 4.0], 0.5)
        [2.0, 2.0, 4.0]
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]
