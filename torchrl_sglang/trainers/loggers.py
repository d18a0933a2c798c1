"""TorchRL's loggers of a run: made by name, and ended with it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, get_logger

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger

RESUMED = ("csv", "tensorboard", "wandb")
"""Loggers that TorchRL opens where those of a checkpoint ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """A logger that was asked for by name."""

    kind: str
    folder: Path
    name: str
    project: str
    state: Any


def make_logger(
    given: Logger | str | None,
    folder: Path,
    name: str,
    project: str,
    state: Any = None,
) -> Logger | None:
    """Returns TorchRL's logger of a run.

    Args:
        given: a logger, the name of one, or None.
        folder: to write to.
        name: of the run.
        project: of W&B and Trackio, and MLflow's experiment.
        state: of the logger of a run that goes on, if it is one of ``RESUMED``.

    Raises:
        ConfigurationError: if there is none of this name, or its package is missing.
    """
    check_logger(given)
    if given is None or isinstance(given, Logger):
        return given
    wish = _Wish(kind=given, folder=folder, name=name, project=project, state=state)
    try:
        if given != "csv":
            # TorchRL asks for it with the first metric, or does not ask at all.
            importlib.import_module(given)
        return LOGGERS[given](wish)
    except ImportError as error:
        raise _missing(given, str(error)) from error


def check_logger(given: Any) -> None:
    """Checks a logger of a run, and opens none.

    Raises:
        ConfigurationError: if there is none of this name, or its package is missing.
    """
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


def _of_torchrl(wish: _Wish) -> Logger:
    folder, state = os.path.abspath(wish.folder / "logs"), wish.state
    if state is not None:
        # TorchRL would go on in the folder of the saved run, which may have moved.
        state = {**state, "log_dir": folder}
    return get_logger(
        wish.kind,
        logger_name=folder,
        experiment_name=wish.name,
        state_dict=state,
        wandb_kwargs={"project": wish.project},
    )


def _mlflow(wish: _Wish) -> Logger:
    """Returns MLflow's logger, which writes to a database in the run's folder.

    ``MLFLOW_TRACKING_URI`` is another place, as for MLflow itself. TorchRL would write
    files, which MLflow reads no more.
    """
    import mlflow
    from torchrl.record.loggers.mlflow import MLFlowLogger

    artifacts, uri = None, os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        logs = (wish.folder / "logs").absolute()
        logs.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"sqlite:///{logs / 'mlflow.db'}", (logs / "mlflow").as_uri()
    logger = MLFlowLogger(wish.project, uri, artifact_location=artifacts)
    mlflow.set_tag("mlflow.runName", wish.name)
    return logger


def _trackio(wish: _Wish) -> Logger:
    from torchrl.record.loggers.trackio import TrackioLogger

    return TrackioLogger(wish.name, wish.project)


LOGGERS: Mapping[str, Callable[[_Wish], Logger]] = {
    "csv": _of_torchrl,
    "tensorboard": _of_torchrl,
    "wandb": _of_torchrl,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""Name of a logger -> what makes it."""


class LoggerCalls:
    """Calls a logger; a failure loses the logged values, and the run continues.

    The first call of all raises: what is wrong then is how the logger was set up.
    """

    def __init__(self) -> None:
        self._has_logged = False
        self._told: set[str] = set()

    def __call__(self, log: Callable[..., Any], *arguments: Any, step: int) -> None:
        """Calls a function of a logger with arguments and a step.

        Raises:
            Exception: of the function, if none has succeeded before.
        """
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
