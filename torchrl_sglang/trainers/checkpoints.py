"""Checkpoints of a run: one file each, complete or not there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count

Resume: TypeAlias = bool | Literal["auto"]
"""Whether a run goes on with the newest checkpoint; ``"auto"``: if there is one."""

ROLLOUTS = "rollouts.jsonl"

RESULTS = (ROLLOUTS, "model", "best")
"""Names of the results of a run, beside its checkpoints."""


class Checkpoints:
    """The newest checkpoints of a run.

    Args:
        folder: of the run; created if missing.
        keep: number of checkpoints to keep.
        identity: what a run that goes on must have in common with the one that was
            saved.

    Examples:
        >>> import tempfile
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), identity={"seed": 0})
        >>> checkpoints.load("auto") is None
        True
        >>> path = checkpoints.save(1, {"learner": {}})
        >>> checkpoints.load("auto")["step"]
        1
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, identity: Mapping[str, Any]
    ) -> None:
        check_count("keep_checkpoints", keep, least=1)
        self._run = folder
        self._folder = folder / "checkpoints"
        self._keep = keep
        self._identity = dict(identity)
        self._folder.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """Returns all complete checkpoints, the newest last."""
        return sorted(self._folder.glob("step_*.pt"))

    def load(self, resume: Resume) -> dict[str, Any] | None:
        """Returns the newest checkpoint; ``None`` if the run begins.

        Raises:
            ConfigurationError: if there are results of an earlier run and this one is
                to begin, if it is to go on and there is no checkpoint, or if the
                checkpoint is of another run.
        """
        paths = self.paths()
        if not resume:
            self._check_new(paths)
            return None
        if not paths:
            if resume is True:
                raise ConfigurationError(
                    f"resume=True, and {self._folder} has no checkpoint; give "
                    f"resume='auto' to begin if there is none."
                )
            return None
        state: dict[str, Any] = torch.load(
            paths[-1], map_location="cpu", weights_only=False
        )
        for name, now in self._identity.items():
            before = state["identity"].get(name)
            if before != now:
                raise ConfigurationError(
                    f"{paths[-1]} was saved with {name}={before!r}, and this run has "
                    f"{name}={now!r}; give the same, or another output."
                )
        return state

    def _check_new(self, paths: list[Path]) -> None:
        for path in (*paths, *(self._run / name for name in RESULTS)):
            if path.exists() and path.stat().st_size:
                raise ConfigurationError(
                    f"{path} is of an earlier run; give resume='auto' to go on with "
                    f"it, or another output."
                )

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, so that a kill at any time leaves the older or it."""
        path = self._folder / f"step_{step:08}.pt"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save({**state, "step": step, "identity": self._identity}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        for old in (*self.paths()[: -self._keep], *self._folder.glob("*.partial")):
            old.unlink()
        return path


def random_state() -> dict[str, Any]:
    """Returns the state of the random numbers of this process."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Goes on with random numbers where a state was saved."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def forget_later_steps(folder: Path, step: int) -> None:
    """Removes what a killed run wrote after its last checkpoint.

    Args:
        folder: of the run: its rollouts, and the files of TorchRL's ``CSVLogger``.
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

    _keep_lines(folder / ROLLOUTS, is_earlier)
    for path in (folder / "logs").rglob("scalars/**/*.csv"):
        _keep_lines(path, is_earlier_scalar)


def _keep_lines(path: Path, keep: Callable[[str], bool]) -> None:
    if not path.exists():
        return
    partial = path.with_suffix(".partial")
    with (
        path.open(encoding="utf-8") as lines,
        partial.open("w", encoding="utf-8") as kept,
    ):
        kept.writelines(line for line in lines if keep(line))
    partial.replace(path)
