"""TorchRL's logger, without an import of TorchRL, which an engine does not need."""

from __future__ import annotations

import logging
import os
import sys

from torchrl_sglang.errors import ConfigurationError

torchrl_logger = logging.getLogger("torchrl")


def _configure() -> None:
    """Formats messages like TorchRL, whose import replaces this handler."""
    if torchrl_logger.handlers:
        return
    level = os.environ.get("RL_LOGGING_LEVEL", "INFO")
    if level not in logging.getLevelNamesMapping():
        raise ConfigurationError(
            f"The environment variable RL_LOGGING_LEVEL={level!r} is no level of "
            f"logging; set it to DEBUG, INFO, WARNING or ERROR, or unset it."
        )
    is_stderr = os.environ.get("TORCHRL_CONSOLE_STREAM") == "stderr"
    handler = logging.StreamHandler(sys.stderr if is_stderr else sys.stdout)
    form = "%(asctime)s [%(name)s][%(levelname)s] %(message)s"
    handler.setFormatter(logging.Formatter(form))
    torchrl_logger.addHandler(handler)
    torchrl_logger.setLevel(level)
    torchrl_logger.propagate = False


_configure()
