"""What the Ray launcher decides and reserves, with a stand-in for Ray."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_sglang.backends.fleet.replica import NotStartedError
from torchrl_sglang.backends.launch import ray_launcher, ray_servers
from torchrl_sglang.backends.launch.ray_directory import is_connected
from torchrl_sglang.backends.launch.ray_host import HostInfo
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher, connect
from torchrl_sglang.backends.launch.ray_placement import Demand, Seat, own_seats
from torchrl_sglang.backends.launch.ray_servers import Place, RayServer
from torchrl_sglang.errors import ConfigurationError, ServerStartError

NODE = {
    "NodeManagerAddress": "10.0.0.1",
    "NodeID": "a",
    "Alive": True,
    "Resources": {"GPU": 8.0, "CPU": 8.0},
}


class FakeRay:
    """A cluster of one node; it remembers the placement groups."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.util = SimpleNamespace(
            placement_group=self.reserve,
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)),
        )

    def reserve(self, bundles: Any, strategy: str) -> str:
        self.groups.append(strategy)
        return f"group {len(self.groups)}"

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": 8.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE]

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_launcher, "connect", lambda: fake)
    return fake


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    specs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        ray_launcher, "RayServers", lambda each, *_, **__: specs.extend(each)
    )
    return specs


@pytest.mark.parametrize(
    ("spec", "start_timeout"), [({}, -1.0), ({"random_seed": "one"}, 9.0)]
)
def test_nothing_is_reserved_for_wrong_arguments(fake, spec, start_timeout):
    with pytest.raises(ValueError, match="start_timeout|'one'"):
        RayLauncher().bind(2, {"model": "m", **spec}, start_timeout=start_timeout)
    assert fake.groups == []


def test_paths_do_not_depend_on_the_folder(fake, bound, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    RayLauncher().bind(1, {"model": "model", "python": Path("venv/bin/python")})
    RayLauncher().bind(1, {"model": "owner/model", "python": "python3"})
    assert [(each["model"], each["python"]) for each in bound] == [
        (str(tmp_path / "model"), str(tmp_path / "venv/bin/python")),
        ("owner/model", "python3"),
    ]


@pytest.fixture
def handler() -> Iterator[Any]:

    def handle(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handle)
    yield handle
    signal.signal(signal.SIGTERM, before)


def test_the_caller_s_handler_of_sigterm_stays(monkeypatch, handler):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    connect()
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connect()
    assert callable(signal.getsignal(signal.SIGTERM))


def test_a_thread_sets_no_handler(monkeypatch, handler):
    monkeypatch.setitem(sys.modules, "ray", fake := FakeRay())
    monkeypatch.setattr(fake, "init", lambda address: None)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(connect()))
    thread.start()
    thread.join(10)
    assert found == [fake]


def test_memory_is_reserved_as_ray_reserves_it(monkeypatch):
    import ray
    from ray._common.utils import resources_from_ray_options
    from ray.util.placement_group import PlacementGroup

    asked: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        asked.append(options)
        return lambda actor: SimpleNamespace(remote=lambda: actor)

    monkeypatch.setattr(ray, "remote", remote)
    group = PlacementGroup.empty()
    place = Place(group=group, runtime_env=None, timeout=1.0, demand=Demand())
    for resources in ({"CPU": 2.0, "memory": 6e10, "special": 1.0}, {}):
        place.create(Seat(bundle=0, gpus=1.0, resources=resources))
    assert [resources_from_ray_options(options) for options in asked] == [
        {"CPU": 2.0, "GPU": 1.0, "memory": 6e10, "special": 1.0},
        {"CPU": 0, "GPU": 1.0},
    ]
    with pytest.raises(ConfigurationError, match="leave object_store_memory out"):
        RayLauncher(resources={"object_store_memory": 1e9})


def test_a_process_without_ray_is_not_connected(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert not is_connected()
    monkeypatch.delitem(sys.modules, "ray")
    assert not is_connected()
    assert "ray" not in sys.modules


class FakeActor:
    """An actor that Ray has placed on a node, or has not placed."""

    def __init__(self, node: str | None) -> None:
        self._node = node

    def __getattr__(self, method: str) -> Any:
        future: Future[HostInfo | None] = Future()
        if method == "describe" and self._node is not None:
            info = HostInfo(node_id=self._node, address="10.0.0.1", gpus=("0",))
            future.set_result(info)
        elif method == "stop":
            future.set_result(None)
        call = SimpleNamespace(future=lambda: future)
        return SimpleNamespace(remote=lambda *arguments: call)


def make_server(monkeypatch: pytest.MonkeyPatch, *nodes: str | None) -> RayServer:
    monkeypatch.setattr(ray_servers, "is_connected", lambda: True)
    monkeypatch.setattr(ray_servers, "_kill", lambda actors: None)
    demand = Demand(nodes=len(nodes), gpus=1)
    waiting = iter(nodes)
    place: Any = SimpleNamespace(
        create=lambda seat: FakeActor(next(waiting)), timeout=0.0, demand=demand
    )
    (seats,) = own_seats(demand, 1)
    return RayServer("server", {"model": "m"}, seats, place, start_timeout=9.0)


def test_a_server_that_finds_no_place_has_not_failed(monkeypatch):
    server = make_server(monkeypatch, None)
    with pytest.raises(NotStartedError, match="has not placed the server within 0 s"):
        server.wait_ready()


def test_a_start_that_is_stopped_has_not_failed(monkeypatch):
    """Its actor answers what has become of the process."""
    server = make_server(monkeypatch, "a")
    assert not server.check_ready()

    def end() -> Iterator[None]:
        raise ServerStartError("It ended.")
        yield

    server._steps = end()  # type: ignore[assignment]
    server.request_stop()
    with pytest.raises(NotStartedError, match="was stopped"):
        server.wait_ready()


def test_the_parts_of_a_server_are_on_different_nodes(monkeypatch):
    server = make_server(monkeypatch, "a", "a")
    with pytest.raises(ServerStartError, match="nnodes=2, on one node .*STRICT_SPREAD"):
        server.wait_ready()
