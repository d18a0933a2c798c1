"""Argument validation that all layers share. Pure.

Each check returns the value as Python's own type, so that NumPy's scalars are accepted
wherever Python's are, and raises :class:`~torchrl_sglang.errors.ConfigurationError`
with a sentence that names the argument, the value and what is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "check_count",
    "check_flag",
    "check_mapping",
    "check_port",
    "check_seconds",
    "to_python",
]

HIGHEST_PORT = 65535
"""The greatest port of TCP."""


def to_python(value: Any) -> Any:
    """Returns a NumPy scalar as Python's own, and anything else as it is.

    Examples:
        >>> to_python(np.bool_(True)), to_python(np.float32(0.5)), to_python("3")
        (True, 0.5, '3')
    """
    return value.item() if isinstance(value, np.generic) else value


def check_seconds(
    name: str, value: Any, *, zero: bool = False, endless: bool = False
) -> float:
    """Returns a duration in seconds.

    Args:
        name: of the argument.
        value: what was given.
        zero: accept 0.
        endless: accept infinity.

    Raises:
        ConfigurationError: if it is not a positive, finite number.

    Examples:
        >>> check_seconds("timeout", 3)
        3.0
        >>> check_seconds("timeout", "3")
        Traceback (most recent call last):
            ...
        torchrl_sglang.errors.ConfigurationError: timeout must be a positive, finite...
    """
    seconds = to_python(value)
    if not _is_number(seconds) or not (
        0 < seconds < math.inf
        or (zero and seconds == 0)
        or (endless and seconds == math.inf)
    ):
        sign = "non-negative" if zero else "positive"
        kind = f"{sign} number of seconds, or math.inf for no limit"
        if not endless:
            kind = f"{sign}, finite number of seconds"
        raise ConfigurationError(f"{name} must be a {kind}, got {value!r}.")
    return float(seconds)


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Returns a whole number of something.

    Args:
        name: of the argument.
        value: what was given.
        least: smallest number that is accepted.

    Raises:
        ConfigurationError: if it is not an integer, or smaller.

    Examples:
        >>> check_count("n", 2.0)
        Traceback (most recent call last):
            ...
        torchrl_sglang.errors.ConfigurationError: n must be an integer of at least...
    """
    count = to_python(value)
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise ConfigurationError(
            f"{name} must be an integer of at least {least}, got {value!r}."
        )
    return count


def check_flag(name: str, value: Any) -> bool:
    """Returns what is either True or False.

    Raises:
        ConfigurationError: if it is neither.
    """
    flag = to_python(value)
    if not isinstance(flag, bool):
        raise ConfigurationError(
            f"{name} must be a boolean, got {value!r}; give True or False."
        )
    return flag


def check_port(name: str, value: Any) -> int:
    """Returns a TCP port to listen on.

    Raises:
        ConfigurationError: if it is none.
    """
    port = to_python(value)
    whole = isinstance(port, int) and not isinstance(port, bool)
    if not whole or not 0 < port <= HIGHEST_PORT:
        raise ConfigurationError(
            f"{name} must be a port, an integer from 1 to {HIGHEST_PORT}, got "
            f"{value!r}; leave it out to have a free one."
        )
    return int(port)


def check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Returns a mapping of names to values.

    Raises:
        ConfigurationError: if it is none.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name} must be a mapping of names to values, got {value!r}, a "
            f"{type(value).__name__}."
        )
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
