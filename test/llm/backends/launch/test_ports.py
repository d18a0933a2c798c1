"""Ports that are held: between threads, processes, and from choice to end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest

from torchrl_sglang.backends.launch import ports as ports_module
from torchrl_sglang.backends.launch.ports import (
    PORTS,
    PortLease,
    find_free_port,
    is_free_port,
    lease_neighbours,
    lease_port,
    ports_to_hold,
    wait_for_port,
)
from torchrl_sglang.errors import ConfigurationError

TAKE_SOME = """
import json, sys
from torchrl_sglang.backends.launch import ports
window = range(*map(int, sys.argv[1:]))
leases = [ports.lease_port(among=window) for _ in range(20)]
print(json.dumps([lease.port for lease in leases]), flush=True)
input()
"""


def a_few_ports(count: int) -> range:
    """Neighbours that nothing listens on."""
    for start in range(PORTS.start, PORTS.stop, count):
        window = range(start, start + count)
        try:
            for lease in [lease_port(port=port) for port in window]:
                lease.release()
        except ConfigurationError:
            continue
        return window
    raise AssertionError("No window of free ports.")


def test_where_ports_are_looked_for():
    ports = {find_free_port() for _ in range(20)}
    assert len(ports) > 10
    assert all(port in PORTS for port in ports)
    # Where Linux begins to take ports for outgoing connections.
    assert max(PORTS) + max(ports_module.DP_PORT_OFFSETS) < 32_768


def test_a_lease():
    window = a_few_ports(2)
    first, second = lease_port(among=window), lease_port(among=window)
    assert {first.port, second.port} == set(window)
    for search in (lease_port, find_free_port):
        with pytest.raises(ConfigurationError, match="No port"):
            search(among=window)
    with pytest.raises(OSError, match="in use"):
        PortLease(first.port)
    with pytest.raises(ConfigurationError, match=f"nccl_port={first.port} is not"):
        lease_port(port=first.port, name="nccl_port")
    first.release()
    first.release()
    assert find_free_port(among=window) == first.port
    assert lease_port(port=str(first.port)).port == first.port
    second.release()


def test_processes_do_not_take_the_same_ports():
    """Two that choose 20 each out of 40, at the same time."""
    window = a_few_ports(40)
    command = [sys.executable, "-c", TAKE_SOME, str(window.start), str(window.stop)]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        taken = [json.loads(process.stdout.readline()) for process in processes]
        assert sorted(taken[0] + taken[1]) == list(window)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    # However they ended.
    for port in window:
        lease_port(port=port).release()


def test_a_port_with_a_listener_is_not_found():
    window = a_few_ports(2)
    with socket.create_server(("127.0.0.1", window[0])):
        assert {find_free_port(among=window) for _ in range(20)} == {window[1]}
        # A server's other sockets listen on every address.
        assert {find_free_port("127.0.0.2", among=window) for _ in range(20)} == {
            window[1]
        }


def test_waiting_for_a_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not wait_for_port("127.0.0.1", port, timeout=0.2)
        closing = threading.Timer(0.3, server.close)
        closing.start()
        assert wait_for_port("127.0.0.1", port, timeout=10)
        closing.join()


@pytest.mark.parametrize("port", [0, -1, 70000, "http", 3.5, True])
def test_invalid_ports_are_refused(port):
    with pytest.raises(ConfigurationError, match="must be a port, an integer from"):
        lease_port(port=port)


SEED = "remote_instance_weight_loader_start_seed_via_transfer_engine"


@pytest.mark.parametrize(
    ("arguments", "environment", "held"),
    [
        ({}, {}, {"nccl_port": None}),
        ({"nccl_port": 5}, {}, {"nccl_port": 5}),
        # There the node that comes first listens.
        ({"dist_init_addr": "10.0.0.1:5"}, {}, {}),
        ({"grpc_port": 6}, {}, {"nccl_port": None, "grpc_port": 6}),
        ({}, {"SGLANG_GRPC_PORT": "7"}, {"nccl_port": None, "SGLANG_GRPC_PORT": 7}),
        (
            {},
            {"SGLANG_ENABLE_GRPC": "1"},
            {"nccl_port": None, "SGLANG_ENABLE_GRPC": 34_000},
        ),
        ({SEED: True}, {}, {"nccl_port": None, "engine_info_bootstrap_port": None}),
    ],
)
def test_what_a_server_opens(arguments, environment, held):
    assert ports_to_hold({"port": 24_000, **arguments}, environment) == held


@pytest.mark.parametrize("arguments", [{"dp_size": 2}, {"enable_dp_attention": True}])
def test_what_data_parallel_attention_opens(arguments):
    held = ports_to_hold({"port": 24_000, "dist_init_addr": "h:5", **arguments}, {})
    assert {24_233, 24_240} <= set(held.values())


def test_ports_in_a_row():
    leases = lease_neighbours("127.0.0.1", 5)
    ports = [lease.port for lease in leases]
    assert ports == list(range(ports[0], ports[0] + 5))
    assert not any(is_free_port("127.0.0.1", port) for port in ports)
    for lease in leases:
        lease.release()
    assert is_free_port("127.0.0.1", ports[0])
