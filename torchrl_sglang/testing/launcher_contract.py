"""Contract tests for launchers."""

from __future__ import annotations

import abc
import time

from torchrl_sglang.backends.client.http import get
from torchrl_sglang.backends.fleet.replica import ServerHandle
from torchrl_sglang.backends.launch.launcher import Launcher, launch, start_servers
from torchrl_sglang.errors import SGLangError, UnsupportedByServerError

SECONDS = 600.0


class LauncherContract(abc.ABC):
    """Tests of a launcher, for a subclass whose name pytest takes for tests.

    Examples:
        >>> class TestMine(LauncherContract):
        ...     def make(self, num_servers):
        ...         return mine().bind(
        ...             num_servers,
        ...             {"model": "tiny", "device": "cpu"},
        ...             start_timeout=60.0,
        ...             parallel=None,
        ...             cuda_devices=None,
        ...         )
        ...
        ...     def end(self, server):
        ...         server.process.kill()
    """

    @abc.abstractmethod
    def make(self, num_servers: int) -> Launcher:
        """Returns a launcher before its first start."""

    @abc.abstractmethod
    def end(self, server: ServerHandle) -> None:
        """Ends a server as a crash does, without its handle's knowledge."""

    def test_a_start_does_not_wait(self) -> None:
        """A server is ready when it answers, and stopping it twice is once."""
        launcher = self.make(1)
        assert launcher.num_servers == 1
        server = launcher.start(0)
        try:
            assert server.state == "starting"
            server.wait_ready()
            assert server.state == "ready"
            assert server.check_ready()
            assert answers(server)
            assert server.age > 0
            assert server.host == launcher.where(0).host or not launcher.where(0).host
            assert server.log_tail()
        finally:
            for _ in range(2):
                launcher.stop([server])
        assert server.state == "stopped"
        assert not answers(server)

    def test_a_server_that_ended_starts_again(self) -> None:
        """At its address, unless a directory publishes the new address."""
        launcher = self.make(1)
        (server,) = servers = start_servers(launcher)
        try:
            self.end(server)
            wait_until_dead(server)
            server.stop()
            again = launcher.restart(0)
            servers.append(again)
            assert again is not server
            again.wait_ready()
            assert launcher.directory is not None or again.url == server.url
            assert answers(again)
        finally:
            launcher.stop(servers)

    def test_servers_have_addresses_of_their_own(self) -> None:
        """Each rank has a server, and all of them end together."""
        launcher = self.make(2)
        launched = launch(launcher, router=None)
        urls = [replica.url for replica in launched.replicas]
        try:
            assert len(set(urls)) == 2
            assert all(replica.handle is not None for replica in launched.replicas)
        finally:
            launched.stop()
        handles = [replica.handle for replica in launched.replicas]
        assert [handle.state for handle in handles if handle] == ["stopped", "stopped"]

    def test_a_server_is_added_and_removed(self) -> None:
        """Ranks are not used twice; a launcher may refuse."""
        launcher = self.make(1)
        servers = start_servers(launcher)
        try:
            try:
                (rank,) = launcher.add(1)
            except UnsupportedByServerError:
                return
            assert (rank, launcher.num_servers) == (1, 2)
            added = launcher.start(rank)
            servers.append(added)
            added.wait_ready()
            assert answers(added)
            added.stop()
            launcher.remove(rank)
            # A server never started, in place of the other.
            (again,) = launcher.add(1)
            assert again == 2
            launcher.remove(again)
            assert answers(servers[0])
        finally:
            launcher.stop(servers)

    def test_a_launcher_that_is_not_used(self) -> None:
        """The reserved resources of an unused launcher are released."""
        self.make(1).stop([])
        launcher = self.make(1)
        launcher.stop(start_servers(launcher))


def answers(server: ServerHandle) -> bool:
    """Returns whether a server answers requests."""
    try:
        return get(f"{server.url}/health", timeout=10.0).ok
    except SGLangError:
        return False


def wait_until_dead(server: ServerHandle) -> None:
    """Waits until a handle detects the end of its server."""
    deadline = time.monotonic() + SECONDS
    while server.state != "dead":
        assert time.monotonic() < deadline, server.state
        time.sleep(0.01)
