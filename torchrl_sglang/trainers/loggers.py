"""TorchRL's loggers of a run: made by name, and ended with it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, get_logger

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger

RESUMED = ("csv", "tensorboard", "wandb")
"""Loggers that TorchRL reopens at the checkpoint's run."""


LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")
"""Names of TorchRL's loggers."""


def make_logger(
    given: Logger | str | None, folder: Path, name: str, project: str, state: Any = None
) -> Logger | None:
    """Returns TorchRL's logger of a run, by its name, or the given one.

    ``state`` is of the logger of a run that goes on, if it is one of ``RESUMED``.
    Raises :class:`.ConfigurationError` for an unknown name, or if its package is
    missing.
    """
    check_logger(given)
    if given is None or isinstance(given, Logger):
        return given
    logs = os.path.abspath(folder / "logs")
    if state is not None:
        # TorchRL would go on in the folder of the saved run, which may have moved.
        state = {**state, "log_dir": logs}
    try:
        if given != "csv":
            # TorchRL asks for it with the first metric, or does not ask at all.
            importlib.import_module(given)
        if given == "mlflow":
            return _mlflow(Path(logs), name, project)
        return get_logger(
            given,
            logger_name=logs,
            experiment_name=name,
            state_dict=state,
            wandb_kwargs={"project": project},
            trackio_kwargs={"project": project},
        )
    except ImportError as error:
        raise _missing(given, str(error)) from error


def check_logger(given: Any) -> None:
    """Checks a logger's name and package, and opens none."""
    if given is None or isinstance(given, Logger):
        return
    if not isinstance(given, str) or given not in LOGGERS:
        raise ConfigurationError(
            f"logger={given!r} is not one of {', '.join(LOGGERS)}, nor a Logger of "
            f"TorchRL."
        )
    # A module that is loaded may have no specification.
    is_there = sys.modules.get(given) or importlib.util.find_spec(given)
    if given != "csv" and not is_there:
        raise _missing(given, f"there is no module {given!r}")


def _missing(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"logger={name!r} needs a package: {why}. Install it, or give logger='csv'."
    )


def forget_later_points(logger: Any, step: int) -> None:
    """Has TensorBoard hide the points that a killed run logged after a step."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    begun = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
    logger.experiment.file_writer.add_event(begun)


def _mlflow(logs: Path, name: str, project: str) -> Logger:
    """Returns MLflow's logger, of ``MLFLOW_TRACKING_URI`` or a database in the folder.

    TorchRL would write files, which MLflow reads no more.
    """
    import mlflow
    from torchrl.record.loggers.mlflow import MLFlowLogger

    artifacts, uri = None, os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        logs.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"sqlite:///{logs / 'mlflow.db'}", (logs / "mlflow").as_uri()
    logger = MLFlowLogger(project, uri, artifact_location=artifacts)
    mlflow.set_tag("mlflow.runName", name)
    return logger


class LoggerCalls:
    """Calls a logger; a failure loses the logged values, and the run continues.

    The first call of all raises: what is wrong then is how the logger was set up.
    """

    def __init__(self) -> None:
        self._has_logged = False
        self._told: set[str] = set()

    def __call__(self, log: Callable[..., Any], *arguments: Any, step: int) -> None:
        """Calls a function of a logger with arguments and a step."""
        try:
            log(*arguments, step=step)
        except Exception as error:
            if not self._has_logged:
                raise
            kind = type(error).__name__
            if kind not in self._told:
                self._told.add(kind)
                torchrl_logger.warning(
                    f"The logger failed at step {step}: {kind}: {error}. The run goes "
                    f"on, and calls it again at the next step; this is said once."
                )
        else:
            self._has_logged = True


def end_logger(logger: Any) -> None:
    """Ends the run of a logger that :func:`make_logger` made, with its program.

    Otherwise another run in the same process would log to it.
    """
    if type(logger).__name__ == "MLFlowLogger":
        import mlflow

        # TorchRL leaves it open.
        mlflow.end_run()
    else:
        logger.shutdown()
