"""Checks of arguments that several rooms take. Pure."""

from __future__ import annotations

import math
from typing import Any

from torchrl_sglang.errors import ConfigurationError

__all__ = ["check_count", "check_flag", "check_port", "check_seconds"]

HIGHEST_PORT = 65535
"""The greatest port of TCP."""


def check_seconds(name: str, value: Any) -> None:
    """Checks a time budget.

    Raises:
        ConfigurationError: if it is not a positive, finite number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ConfigurationError(
            f"{name}={value!r} is no time budget; give a positive, finite number of "
            f"seconds."
        )


def check_count(name: str, value: Any, unit: str) -> None:
    """Checks a whole number of something, at least one.

    Raises:
        ConfigurationError: if it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(
            f"{name}={value!r} is no number of {unit}; give a whole, positive one."
        )


def check_flag(name: str, value: Any) -> None:
    """Checks what is either on or off.

    Raises:
        ConfigurationError: if it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} is no switch; give True or False.")


def check_port(name: str, value: Any) -> None:
    """Checks a port to listen on.

    Raises:
        ConfigurationError: if it is none.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 < value <= HIGHEST_PORT:
        raise ConfigurationError(
            f"{name}={value!r} is no port; give a whole number from 1 to "
            f"{HIGHEST_PORT}, or leave it out to have a free one."
        )
