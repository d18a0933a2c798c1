"""Which setting of NCCL a trainer gets, and when it is too late for one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchrl_sglang import SGLangWeightSyncScheme
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


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (ServerArgs(device="cpu", enable_symm_mem=True), None),
        (ServerArgs(device="cuda"), "0"),
        (ServerArgs(device="cuda", enable_symm_mem=True), "1"),
        # A rank without an engine.
        (None, "0"),
    ],
)
def test_a_trainer_with_a_gpu_is_prepared(args, expected, monkeypatch):
    monkeypatch.delenv(pg.NCCL_CUMEM, raising=False)
    pg.prepare_nccl(args)
    assert pg.NCCL_CUMEM not in pg.os.environ or torch.cuda.is_available()
    monkeypatch.delenv(pg.NCCL_CUMEM, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pg.prepare_nccl(args)
    assert pg.os.environ.get(pg.NCCL_CUMEM) == expected
    monkeypatch.delenv(pg.NCCL_CUMEM, raising=False)


@pytest.mark.parametrize(("rank", "expected"), [(0, None), (1, "0")])
def test_a_scheme_prepares_ranks_without_an_engine(rank, expected, monkeypatch):
    """Their communicator with the first rank needs its value."""
    monkeypatch.delenv(pg.NCCL_CUMEM, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    SGLangWeightSyncScheme(None)
    assert pg.os.environ.get(pg.NCCL_CUMEM) == expected
    monkeypatch.delenv(pg.NCCL_CUMEM, raising=False)
