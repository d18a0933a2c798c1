"""The recipe in ``examples/grpo``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "grpo"

SMALL = (
    "env.repeats=4",
    "train.total_dialog_turns=48",
    "train.dialog_turns_per_batch=16",
    "train.optim_batch_size=8",
    "inference_model.max_tokens=4",
    "logging.checkpoint_frequency=2",
    "logging.eval_frequency=2",
    "logging.eval_problems=3",
)
"""Three steps of four groups each."""
