"""Timeouts of a collector."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torchrl_sglang.support.checks import check_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectorTimeouts:
    """Timeouts of an :class:`.AsyncLLMCollector`, in seconds.

    Raises:
        ConfigurationError: if one is not a positive, finite number.

    Examples:
        >>> CollectorTimeouts(reward=5.0).reward
        5.0
    """

    turn: float = 1800.0
    """Timeout of each response of the policy."""
    step: float = 60.0
    """Timeout of each call of ``step`` or a tool, and of an environment's methods."""
    agent: float = 3600.0
    """Timeout of each run of an ``agent``."""
    reward: float = 60.0
    """Timeout of each call of a reward function."""
    engine: float = 600.0
    """Timeout of retrying a group after errors of the engine. The group is given up
    then; if others fail, too, and none is complete meanwhile, the collector ends. So it
    does if groups may start and the engine stays asleep for so long."""
    batch: float = 3600.0
    """Timeout of waiting for a batch."""
    shutdown: float = 10.0
    """Timeout of waiting for threads to end."""

    def __post_init__(self) -> None:
        for timeout in fields(self):
            check_seconds(timeout.name, getattr(self, timeout.name))
