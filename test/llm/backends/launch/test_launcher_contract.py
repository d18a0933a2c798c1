"""What every launcher does: the contract of ``Launcher``, on a stand-in for SGLang."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_engine import make_interpreter
from helpers.ray_cluster import ray_cluster

from torchrl_sglang.backends.fleet.replica import NotStartedError, ServerHandle
from torchrl_sglang.backends.launch import launcher as launcher_module
from torchrl_sglang.backends.launch.launcher import Launcher, launch, start_servers
from torchrl_sglang.backends.launch.local import LocalLauncher
from torchrl_sglang.backends.launch.ports import find_free_port
from torchrl_sglang.backends.launch.ray_placement import Demand, own_seats
from torchrl_sglang.backends.launch.ray_servers import Place, RayServers, Reserved
from torchrl_sglang.backends.launch.start_log import find_phase, find_remedy
from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.testing.launcher_contract import LauncherContract


def on_ray(specs: Sequence[dict[str, Any]], *, start_timeout: float) -> RayServers:
    """Starts servers with different arguments on Ray, which users cannot ask for."""
    import ray

    demand = Demand(resources={"CPU": 0.1})

    def reserve(count: int) -> Reserved:
        group = ray.util.placement_group([demand.as_bundle()] * count)
        release = partial(ray.util.remove_placement_group, group)
        seats = own_seats(demand, count)
        return Reserved(group=group, seats=seats, release=release)

    reserved = reserve(len(specs))
    return RayServers(
        specs,
        reserved.seats,
        Place(group=reserved.group, runtime_env=None, timeout=60, demand=demand),
        start_timeout=start_timeout,
        at_once=len(specs),
        api_key=None,
        release=reserved.release,
        make_spec=lambda rank: specs[-1],
        reserve=partial(reserve, 1),
    )


LAUNCHERS: dict[str, Callable[..., Launcher]] = {"local": LocalLauncher, "ray": on_ray}
"""Every launcher, called with the arguments of each server and ``start_timeout``."""

MakeLauncher = Callable[..., Launcher]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster({"num_cpus": 2}, {"num_cpus": 2}):
        yield


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def make_launcher(
    request: pytest.FixtureRequest, tiny_model_path: str, tmp_path: Path
) -> Iterator[MakeLauncher]:
    """Makes launchers; each argument is what one server has beside the usual."""
    usual = {
        "model": tiny_model_path,
        "device": "cpu",
        "python": make_interpreter(tmp_path),
    }
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("cluster")
    with ExitStack() as stack:

        def make(*servers: dict[str, object], start_timeout: float = 60) -> Launcher:
            specs = [{**usual, **server} for server in servers or [{}]]
            launcher = LAUNCHERS[request.param](specs, start_timeout=start_timeout)
            stack.callback(launcher.stop, [])
            return launcher

        yield make


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe; a server with it serves when it has been opened for writing."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def behind(gate: Path) -> dict[str, object]:
    return {"environment": {"ECHO_GATE": str(gate)}}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def end(server: ServerHandle) -> None:
    """Makes the server's process exit by itself, and waits until that is known."""
    with pytest.raises(ConnectionError):
        urllib.request.urlopen(f"{server.url}/end", data=b"null", timeout=10)
    known = threading.Event()
    while server.state == "ready":
        known.wait(0.01)


class TestContract(LauncherContract):
    """The suite that others use, over every launcher of this package."""

    @pytest.fixture(autouse=True)
    def launchers(self, make_launcher):
        self.make_launcher = make_launcher

    def make(self, num_servers):
        return self.make_launcher(*[{} for _ in range(num_servers)])

    def end(self, server):
        end(server)


def test_a_server_is_not_ready_before_it_answers(make_launcher, gate):
    launcher = make_launcher(behind(gate))
    server = launcher.start(0)
    assert not server.check_ready()
    with open(gate, "wb"):
        server.wait_ready()
    launcher.stop([server])


def test_servers_start_in_the_order_of_their_ranks(make_launcher):
    launcher = make_launcher({"random_seed": 1}, {"random_seed": 2})
    told: list[str] = []
    servers = start_servers(launcher, progress=told.append)
    assert [server.state for server in servers] == ["ready", "ready"]
    assert len({server.url for server in servers}) == 2
    starts = [line for line in told if "is starting at" in line]
    assert [line.partition(" at ")[2].split()[0] for line in starts] == [
        f"{server.url}." for server in servers
    ]
    if isinstance(launcher, LocalLauncher):
        for line, server in zip(starts, servers, strict=True):
            assert line.endswith(f" Its log: {server.log_path}")
    assert sum("is ready after" in line for line in told) == 2
    launcher.stop(servers)
    assert [server.state for server in servers] == ["stopped", "stopped"]


