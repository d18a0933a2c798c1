"""Unmodified clients, in their default configuration, against a gateway.

Whatever a client does, what is exported is what the model read and wrote, token by
token, and each response is trained once.
"""

from __future__ import annotations

import pytest
from helpers.agent_clients import SCENARIOS
from helpers.agent_matrix import check_cell
from helpers.agent_table import PROGRAMS

NAMES = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PROGRAMS]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("running", NAMES, indirect=True)
def test_a_client(running, scenario, cell, tmp_path):
    check_cell(running, scenario, home=tmp_path, **cell)
