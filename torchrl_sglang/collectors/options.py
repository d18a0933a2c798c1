"""Checks of a collector's arguments, as far as no engine is needed for them. Pure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

from torchrl_sglang.collectors.scheduling.group_pool import OnStale
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.observer import check_recorder
from torchrl_sglang.requests.plan import check_priorities
from torchrl_sglang.support.checks import (
    Init,
    check_choice,
    check_count,
    check_flag,
    check_names,
)
from torchrl_sglang.support.user_code import refuse_coroutine
from torchrl_sglang.types import ServerCapabilities

OnOtherSender: TypeAlias = Literal["warn", "raise"]
"""What happens to a batch whose tokens come from weights that another sender sent."""

RequestOrder: TypeAlias = Literal["arrival", "oldest"]
"""Requests begin as they come, or groups that started earlier go first."""

COUNTS: Mapping[str, int] = {
    "group_size": 1,
    "groups_per_batch": 1,
    "batches_per_update": 1,
    "max_in_flight": 1,
    "max_staleness": 0,
    "max_retries": 0,
    "total_groups": -1,
    "seed": 0,
}
"""Argument -> the least number that it takes."""

UNLIMITED = ("max_in_flight",)
"""Those for which ``None`` is no limit."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "on_stale": get_args(OnStale),
    "on_other_sender": get_args(OnOtherSender),
    "request_order": get_args(RequestOrder),
}
"""Argument -> the words that it takes."""


def check_arguments(of_groups: Collection[str]) -> Callable[[Init], Init]:
    """Has the constructor of a collector check its arguments first."""

    def decorate(init: Init) -> Init:
        names = {*inspect.signature(init).parameters, *of_groups}

        @functools.wraps(init)
        def checked(self: Any, /, *args: Any, **kwargs: Any) -> None:
            check_names(type(self).__name__, kwargs, names)
            check_options(kwargs)
            init(self, *args, **kwargs)

        return cast(Init, checked)

    return decorate


def check_options(given: Mapping[str, Any]) -> None:
    """Checks arguments of an :class:`.AsyncLLMCollector`, some of them or all."""
    for name, value in given.items():
        if name in COUNTS:
            if value is not None or name not in UNLIMITED:
                check_count(name, value, least=COUNTS[name])
        elif name in CHOICES:
            check_choice(name, value, CHOICES[name])
        elif name in ("shuffle", "deterministic"):
            check_flag(name, value)
        elif name == "recorder":
            check_recorder(value)
        elif name == "timeouts":
            _check_timeouts(value)
        elif name == "postproc":
            _check_function(name, value)
            reason = "the thread that takes a batch, without an event loop, calls it"
            refuse_coroutine(name, value, reason)


def _check_timeouts(value: Any) -> None:
    if not isinstance(value, CollectorTimeouts | None):
        raise ConfigurationError(
            f"timeouts must be CollectorTimeouts, got {value!r}; give "
            f"CollectorTimeouts(engine=600.0)."
        )


def _check_function(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} must be a function, got {value!r}.")


def check_request_order(order: RequestOrder, capabilities: ServerCapabilities) -> None:
    """Refuses servers that ignore priorities, or that interrupt running requests."""
    if order == "arrival":
        return
    check_priorities(capabilities)
    if not capabilities.args.disable_priority_preemption:
        raise UnsupportedByServerError(
            "request_order='oldest' needs servers that let running requests end: start "
            "them with disable_priority_preemption=True."
        )
