"""One cell of the matrix of clients and scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.agent_clients import Relay, check, describe, hold, scenario_of
from helpers.agent_table import PROGRAMS


def check_cell(
    running: Any,
    scenario: str,
    *,
    relay: Relay,
    folder: Path,
    tokenizer: Any,
    home: Path,
) -> None:
    """Has a client hold a scenario's conversation, and checks what became of it."""
    name, process = running
    program = PROGRAMS[name]
    if scenario in program.without:
        pytest.skip(f"{name}: {program.without[scenario]}")
    client = process.client()
    outcome = hold(
        client,
        scenario_of(program, scenario),
        relay=relay,
        folder=folder,
        tokenizer=tokenizer,
        home=home,
        writer=program.writer,
    )
    try:
        check(outcome, program, scenario)
    except AssertionError as error:
        error.add_note(describe(outcome))
        error.add_note(client.log())
        raise
