"""Checks of ``MCAdvantage``'s requirements, before TorchRL gets the first batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.objectives.llm import MCAdvantage

from torchrl_sglang.errors import ConfigurationError


def check_advantages(
    postproc: Any, replay_buffer: Any, row: TensorDictBase, group_size: int
) -> None:
    """Compares groups with each ``MCAdvantage`` that they go through.

    One in a buffer on Ray is not seen.
    """
    for transform in (postproc, getattr(replay_buffer, "_transform", None)):
        for advantage in _find(transform):
            _check(advantage, row, group_size)


def _find(transform: Any) -> Iterator[MCAdvantage]:
    if isinstance(transform, MCAdvantage):
        yield transform
    # A Compose, or another module that has some.
    elif callable(getattr(transform, "modules", None)):
        yield from (m for m in transform.modules() if isinstance(m, MCAdvantage))


def _check(advantage: MCAdvantage, row: TensorDictBase, group_size: int) -> None:
    size, key = advantage.grpo_size, advantage.prompt_key
    if group_size == 1:
        raise ConfigurationError(
            f"group_size is 1, and MCAdvantage(grpo_size={size}) compares the "
            f"responses of a group; give the collector group_size={max(size, 2)}."
        )
    if group_size not in (size, getattr(advantage, "candidate_group_size", size)):
        raise ConfigurationError(
            f"group_size is {group_size}, and MCAdvantage has grpo_size={size}: groups "
            f"would be mixed, or never be complete; give both the same."
        )
    if key not in row.keys(include_nested=isinstance(key, tuple)):
        names = sorted(name for name in row.keys() if isinstance(name, str))
        raise ConfigurationError(
            f"MCAdvantage groups by prompt_key={key!r}, which the batch does not have; "
            f"it has {names}. Give MCAdvantage(..., prompt_key=...) the key of the "
            f"prompt, which is the collector's query_key."
        )
