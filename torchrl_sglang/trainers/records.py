"""Checkpoints and logger of a run, as its arguments ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger

from torchrl_sglang.recording.format import SUBFOLDER
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.support.checks import check_port
from torchrl_sglang.telemetry.prometheus import check_installed
from torchrl_sglang.telemetry.server import MetricsEndpoint, serve_metrics
from torchrl_sglang.trainers.checkpoints import Checkpoints, Resume
from torchrl_sglang.trainers.loggers import (
    RESUMED,
    check_logger,
    forget_later_points,
    make_logger,
)
from torchrl_sglang.trainers.progress import StepsShown
from torchrl_sglang.trainers.ranks import TrainerRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """What a run writes, and where. The arguments are those of ``GRPO``."""

    folder: Path
    identity: Mapping[str, Any]
    """What a run that goes on has in common with the one that was saved."""
    hyperparameters: Mapping[str, Any]
    """What the logger is told of the arguments."""
    resume: Resume
    keep_checkpoints: int
    logger: Any
    project: str
    show_samples: int | None
    metrics_port: int | None
    progress: StepsShown
    recorder: RunRecorder | bool = True

    def __post_init__(self) -> None:
        check_logger(self.logger)
        if self.metrics_port is not None:
            if self.metrics_port != 0 or isinstance(self.metrics_port, bool):
                check_port("metrics_port", self.metrics_port)
            check_installed()

    def serve_metrics(self, **parts: Any) -> MetricsEndpoint | None:
        """Serves the metrics of a run's parts, if they are asked for."""
        if self.metrics_port is None:
            return None
        return serve_metrics(port=self.metrics_port, **parts)

    def make_checkpoints(self, ranks: TrainerRanks) -> Checkpoints:
        """Returns the checkpoints of the run's folder; all ranks call it."""
        return Checkpoints(
            self.folder,
            keep=self.keep_checkpoints,
            identity=self.identity,
            ranks=ranks,
        )

    def open_recorder(self) -> RunRecorder | None:
        """Returns what records the run, if it is recorded."""
        if isinstance(self.recorder, RunRecorder):
            return self.recorder
        return RunRecorder(self.folder / SUBFOLDER) if self.recorder else None

    def open_logger(self, saved: Mapping[str, Any] | None) -> Logger | None:
        """Returns the logger, which goes on where that of a checkpoint ended."""
        kind, state = (None, None) if saved is None else saved["logger"]
        goes_on = saved is not None and kind == self.logger and kind in RESUMED
        logger = make_logger(
            self.logger,
            self.folder,
            self.folder.name,
            self.project,
            state if goes_on else None,
        )
        if self.logger == "tensorboard":
            forget_later_points(logger, -1 if saved is None else saved["step"])
        if logger is not None and not goes_on:
            name = {"model": self.identity["model"]}
            logger.log_hparams({**name, **self.hyperparameters})
        return logger

    def state_of(self, logger: Any) -> tuple[str | None, Any]:
        """Returns what :meth:`open_logger` reads of a checkpoint."""
        if self.logger not in RESUMED:
            return None, None
        return self.logger, logger.state_dict()
