"""Checked arguments of a gateway for its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.dialects.base import Dialect
from torchrl_sglang.gateway.reading import ToolChoiceMode
from torchrl_sglang.requests.sampling import SAMPLING_ALIASES, SAMPLING_PARAMETERS, hint
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.checks import check_count, check_mapping, check_seconds
from torchrl_sglang.types import LogProbsMode


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOptions:
    """Arguments of a gateway for its answers; see :class:`.Gateway`."""

    tokenizer: Any
    """Tokenizer of the model."""
    chat_template: str | None
    """Jinja template; ``None`` for the tokenizer's."""
    dialects: Sequence[Dialect]
    """Accepted dialects."""
    api_key: str
    """Key to every session."""
    open: bool
    """Whether a session's path is sufficient for access."""
    keep_alive_seconds: float
    """Interval between comments in a stream without content."""
    tool_call_parser: str | None
    """SGLang's name of the format of tool calls."""
    reasoning_parser: str | None
    """SGLang's name of the format of reasoning."""
    default_sampling_params: Mapping[str, Any]
    """Defaults of requests, under SGLang's names."""
    forced_sampling_params: Mapping[str, Any]
    """Overrides of all requests, under SGLang's names."""
    request_timeout: float
    """Timeout of a response, in seconds."""
    limits: SessionLimits
    """Limits of each session."""
    tool_choice: ToolChoiceMode
    """Enforcement of a choice of tools."""
    ignored_params: Sequence[str]
    """Names of fields without effect."""
    token_columns: Sequence[TokenColumn]
    """Further quantities of each token."""
    logprobs_mode: LogProbsMode
    """Distribution of the recorded log-probs."""

    def __post_init__(self) -> None:
        check_seconds("keep_alive_seconds", self.keep_alive_seconds)
        check_seconds("request_timeout", self.request_timeout)
        for name in ("default_sampling_params", "forced_sampling_params"):
            object.__setattr__(self, name, _params(name, getattr(self, name)))
        object.__setattr__(self, "dialects", _check_dialects(self.dialects))


def _check_dialects(dialects: Sequence[Dialect]) -> tuple[Dialect, ...]:
    wrong = [dialect for dialect in dialects if not isinstance(dialect, Dialect)]
    if wrong or not dialects:
        raise ConfigurationError(
            f"dialects must be objects of classes of Dialect, got {dialects!r}."
        )
    paths = Counter(endpoint.path for d in dialects for endpoint in d.endpoints)
    if repeated := [path for path, count in paths.items() if count > 1]:
        raise ConfigurationError(f"Two of dialects have {', '.join(repeated)}.")
    return tuple(dialects)


def _params(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
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
