"""Who can reach the sockets that a training step opens: this machine alone."""

from __future__ import annotations

import gc
import os

import psutil

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.backends.addresses import is_loopback
from torchrl_sglang.backends.router import make_sglang_router
from torchrl_sglang.testing.forked_starts import processes_below

Place = tuple[int, str, int]
"""A process, and the address and the port that it listens on."""


def tree(pid: int) -> set[int]:
    return {pid, *processes_below(pid)}


def listeners(pids: set[int]) -> set[Place]:
    """Every socket that these processes listen on."""
    return {
        (pid, connection.laddr.ip, connection.laddr.port)
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def open_to_others(places: set[Place]) -> set[Place]:
    return {place for place in places if not is_loopback(place[1])}


def test_a_training_step_listens_on_loopback_alone(restored_engine, hf_model):
    engine = restored_engine
    servers = {pid for server in engine.servers for pid in tree(server.pid)}
    before = listeners({os.getpid()})
    with make_sglang_router(list(engine.control.urls)) as router:
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
        sender = SGLangWeightSyncScheme(engine, transport="broadcast").create_sender()
        sender.update_weights(hf_model)
        # The trainer's group with the servers is kept for the next step.
        own = listeners({os.getpid()}) - before
        others = listeners(servers | tree(router.pid))
        sender.shutdown()
    assert len(own) >= 2, "The trainer's store and its end of the group."
    assert {pid for pid, _, _ in others} & servers
    assert {pid for pid, _, _ in others} - servers
    assert open_to_others(own | others) == set()
    del sender
    gc.collect()
    assert not listeners({os.getpid()}) & own
