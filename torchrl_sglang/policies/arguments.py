"""Checks the arguments of SGLangWrapper that depend on each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torchrl_sglang.backends.support.checks import check_count, check_flag, to_python
from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "Inplace",
    "InputMode",
    "check_batching",
    "check_input",
    "check_returned",
    "check_samples",
    "check_tokenizer_kwargs",
]

InputMode = Literal["history", "text", "tokens"]
Inplace = Literal[True, False, "empty"]


def check_input(input_mode: Any, pad_model_input: Any) -> None:
    """Raises unless the mode is known and no input is to be padded."""
    if input_mode not in ("history", "text", "tokens"):
        raise ConfigurationError(
            f"input_mode must be one of 'history', 'text', 'tokens'. Got '{input_mode}'"
        )
    if pad_model_input is not None:
        raise ConfigurationError("pad_model_input is not supported by SGLangWrapper.")


def check_returned(
    generate: bool, return_log_probs: bool | None, return_generation_info: bool
) -> tuple[bool, bool]:
    """Returns whether to write log-probs, and generation info."""
    if return_log_probs is not None:
        return_log_probs = check_flag("return_log_probs", return_log_probs)
    info = check_flag("return_generation_info", return_generation_info)
    if return_log_probs is False and not generate:
        raise ConfigurationError("return_log_probs must be True when generate=False.")
    if info and not generate:
        raise ConfigurationError(
            "return_generation_info=True needs generate=True: scoring makes no "
            "responses."
        )
    return return_log_probs is not False, info


def check_samples(
    generate: bool, n: int, num_samples: int | None, inplace: Inplace | None
) -> tuple[int | None, Inplace]:
    """Returns ``num_samples`` and ``inplace``, given the parameters' ``n``."""
    if num_samples is not None:
        num_samples = check_count("num_samples", num_samples)
    inplace = to_python(inplace)
    if inplace not in (None, "empty") and not isinstance(inplace, bool):
        raise ConfigurationError(
            f"inplace must be True, False or 'empty', got {inplace!r}."
        )
    if num_samples is not None and n > 1 and n != num_samples:
        raise ConfigurationError("num_samples differs from generate_kwargs['n'].")
    if num_samples is None and n > 1:
        num_samples = n
    if num_samples is None or not generate:
        return num_samples, True if inplace is None else inplace
    if inplace in (True, "empty"):
        raise ConfigurationError(
            "inplace must be False (or None) when generating more than one sample."
        )
    return num_samples, False


def check_batching(
    batching: bool | None, min_size: int | None, max_size: int | None
) -> int | None:
    """Returns ``min_batch_size``, which is set if batching is enabled."""
    if batching is not None:
        batching = check_flag("batching", batching)
    if batching is False and (min_size, max_size) != (None, None):
        raise ConfigurationError(
            "min_batch_size and max_batch_size must be None if batching is False."
        )
    return 1 if batching and min_size is None else min_size


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
