"""The recipe in ``examples/grpo``, whose modules this makes importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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

# As for a script, whose folder is the first one.
sys.path.insert(0, str(FOLDER))


def compose(folder: Path, mode: str, *overrides: str) -> Any:
    """Composes a configuration for a CPU, as hydra does for the scripts.

    Args:
        folder: of the run.
        mode: "sync" or "async".
        overrides: what follows on the command line.
    """
    import hydra

    common = (f"mode={mode}", "+debug=cpu", f"logging.dir={folder}")
    with hydra.initialize_config_dir(config_dir=str(FOLDER / "config")):
        return hydra.compose("grpo_gsm8k", overrides=[*common, *overrides])
