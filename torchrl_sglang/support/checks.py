"""Argument validation for all layers.

Each check returns the value as a Python type, so that NumPy scalars are accepted, and
raises :class:`~torchrl_sglang.errors.ConfigurationError` with the argument, the value
and the accepted values.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.counterparts import COUNTERPARTS
from torchrl_sglang.support.passwords import hide_passwords

T = TypeVar("T")
Init = TypeVar("Init", bound=Callable[..., None])

MOST_REWARD = (2 - 2**-23) * 2.0**127
"""Rows hold rewards as float32; larger ones are infinite in it."""


def to_python(value: Any) -> Any:
    """Converts NumPy scalars, also in a list or a mapping; keeps other values."""
    # Its import takes 0.1 s, which most commands do not need.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return value
    if isinstance(value, numpy.generic):
        return value.item()
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        if any(issubclass(i, numpy.generic) for i in set(map(type, value))):
            return kind(map(to_python, value))
    elif kind is dict and value:
        return {to_python(name): to_python(item) for name, item in value.items()}
    return value


def check_positive(
    name: str, value: Any, *, zero: bool = False, endless: bool = False, unit: str = ""
) -> float:
    """Returns a number above 0; ``zero`` and ``endless`` accept 0 and infinity."""
    number = to_python(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not (
        0 < number < math.inf
        or (zero and number == 0)
        or (endless and number == math.inf)
    ):
        sign = "non-negative" if zero else "positive"
        kind = f"{sign}, finite number{unit}"
        if endless:
            kind = f"{sign} number{unit}, or math.inf for no limit"
        raise ConfigurationError(f"{name} must be a {kind}, got {value!r}.")
    return float(number)


def check_seconds(
    name: str, value: Any, *, zero: bool = False, endless: bool = False
) -> float:
    """Returns a duration in seconds; ``zero`` and ``endless`` accept 0 and infinity."""
    return check_positive(name, value, zero=zero, endless=endless, unit=" of seconds")


def timeout_or(default: float, timeout: float | None) -> float:
    """Returns a timeout in seconds, by default ``default``."""
    return default if timeout is None else check_seconds("timeout", timeout)


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Returns an integer of at least ``least``."""
    count = to_python(value)
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise ConfigurationError(
            f"{name} must be an integer of at least {least}, got {value!r}."
        )
    return count


def check_flag(name: str, value: Any) -> bool:
    """Returns a bool; other types are refused."""
    flag = to_python(value)
    if not isinstance(flag, bool):
        raise ConfigurationError(
            f"{name} must be a bool, got {value!r}; give True or False."
        )
    return flag


def check_auto(name: str, value: Any) -> bool | Literal["auto"]:
    """Returns a bool, or ``"auto"``."""
    flag = to_python(value)
    if not isinstance(flag, bool) and flag != "auto":
        raise ConfigurationError(
            f"{name} must be 'auto', True or False, got {value!r}."
        )
    return cast("bool | Literal['auto']", flag)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses a value outside of the choices."""
    if value not in choices:
        raise ConfigurationError(
            f"{name}={value!r} is not one of {', '.join(map(repr, choices))}."
        )


def check_port(name: str, value: Any) -> int:
    """Returns a TCP port to listen on."""
    try:
        port = check_count(name, value)
    except ConfigurationError:
        port = 0
    if not 0 < port <= 65535:
        raise ConfigurationError(
            f"{name} must be a port, an integer from 1 to 65535, got {value!r}; leave "
            f"it out to have a free one."
        )
    return port


def check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Returns a mapping of names to values."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name} must be a mapping of names to values, got {value!r}, a "
            f"{type(value).__name__}."
        )
    return value


def check_keywords(
    name: str,
    given: Mapping[str, Any],
    kind: type,
    meant: Mapping[str, str] | None = None,
) -> None:
    """Refuses arguments unknown to a class's constructors, with the nearest name."""
    names = {
        parameter.name
        for base in kind.__mro__
        if "__init__" in vars(base)
        for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    } - {"self"}
    for argument in given:
        if argument not in names:
            word = (meant or {}).get(argument)
            hint = f" Did you mean {word!r}?" if word else suggest(str(argument), names)
            raise ConfigurationError(
                f"{name} has no argument {argument!r}, which {kind.__name__} would "
                f"ignore or refuse.{hint}"
            )


def refuse_unknown(init: Init) -> Init:
    """Makes a constructor refuse unknown arguments, with a suggestion.

    Raises:
        ConfigurationError: with all such arguments.

    Examples:
        >>> class Batch:
        ...     @refuse_unknown
        ...     def __init__(self, *, group_size: int) -> None: ...
        >>> Batch(num_generations=8)
        Traceback (most recent call last):
        torchrl_sglang.errors.ConfigurationError: Batch has no argument \
'num_generations'. TRL's num_generations is group_size=... here.
    """
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, /, *args: Any, **kwargs: Any) -> None:
        check_names(type(self).__name__, kwargs, parameters)
        init(self, *args, **kwargs)

    return cast(Init, checked)


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuses all unknown arguments, each with a suggestion."""
    unknown = [
        f"{owner} has no argument {name!r}.{suggest(name, known)}"
        for name in given
        if name not in known
    ]
    if unknown:
        raise ConfigurationError(" ".join(unknown))


def suggest(name: str, known: Collection[str]) -> str:
    """Returns a suggestion for an unknown argument, to append to a message.

    Args:
        name: name of the unknown argument.
        known: names of the existing arguments.

    Examples:
        >>> suggest("learning_rate", ["lr", "optimizer"])
        " TRL's learning_rate is lr=... here."
        >>> suggest("group_sise", ["group_size"])
        " Did you mean 'group_size'?"
    """
    for library, names in COUNTERPARTS.items():
        counterpart = names.get(name, "")
        if counterpart.partition("=")[0] in known:
            written = counterpart if "=" in counterpart else f"{counterpart}=..."
            return f" {library}'s {name} is {written} here."
    guess = nearest(name, known)
    return "" if guess is None else f" Did you mean {guess!r}?"


def given_once(name: str, value: T | None, alias: str, other: T | None) -> T | None:
    """Returns the value of an argument with two names."""
    if value is not None and other is not None:
        raise ConfigurationError(
            f"Give {name} once: {name}={hide_passwords(repr(value))}, "
            f"{alias}={hide_passwords(repr(other))}."
        )
    return other if value is None else value


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the most similar name, for a "did you mean"; or ``None``."""
    candidates = list(names)
    # A prefix is a match, however short.
    matches = [name for name in candidates if word and name.startswith(word)]
    matches += difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def some_of(texts: Iterable[str], most: int = 4) -> list[str]:
    """Returns the first texts for a message, and the number of the others."""
    items = list(texts)
    hidden = len(items) - most
    return [*items[:most], f"and {hidden} more"] if hidden > 0 else items


def as_reward(value: Any) -> float:
    """Returns a number of any type as a float; it must be finite in float32."""
    try:
        reward = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # noqa: BLE001 - A user's type raises anything.
        reward = math.nan
    if not abs(reward) <= MOST_REWARD:
        raise ConfigurationError(f"reward={value!r} must be a finite number.")
    return reward
