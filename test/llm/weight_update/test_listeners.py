"""Who can reach the sockets that a training step opens: this machine alone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest
from helpers.forked_starts import processes_below
from torchrl._utils import logger as torchrl_logger

import torchrl_sglang
from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.backends.launch.router import make_sglang_router
from torchrl_sglang.support.urls import is_loopback
from torchrl_sglang.weight_update.transports.process_group import listen_at

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


def test_a_store_listens_where_servers_meet_it_and_nowhere_else():
    # Loopback is a whole network on Linux.
    for address in ("127.0.0.1", "127.0.0.2", "localhost"):
        with listen_at(address, 0) as listener:
            assert is_loopback(listener.getsockname()[0])
            assert address in ("localhost", listener.getsockname()[0])


# The first is kept for documentation: no machine has it. The second one is loopback's,
# and does not say so, like the name of a machine that its own /etc/hosts has there.
@pytest.mark.parametrize("address", ["198.51.100.7", "127.1"])
def test_an_address_that_leads_here_from_elsewhere(address, caplog):
    torchrl_logger.addHandler(caplog.handler)
    try:
        with listen_at(address, 0) as listener:
            assert listener.getsockname()[0] == "0.0.0.0"
    finally:
        torchrl_logger.removeHandler(caplog.handler)
    assert f"may not reach this one at master_address='{address}'" in caplog.text


def test_a_port_that_is_taken_is_not_looked_for_elsewhere():
    with listen_at("127.0.0.1", 0) as listener:
        with pytest.raises(OSError, match="in use"):
            listen_at("127.0.0.1", listener.getsockname()[1])


def test_stores_are_opened_in_one_place():
    package = Path(torchrl_sglang.__file__).parent
    opening = [
        file.name
        for file in package.rglob("*.py")
        if "TCPStore(" in (text := file.read_text()) and "is_master=True" in text
    ]
    assert opening == ["process_group.py"]
