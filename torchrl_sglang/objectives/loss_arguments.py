"""Checks the values of a loss's arguments, which TorchRL's class takes as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.divergences import Distillation
from torchrl_sglang.objectives.packing import check_packing
from torchrl_sglang.objectives.transform import Aggregation, MaskingStrategy
from torchrl_sglang.support.checks import (
    check_choice,
    check_count,
    check_flag,
    check_positive,
    to_python,
)

OPTIONAL = {
    *("aggregation", "reduction", "kl_mask_threshold"),
    *("kl_to_ref_coeff", "kl_to_inference_coeff", "max_tokens", "distillation"),
}
"""Arguments that may be ``None``, for TorchRL's default or an absent term."""


def check_loss_arguments(given: Mapping[str, Any]) -> None:
    """Checks arguments of a :class:`.CorrectedGRPOLoss`, some of them or all."""
    for name, value in given.items():
        if name in CHECKS and not (value is None and name in OPTIONAL):
            CHECKS[name](name, value)


def check_denominator(aggregation: str | None, max_tokens: int | None) -> None:
    """Refuses one of the two arguments for division by the longest response alone."""
    if (aggregation == "constant") is not (max_tokens is not None):
        raise ConfigurationError(
            f"aggregation={aggregation!r} and max_tokens={max_tokens} do not fit: give "
            f"aggregation='constant' and the longest response, or neither."
        )


def _check_clip_epsilon(name: str, value: Any) -> None:
    low, high = value, value
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ConfigurationError(
                f"{name} must be a number or a pair of them, got {value!r}."
            )
        low, high = value
    if check_positive(name, _number(low), zero=True) >= 1:
        raise ConfigurationError(
            f"{name}={value!r} leaves no ratio above 0 below; its first number "
            f"must be less than 1."
        )
    # An upper bound may be none.
    if _number(high) != math.inf:
        check_positive(name, _number(high), zero=True)


def _number(value: Any) -> Any:
    """Returns a NumPy or PyTorch number as Python's; anything else unchanged."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if is_tensor else to_python(value)


def _check_finite_number(name: str, value: Any) -> None:
    number = _number(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        raise ConfigurationError(f"{name} must be a finite number, got {value!r}.")


def _check_threshold(name: str, value: Any) -> None:
    check_positive(name, _number(value), zero=True)


def _check_distillation(name: str, value: Any) -> None:
    if not isinstance(value, Distillation):
        raise ConfigurationError(f"{name} must be a Distillation, got {value!r}.")


CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "aggregation": partial(check_choice, choices=(*get_args(Aggregation), "constant")),
    "masking_strategy": partial(check_choice, choices=get_args(MaskingStrategy)),
    # TorchRL has "sum", too, and computes the mean.
    "reduction": partial(check_choice, choices=("mean", "none")),
    "ref_log_prob_padding_side": partial(check_choice, choices=("left", "right")),
    "clip_epsilon": _check_clip_epsilon,
    "kl_mask_threshold": _check_threshold,
    # Coefficients may have any sign.
    "entropy_coeff": _check_finite_number,
    "kl_to_ref_coeff": _check_finite_number,
    "kl_to_inference_coeff": _check_finite_number,
    "entropy_bonus": check_flag,
    "replay_sampling": check_flag,
    "packing": check_packing,
    "max_tokens": check_count,
    "distillation": _check_distillation,
}
"""Argument -> its check."""
