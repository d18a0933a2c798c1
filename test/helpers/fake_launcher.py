"""A launcher of fake servers on machines that can vanish, and a directory of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from helpers.fake_server import FakeServer
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.fleet.replica import Directory, Location
from torchrl_sglang.backends.launch.launcher import Launcher
from torchrl_sglang.errors import ServerUnavailableError

_PUBLISHED: dict[int, tuple[str, ...]] = {}


class FakeDirectory:
    """A directory that copies of an engine in this process share."""

    def __init__(self) -> None:
        self.key = id(self)
        _PUBLISHED[self.key] = ()

    def publish(self, urls: Sequence[str]) -> None:
        _PUBLISHED[self.key] = tuple(urls)

    async def urls(self) -> Sequence[str]:
        if self.key not in _PUBLISHED:
            raise ServerUnavailableError("The directory has ended.")
        return _PUBLISHED[self.key]

    def end(self) -> None:
        _PUBLISHED.pop(self.key, None)


class FakeHandle:
    """A fake server on a machine of its own, as a handle."""

    log_file = ""

    def __init__(self, server: FakeServer, host: str) -> None:
        self.server = server.__enter__()
        self.url, self.name, self.host = server.url, f"server on {host}", host
        self.state = "starting"
        self._begun = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self._begun

    def log_tail(self, lines: int = 30) -> str:
        return f"the last words on {self.host}"

    def check_ready(self) -> bool:
        self.state = "ready"
        return True

    def wait_ready(self) -> None:
        self.check_ready()

    def request_stop(self) -> None:
        self.state = "stopped"

    def stop(self) -> None:
        self.state = "stopped"

    def vanish(self) -> None:
        """Loses the machine: it answers nothing, and its connections stay open."""
        self.server.vanish()
        self.state = "dead"


class FakeLauncher(Launcher):
    """Starts fake servers on machines; a server starts again on another one.

    ``at_start`` is called with each server before it serves.
    """

    at_once = 8

    def __init__(
        self,
        model_path: str,
        num_servers: int = 2,
        *,
        directory: Directory | None = None,
        at_start: Callable[[FakeServer], object] = lambda server: None,
        **arguments: Any,
    ) -> None:
        self.model_path = model_path
        self.num_servers = num_servers
        self.directory = directory
        self.handles: list[FakeHandle] = []
        """Every handle so far, in the order of the starts."""
        self.removed: list[int] = []
        """The ranks of servers that were removed."""
        self.make = lambda: FakeServer(model_path, **arguments)
        self.at_start = at_start
        self._latest: dict[int, FakeHandle] = {}

    def start(self, rank: int) -> FakeHandle:
        server = self.make()
        self.at_start(server)
        handle = FakeHandle(server, f"node-{len(self.handles)}")
        self.handles.append(handle)
        self._latest[rank] = handle
        return handle

    def add(self, count: int, *, cuda_devices: Sequence[Any] | None = None) -> range:
        ranks = range(self.num_servers, self.num_servers + count)
        self.num_servers += count
        return ranks

    def remove(self, rank: int) -> None:
        self.removed.append(rank)

    def bind(self, num_replicas: int, spec: Any, **options: Any) -> Launcher:
        """As a placement, which is of one engine."""
        assert num_replicas == self.num_servers
        return self

    def where(self, rank: int) -> Location:
        handle = self._latest.get(rank)
        host = "" if handle is None else handle.host
        return Location(host=host, gpus=(), visible_gpus=())

    def close(self) -> None:
        """Ends the fake servers."""
        for handle in self.handles:
            handle.server.close()


def make_engine(
    launcher: FakeLauncher, *, router_policy: str | None = None, **settings: Any
) -> AsyncSGLang:
    """Starts a launcher's servers as an engine that owns them."""
    return AsyncSGLang.from_pretrained(
        launcher.model_path,
        num_replicas=launcher.num_servers,
        launcher=launcher,
        router_policy=router_policy,
        **settings,
    )
