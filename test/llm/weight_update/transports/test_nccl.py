"""Which setting of NCCL a trainer gets, and when it is too late for one."""

from __future__ import annotations

import pytest

from torchrl_sglang.types import ServerArgs
from torchrl_sglang.weight_update.transports import process_group as pg


@pytest.mark.parametrize(
    ("environment", "servers", "begun", "decision"),
    [
        ({}, "0", False, "set"),
        ({}, "0", True, "late"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "0", True, "agree"),
        ({"NCCL_CUMEM_ENABLE": "1"}, "1", False, "agree"),
        ({"NCCL_CUMEM_ENABLE": "1"}, "0", False, "differ"),
    ],
)
def test_decisions(environment, servers, begun, decision):
    assert pg.decide(environment, servers, begun) == decision


def test_the_servers_value_is_set_and_nothing_is_disabled(monkeypatch):
    for name in (pg.NCCL_CUMEM, *pg.NCCL_SLOW):
        monkeypatch.delenv(name, raising=False)
    pg.share_nccl_settings(ServerArgs(enable_symm_mem=True), refuse=True)
    assert pg.os.environ[pg.NCCL_CUMEM] == "1"
    monkeypatch.setenv(pg.NCCL_CUMEM, "0")
    pg.share_nccl_settings(ServerArgs(), refuse=True)
    assert pg.os.environ[pg.NCCL_CUMEM] == "0"
    assert not any(name in pg.os.environ for name in pg.NCCL_SLOW)
