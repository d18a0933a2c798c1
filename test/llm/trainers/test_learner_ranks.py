"""A learner on several ranks goes on with the state of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.torchrun import run_ranks

PROGRAM = Path(__file__).with_name("learner_state_program.py")


@pytest.mark.slow
def test_every_rank_loads_its_share():
    """Each loads what ``state_dict()`` gave it."""
    run_ranks(PROGRAM)
