"""Checks the arguments of SGLangWrapper, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from tensordict import NestedKey

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.requests.sampling import check_each
from torchrl_sglang.requests.token_columns import (
    TokenColumn,
    columns_of_mode,
    find_columns,
)
from torchrl_sglang.support.checks import check_count, check_flag, to_python
from torchrl_sglang.types import LogProbsMode, ServerCapabilities

InputMode = Literal["history", "text", "tokens"]
Inplace = Literal[True, False, "empty"]


def check_mode(
    input_mode: Any,
    *,
    generate: bool,
    pad_model_input: Any,
    return_log_probs: bool | None,
    return_generation_info: bool,
) -> None:
    """Checks the input and output modes of the wrapper."""
    if input_mode not in ("history", "text", "tokens"):
        raise ConfigurationError(
            f"input_mode must be one of 'history', 'text', 'tokens'. Got '{input_mode}'"
        )
    if pad_model_input is not None:
        raise ConfigurationError("pad_model_input is not supported by SGLangWrapper.")
    check_flag("return_generation_info", return_generation_info)
    if return_log_probs is not None:
        check_flag("return_log_probs", return_log_probs)
    if check_flag("generate", generate):
        return
    if return_log_probs is not None and not return_log_probs:
        raise ConfigurationError("return_log_probs must be True when generate=False.")
    if return_generation_info:
        raise ConfigurationError(
            "return_generation_info=True needs generate=True: scoring makes no "
            "responses."
        )


def check_batching(batching: Any, smallest: int | None, largest: int | None) -> None:
    """Refuses sizes of batches for a wrapper that makes none."""
    if batching is not None:
        check_flag("batching", batching)
    if batching is False and (smallest, largest) != (None, None):
        raise ConfigurationError(
            "min_batch_size and max_batch_size must be None if batching is False."
        )


def check_token_columns(
    given: Any, *, generate: bool, mode: LogProbsMode = "model"
) -> tuple[TokenColumn, ...]:
    """Returns the token columns that a wrapper writes."""
    if mode != "model" and not generate:
        raise ConfigurationError(
            f"logprobs_mode={mode!r} is of tokens that are sampled, and scoring gives "
            f"the model's own log-probs; leave it out with generate=False."
        )
    columns = columns_of_mode(mode, find_columns(given))
    if columns and not generate:
        raise ConfigurationError(
            "token_columns needs generate=True: scoring makes no responses."
        )
    return columns


def check_column_keys(
    columns: Iterable[TokenColumn], keys: Mapping[str, NestedKey], input_key: NestedKey
) -> None:
    """Refuses a token column at a key where a container, or the input, is."""
    containers = {"the input": input_key, **keys}
    for column in columns:
        for name, key in containers.items():
            first = key if isinstance(key, str) else key[0]
            if name != column.name and first == column.name:
                raise ConfigurationError(
                    f"The key {key!r} would have both {name} and {column.name}, which "
                    f"is a token column; choose another key or name."
                )


def check_samples(
    generate: bool, n: int, num_samples: int | None, inplace: Inplace | None
) -> tuple[int | None, Inplace]:
    """Returns ``num_samples`` and ``inplace``, given the parameters' ``n``."""
    inplace = to_python(inplace)
    if inplace not in (None, "empty") and not isinstance(inplace, bool):
        raise ConfigurationError(
            f"inplace must be True, False or 'empty', got {inplace!r}."
        )
    if num_samples is None:
        num_samples = n if n > 1 else None
    elif check_count("num_samples", num_samples) != n and n > 1:
        raise ConfigurationError("num_samples differs from generate_kwargs['n'].")
    if num_samples is None or not generate:
        return num_samples, True if inplace is None else inplace
    if inplace in (True, "empty"):
        raise ConfigurationError(
            "inplace must be False (or None) when generating more than one sample."
        )
    return num_samples, False


def check_sampling(
    generate: bool, params: Mapping[str, Any], capabilities: ServerCapabilities
) -> None:
    """Refuses values now that the engine would refuse in each call of the wrapper.

    What is wrong together can be put right by the parameters of a call.
    """
    if generate:
        # Where a server has no tokenizer, the wrapper matches stop strings.
        check_each(params, replace(capabilities, has_tokenizer=True))


def check_tokenizer_kwargs(
    given: Mapping[str, Any] | None, pad_output: bool
) -> dict[str, Any]:
    """Returns the keywords for the tokenizer, with those that the wrapper fixes."""
    fixed = {
        "return_attention_mask": True,
        "padding": pad_output,
        "padding_side": "left",
    }
    kwargs = {**fixed, **(given or {})}
    for name, value in fixed.items():
        if kwargs[name] != value:
            raise ConfigurationError(
                f"tokenizer_kwargs[{name!r}] must be {value!r} here, got "
                f"{kwargs[name]!r}; outputs are padded with pad_output=True."
            )
    return kwargs
