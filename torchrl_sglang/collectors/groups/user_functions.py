"""Names the user's functions in errors, and checks their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchrl_sglang.errors import ConfigurationError, UserFunctionError
from torchrl_sglang.support.user_code import CallTimeoutError, describe


@contextmanager
def naming(role: str) -> Iterator[None]:
    """Names the function in the errors that a call of it raises.

    KeyError: 'answer'.
    """
    try:
        yield
    except CallTimeoutError as error:
        raise UserFunctionError(
            f"{role} did not return in time: {error} See CollectorTimeouts."
        ) from error
    except Exception as error:
        raise UserFunctionError(f"{role} raised {describe(error)}.") from error


def name_of(function: Any) -> str:
    """Returns the name of a function in messages."""
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return name


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; none of a built-in without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def check_call(
    role: str, function: Callable[..., Any], *names: str, **keywords: Any
) -> None:
    """Checks that a function takes the arguments that it will be called with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some built-in functions have no signature.
        return
    try:
        signature.bind(*names, **keywords)
    except TypeError as error:
        arguments = ", ".join([*names, *(f"{name}=..." for name in keywords)])
        raise ConfigurationError(
            f"{role} is called with ({arguments}), and it takes {signature}: {error}."
        ) from error
