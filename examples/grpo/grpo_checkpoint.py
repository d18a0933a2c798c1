"""Checkpoints: one file each, complete or not there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from torchrl_sglang.errors import ConfigurationError

SAME = (
    "env.dataset",
    "env.answer",
    "env.format_reward",
    "env.system_prompt",
    "env.repeats",
    "model.name",
    "train.seed",
    "train.dialog_turns_per_batch",
    "train_model.lora.enabled",
    "train_model.lora.r",
    "train_model.lora.alpha",
    "optimizer.name",
)
"""What a run that goes on must have in common with the one that was saved.

Every other parameter counts with its new value from the first step on.
"""

RESULTS = ("config.yaml", "rollouts.jsonl", "model")
"""What a run writes beside its checkpoints, from its first step on."""


class Checkpoints:
    """The newest checkpoints of a run.

    Args:
        folder: to write to; created if missing.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """Returns all complete checkpoints, the newest last."""
        return sorted(self._folder.glob("step_*.pt"))

    def load(self, cfg: DictConfig) -> dict[str, Any] | None:
        """Returns the newest checkpoint, if the run is to go on and there is one.

        Raises:
            ConfigurationError: if there are checkpoints, or other results, and the run
                is to begin, or if the checkpoints are of another run.
        """
        paths = self.paths()
        results = (self._folder.parent / name for name in RESULTS)
        if not cfg.train.resume:
            for path in (*paths, *results):
                # Before the first step, the file of the rollouts is empty.
                if path.exists() and path.stat().st_size:
                    raise ConfigurationError(
                        f"{path} is of an earlier run; give train.resume=true to go on "
                        f"after its newest checkpoint, or begin again if it has none, "
                        f"or another logging.experiment_name."
                    )
        if not paths:
            return None
        state: dict[str, Any] = torch.load(
            paths[-1], map_location="cpu", weights_only=False
        )
        saved = OmegaConf.create(state["config"])
        for name in SAME:
            before, now = OmegaConf.select(saved, name), OmegaConf.select(cfg, name)
            if before != now:
                raise ConfigurationError(
                    f"{paths[-1]} was saved with {name}={before}, and this run has "
                    f"{name}={now}; give the same, or another logging.experiment_name."
                )
        return state

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes a checkpoint, so that a kill at any time leaves the older or it."""
        path = self._folder / f"step_{step:08}.pt"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        # Of a run that was killed while it wrote one. Not before this run has been
        # let go on: a second start by mistake leaves those of the first alone.
        partials = self._folder.glob("step_*.partial")
        for old in (*self.paths()[: -self._keep], *partials):
            old.unlink()
        return path


def random_state() -> dict[str, Any]:
    """Returns the state of the random numbers of the trainer."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Goes on with random numbers where a state was saved."""
    torch.set_rng_state(state["cpu"])
    # With another number of GPUs, theirs cannot be continued.
    if len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state.get("cuda", []))


def keep_rows(path: Path, keep: Callable[[str], bool]) -> None:
    """Rewrites a file of lines with those to keep."""
    lines = [line for line in path.read_text().split("\n") if keep(line)]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in lines))
    partial.replace(path)


def forget_later_steps(rollouts: Path, scalars: Iterable[Path], step: int) -> None:
    """Removes what a killed run has written after its last checkpoint.

    Args:
        rollouts: file of the rollouts.
        scalars: files of TorchRL's ``CSVLogger``.
        step: of the checkpoint.
    """

    def is_earlier(line: str) -> bool:
        try:
            return bool(json.loads(line)["step"] <= step)
        except ValueError:
            # The last line of a killed run.
            return False

    def is_earlier_scalar(line: str) -> bool:
        number = re.match(r"(\d+),", line)
        return number is not None and int(number[1]) <= step

    if rollouts.exists():
        keep_rows(rollouts, is_earlier)
    for path in scalars:
        keep_rows(path, is_earlier_scalar)
