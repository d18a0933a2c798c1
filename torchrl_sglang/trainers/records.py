"""Checkpoints, logger, recorder and metrics endpoint of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.recording.format import SUBFOLDER
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.support.checks import check_port
from torchrl_sglang.telemetry.prometheus import check_installed
from torchrl_sglang.telemetry.server import MetricsEndpoint, serve_metrics
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.checkpoints import Checkpoints
from torchrl_sglang.trainers.loggers import (
    RESUMED,
    check_logger,
    forget_later_points,
    make_logger,
)
from torchrl_sglang.trainers.models import identify
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.report import flatten

UNLOGGED = ("model", "prompts", "eval_prompts", "recorder")
"""Arguments that are no hyperparameters of a logger; some of them may be large."""


class Records:
    """Makes checkpoints, logger, recorder and metrics endpoint of a run."""

    def __init__(self, arguments: RunArguments) -> None:
        self.arguments = arguments
        self.folder = check_folder("output", arguments.output)
        check_logger(arguments.logger)
        port = arguments.metrics_port
        if port is not None:
            if port != 0 or isinstance(port, bool):
                check_port("metrics_port", port)
            check_installed()
        lora = arguments.lora
        self.identity: Mapping[str, Any] = {
            "model": identify(arguments.model),
            "group_size": arguments.group_size,
            "groups_per_batch": arguments.groups_per_batch,
            "method": arguments.method,
            "lora": None if lora is None else dict(lora),
            "seed": arguments.seed,
        }
        """Facts that a resumed run shares with its checkpoint."""
        names = (field.name for field in fields(arguments))
        self.hyperparameters = flatten(
            {name: getattr(arguments, name) for name in names if name not in UNLOGGED}
        )
        """Arguments in the logger, without keys."""

    def serve_metrics(self, **parts: Any) -> MetricsEndpoint | None:
        """Serves the metrics of a run's parts, if ``metrics_port`` is given."""
        if self.arguments.metrics_port is None:
            return None
        return serve_metrics(port=self.arguments.metrics_port, **parts)

    def make_checkpoints(self, ranks: TrainerRanks) -> Checkpoints:
        """Returns the checkpoints of the run's folder; all ranks call it."""
        return Checkpoints(
            self.folder,
            keep=self.arguments.keep_checkpoints,
            identity=self.identity,
            ranks=ranks,
        )

    def open_recorder(self) -> RunRecorder | None:
        """Returns the run's recorder, if there is one."""
        recorder = self.arguments.recorder
        if isinstance(recorder, RunRecorder):
            return recorder
        return RunRecorder(self.folder / SUBFOLDER) if recorder else None

    def open_logger(self, saved: Mapping[str, Any] | None) -> Logger | None:
        """Returns the logger, which continues where a checkpoint's logger ended."""
        name = self.arguments.logger
        kind, state = (None, None) if saved is None else saved["logger"]
        resumes = saved is not None and kind == name and kind in RESUMED
        logger = make_logger(
            name,
            self.folder,
            self.folder.name,
            self.arguments.project,
            state if resumes else None,
        )
        if name == "tensorboard":
            forget_later_points(logger, -1 if saved is None else saved["step"])
        if logger is not None and not resumes:
            model = {"model": self.identity["model"]}
            logger.log_hparams({**model, **self.hyperparameters})
        return logger

    def state_of(self, logger: Any) -> tuple[str | None, Any]:
        """Returns the logger's part of a checkpoint, for :meth:`open_logger`."""
        name = self.arguments.logger
        return (name, logger.state_dict()) if name in RESUMED else (None, None)


def check_folder(name: str, folder: Any) -> Path:
    """Returns the path of a folder."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ConfigurationError(f"{name} must be a folder's path, got {folder!r}.")
    return Path(folder).expanduser()
