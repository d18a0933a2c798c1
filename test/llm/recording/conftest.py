"""What TorchRL's logger says."""

from __future__ import annotations

import logging

import pytest
from torchrl._utils import logger


@pytest.fixture
def torchrl_warnings():
    """Texts of the warnings that were logged."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