class Starting:
    """A server that starts until it has been asked twice, with a log."""

    age = 42.0

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log, self.asked = name, log, 0

    def check_ready(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def log_tail(self, lines: int) -> str:
        return self.log


def test_a_start_says_what_it_waits_for():
    log = "[07:52:37] Load weight begin. avail mem=21.48 GB\nLoading shards: 0%\n"
    servers = [Starting(f"SGLang server {n} of 6", log if n else "") for n in range(6)]
    told: list[str] = []
    launcher_module._wait_for_fewer(servers, 1, told.append, 0.0)
    assert told[:5] == [
        "SGLang server 0 of 6 is importing SGLang; it started 42 s ago.",
        *(
            f"SGLang server {n} of 6 is loading the weights; it started 42 s ago."
            for n in (1, 2, 3)
        ),
        "2 more servers are starting.",
    ]
    assert told[-1] == "SGLang server 5 of 6 is ready after 42 s."


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("Load weight begin.\nLoad weight end.", "allocating the KV cache"),
        ("Load weight end.\nCapture cuda graph begin.", "capturing CUDA graphs"),
        (
            "Memory pool end.\nCapture draft extend CUDA graph begin.",
            "capturing CUDA graphs",
        ),
        ("The server is fired up and ready to roll!", "ready"),
    ],
)
def test_phases_of_a_start(log, phase):
    assert find_phase(log) == phase


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        ("Raise --mem-fraction-static above 0.121 (m", "mem_fraction_static more than"),
        ("Please try to increase --mem-fraction-static.", "a greater mem_fraction"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "a smaller mem_fraction_"),
    ],
)
def test_a_start_without_memory_says_what_to_give(log, remedy):
    assert remedy in find_remedy(f"ValueError: {log}")
    assert find_remedy("ValueError: other") == ""


@pytest.mark.parametrize(
    "log",
    [
        "OSError: We couldn't connect to 'https://hub' to load the files",
        "OSError: a is not a local folder and is not a valid model identifier listed",
        "OSError: You are trying to access a gated repo.",
        "OSError: /a does not appear to have a file named config.json.",
        "ValueError: Unrecognized model in /a. Should have a `model_type` key",
    ],
)
def test_a_start_without_a_model_names_it(log):
    remedy = find_remedy(log, ["python", "--model-path", "tiny-mdel", "--port", "1"])
    assert "'tiny-mdel' cannot be read: give a folder" in remedy


def test_all_start_or_none(make_launcher, tmp_path):
    (tmp_path / "empty").mkdir()
    launcher = make_launcher({}, {"model": str(tmp_path / "empty")})
    told: list[str] = []
    with pytest.raises(ServerStartError, match="server 2 of 2.* ended") as caught:
        start_servers(launcher, progress=told.append)
    assert "There is no config.json" in str(caught.value)
    url = told[0].partition(" at ")[2].split()[0].removesuffix(".")
    assert not answers(url)


def test_a_wrong_argument_is_found_before_anything_starts(make_launcher):
    with pytest.raises(ConfigurationError, match="device='tpu'") as caught:
        make_launcher({}, {"device": "tpu"})
    assert "It is server 2 of 2." in caught.value.__notes__


def test_a_flag_that_the_server_refuses(make_launcher):
    server = make_launcher({"no_such_flag": 3}).start(0)
    with pytest.raises(ServerStartError, match="(?s)status 2 .*: --no-such-flag"):
        server.wait_ready()


def test_a_start_that_takes_too_long(make_launcher, gate):
    server = make_launcher(behind(gate), start_timeout=0.2).start(0)
    with pytest.raises(ServerStartError, match="after 0.2 s.*start_timeout="):
        server.wait_ready()
    assert server.state == "stopped"


def test_a_start_that_is_cancelled(make_launcher, gate):
    server = make_launcher(behind(gate)).start(0)
    with ThreadPoolExecutor() as pool:
        start = pool.submit(server.wait_ready)
        server.request_stop()
        server.stop()
        assert isinstance(start.exception(60), NotStartedError)
    assert server.state == "stopped"


def test_an_address_is_reserved_until_it_is_released(make_launcher):
    port = find_free_port()
    launcher = make_launcher({"port": port})
    with pytest.raises(ConfigurationError, match=f"port={port}"):
        make_launcher({"port": port})
    launcher.stop([])
    (server,) = start_servers(make_launcher({"port": port}))
    assert server.url.endswith(f":{port}")
    server.stop()


def test_replicas_have_handles_and_restarts(make_launcher):
    launched = launch(make_launcher({}, {}), router=None)
    assert launched.router is None
    for replica in launched.replicas:
        assert replica.handle.state == "ready"
        assert replica.location.gpus == replica.location.visible_gpus == ()
    first = launched.replicas[0]
    first.handle.stop()
    again = first.restart()
    again.wait_ready()
    assert answers(again.url)
    again.stop()
    launched.stop()
    assert {replica.handle.state for replica in launched.replicas} == {"stopped"}
