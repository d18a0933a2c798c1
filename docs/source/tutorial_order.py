"""Order of the tutorials: each needs nothing but those before it."""

from __future__ import annotations

from pathlib import Path

ORDER = (
    "first_rollout",
    "log_probs",
    "weight_sync",
    "grpo",
    "async_grpo",
    "teacher",
    "multi_turn",
    "agent",
    "pydantic_ai",
    "verifiers",
    "without_gpu",
)


def position(filename: str) -> int:
    """Returns the place of a tutorial, for sphinx-gallery."""
    return ORDER.index(Path(filename).stem.removeprefix("plot_"))
