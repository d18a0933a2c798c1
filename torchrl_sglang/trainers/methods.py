"""``METHODS``: loss and advantage of each method, a row with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.losses import (
    CorrectedCISPOLoss,
    CorrectedGRPOLoss,
    CorrectedGSPOLoss,
)
from torchrl_sglang.support.checks import suggest


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A loss with its arguments, and the advantage that belongs to it."""

    loss: type[CorrectedGRPOLoss]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loss, unless others are given."""
    advantage: str = "standardized"
    """One of ``objectives.advantages.ADVANTAGES``."""
    needs_max_tokens: bool = False
    """Whether the loss is divided by the longest response that there can be."""


METHODS: dict[str, Method] = {
    # DeepSeekMath, https://arxiv.org/abs/2402.03300; a mean over all tokens.
    "grpo": Method(loss=CorrectedGRPOLoss, arguments={"clip_epsilon": 0.2}),
    # https://arxiv.org/abs/2503.14476: a higher upper bound; give
    # keep_group=has_variance for its dynamic sampling, and overlong_penalty.
    "dapo": Method(loss=CorrectedGRPOLoss, arguments={"clip_epsilon": (0.2, 0.28)}),
    # https://arxiv.org/abs/2503.20783: no division by deviation or length.
    "dr_grpo": Method(
        loss=CorrectedGRPOLoss,
        arguments={"clip_epsilon": 0.2, "aggregation": "constant"},
        advantage="centered",
        needs_max_tokens=True,
    ),
    # https://arxiv.org/abs/2507.18071: the ratio of a whole response.
    "gspo": Method(loss=CorrectedGSPOLoss),
    # MiniMax-M1, https://arxiv.org/abs/2506.13585: no token loses its gradient.
    "cispo": Method(loss=CorrectedCISPOLoss, arguments={"clip_epsilon": (0.999, 2.0)}),
    # https://arxiv.org/abs/2402.14740: REINFORCE, the others as baseline.
    "rloo": Method(
        loss=CorrectedGRPOLoss,
        arguments={"clip_epsilon": 0.2},
        advantage="leave_one_out",
    ),
}
"""Name -> method."""


def find_method(name: Any) -> Method:
    """Returns a method by name."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    hint = suggest(str(name), METHODS)
    raise ConfigurationError(
        f"method={name!r} is not one of {', '.join(METHODS)}.{hint}"
    )


class overlong_penalty:  # noqa: N801 - Used like a function.
    """A reward function that punishes responses near the limit, as DAPO does.

    0 up to ``max_tokens - margin`` tokens, then falling linearly to -1 at
    ``max_tokens``. https://arxiv.org/abs/2503.14476, section 3.4.

    Args:
        max_tokens: longest response that there can be.
        margin: number of tokens before it in which the punishment grows.

    Raises:
        ConfigurationError: unless ``0 < margin <= max_tokens``.

    Examples:
        >>> rewards = {"right": right, "long": overlong_penalty(1024, 256)}
        ... # doctest: +SKIP
    """

    def __init__(self, max_tokens: int, margin: int) -> None:
        if not 0 < margin <= max_tokens:
            raise ConfigurationError(
                f"margin={margin} must be positive and at most max_tokens={max_tokens}."
            )
        self._start, self._margin = max_tokens - margin, margin

    def __call__(self, conversation: Any, task: Any) -> float:
        """Returns the punishment of a conversation's last response."""
        over = len(conversation.turns[-1].token_ids) - self._start
        return -min(max(over / self._margin, 0.0), 1.0)
