"""Checks of a gateway's arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.requests.sampling import SAMPLING_ALIASES, SAMPLING_PARAMETERS, hint
from torchrl_sglang.support.checks import check_count, check_mapping, check_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """Limits of a session; ``None``: no limit."""

    max_turns: int = 1_000
    """Turns."""
    max_tokens: int | None = None
    """Generated tokens."""
    session_seconds: float | None = None
    """Seconds since its start."""

    def __post_init__(self) -> None:
        check_count("max_turns", self.max_turns)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens)
        if self.session_seconds is not None:
            check_seconds("session_seconds", self.session_seconds)


def check_dialects(dialects: Sequence[Dialect]) -> tuple[Dialect, ...]:
    """Returns the dialects; raises :class:`ConfigurationError` if they are wrong."""
    wrong = [dialect for dialect in dialects if not isinstance(dialect, Dialect)]
    if wrong or not dialects:
        raise ConfigurationError(
            f"dialects must be objects of classes of Dialect, got {dialects!r}."
        )
    paths = Counter(endpoint.path for d in dialects for endpoint in d.endpoints)
    if repeated := [path for path, count in paths.items() if count > 1]:
        raise ConfigurationError(f"Two of dialects have {', '.join(repeated)}.")
    return tuple(dialects)


def check_params(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns sampling parameters under SGLang's names."""
    params = {}
    for key, value in {} if given is None else check_mapping(name, given).items():
        sglang_name = SAMPLING_ALIASES.get(key, key)
        if sglang_name not in SAMPLING_PARAMETERS:
            raise ConfigurationError(
                f"{name}: {key!r} is not a sampling parameter.{hint(str(key))}"
            )
        params[sglang_name] = value
    return params
