"""TorchRL's logger, without an import of TorchRL: an engine alone does not need it."""

from __future__ import annotations

import logging
import os
import sys

torchrl_logger = logging.getLogger("torchrl")


def _configure() -> None:
    """Prints messages as TorchRL does, whose import replaces this handler."""
    if torchrl_logger.handlers:
        return
    is_stderr = os.environ.get("TORCHRL_CONSOLE_STREAM") == "stderr"
    handler = logging.StreamHandler(sys.stderr if is_stderr else sys.stdout)
    form = "%(asctime)s [%(name)s][%(levelname)s] %(message)s"
    handler.setFormatter(logging.Formatter(form))
    torchrl_logger.addHandler(handler)
    torchrl_logger.setLevel(os.environ.get("RL_LOGGING_LEVEL", "INFO"))
    torchrl_logger.propagate = False


_configure()
