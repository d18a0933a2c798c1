"""``logprobs_mode="behaviour"``: log-probs of what tokens were really drawn from. Pure.

Where sampling leaves tokens out (top-k, top-p, min-p, greedy), SGLang reports those it
left and the log-prob among them, after temperature, penalties, biases and grammar.
Where it leaves none out, the log-probs of ``logprobs_mode="sampling"`` are those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.requests.sampling import (
    GREEDY_TEMPERATURE,
    filters_of,
    temperature_of,
)
from torchrl_sglang.requests.token_columns import (
    SAMPLING_SUPPORT,
    TOKEN_COLUMNS,
    TokenColumn,
    find_columns,
)
from torchrl_sglang.types import ServerCapabilities

AnyRequest = TypeVar("AnyRequest", bound=Any)


def _temperature(params: Mapping[str, Any], capabilities: ServerCapabilities) -> float:
    value = temperature_of(params, capabilities)
    # A greedy token is alone in its support, whatever its logit is divided by.
    return 1.0 if value is None or value < GREEDY_TEMPERATURE else value


def _unknown(params: Mapping[str, Any], capabilities: ServerCapabilities) -> None:
    return None


def _nothing(start: int) -> dict[str, Any]:
    return {}


def _ask_for_log_probs(start: int) -> dict[str, Any]:
    return {"return_sampling_mask": True}


TEMPERATURE = TokenColumn(
    name="sampling_temperature",
    dtype="float32",
    request=_nothing,
    field="",
    of_request=_temperature,
    unknown=1.0,
    padding=1.0,
)
"""Temperature that each token was drawn with; 1 for greedy ones, and in prompts."""

LOG_PROBS = TokenColumn(
    name="sampling_log_probs",
    dtype="float32",
    request=_ask_for_log_probs,
    field="output_token_sampling_logprobs",
    field_type=list[float],
    dropped_by_router=True,
)
"""Log-prob of each token among those of its support; becomes ``log_probs``."""

_SUPPORT = TOKEN_COLUMNS[SAMPLING_SUPPORT]

_WHOLE_VOCABULARY = replace(
    _SUPPORT,
    request=_nothing,
    field="",
    of_request=_unknown,
    dropped_by_router=False,
    problem=None,
)
"""The support of tokens that any token could have been drawn for: empty lists."""

COLUMNS = (_SUPPORT, TEMPERATURE)
"""What a batch needs for the trainer to compute the same distribution."""


def with_columns(mode: str, given: Any) -> tuple[TokenColumn, ...]:
    """Returns token columns with those that a mode of log-probs has by itself."""
    columns = find_columns(given)
    if mode != "behaviour":
        return columns
    known = {column.name for column in columns}
    return (*columns, *(each for each in COLUMNS if each.name not in known))


def leaves_out(params: Mapping[str, Any], capabilities: ServerCapabilities) -> str:
    """Returns the parameter by which sampling leaves tokens out; "" if it does not."""
    temperature = temperature_of(params, capabilities)
    if temperature is not None and temperature < GREEDY_TEMPERATURE:
        return "temperature"
    return next(iter(filters_of(params, capabilities)), "")


def plan_behaviour(
    request: AnyRequest, params: Mapping[str, Any], capabilities: ServerCapabilities
) -> AnyRequest:
    """Returns a request that asks for what its mode of log-probs needs.

    Args:
        request: as it was given.
        params: its sampling parameters, checked.
        capabilities: of the servers.

    Raises:
        UnsupportedByServerError: if the servers cannot report it.
        ConfigurationError: if more is asked for than they report in this mode.
    """
    if request.logprobs_mode != "behaviour":
        return request
    columns = with_columns("behaviour", request.token_columns)
    filtered = leaves_out(params, capabilities)
    if not filtered and _SUPPORT.problem and _SUPPORT.problem(params, capabilities):
        return replace(request, token_columns=_exchange(columns))
    _check_support(filtered, params, capabilities)
    if request.top_logprobs:
        raise ConfigurationError(
            f"logprobs_mode='behaviour' has the log-prob of the sampled token only "
            f"where {filtered or 'top_k'} leaves tokens out, and "
            f"top_logprobs={request.top_logprobs} was asked for; leave one out."
        )
    return replace(request, token_columns=(*columns, LOG_PROBS))


def has_own_log_probs(request: Any) -> bool:
    """Returns whether log-probs come with the supports of the tokens."""
    return any(column.name == LOG_PROBS.name for column in request.token_columns)


def _exchange(columns: Sequence[TokenColumn]) -> tuple[TokenColumn, ...]:
    return tuple(
        _WHOLE_VOCABULARY if each.name == SAMPLING_SUPPORT else each for each in columns
    )


def _check_support(
    filtered: str, params: Mapping[str, Any], capabilities: ServerCapabilities
) -> None:
    assert _SUPPORT.problem is not None
    why = _SUPPORT.problem(params, capabilities)
    if not why:
        return
    value = params.get(filtered, capabilities.default_sampling_params.get(filtered))
    most = capabilities.args.sampling_mask_max_tokens
    if most is None:
        raise UnsupportedByServerError(
            f"logprobs_mode='behaviour' with {filtered}={value!r} needs to know which "
            f"tokens were left, and SGLang {capabilities.version} does not report it: "
            f"update the servers to 0.5.20 or later, or sample with a temperature "
            f"above 0 alone, without a filter of tokens."
        )
    raise UnsupportedByServerError(
        f"logprobs_mode='behaviour' with {filtered}={value!r} needs to know which "
        f"tokens were left, and {why} Once is enough: in generate_kwargs of a wrapper, "
        f"or in default_sampling_params of a gateway."
    )
