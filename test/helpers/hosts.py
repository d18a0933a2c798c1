"""Several hosts on this machine: each has a network, a name and an address of its own.

A host is a network, a UTS and a mount namespace. Packets between hosts pass through a
thread of this process, which delays them, or drops those of a host whose link is down::

    with hosts("trainer", "server") as network:
        trainer, server = network.hosts
        server.start([sys.executable, "-m", "http.server", "8000"])
        network.delay_seconds = 0.05
        server.link_up = False

A host knows its own name as 127.0.1.1, as Debian has it, and those of others by their
addresses. Files, process ids and memory are this machine's, so a path is on a shared
file system.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from helpers.forked_starts.namespaces import NAMESPACES, namespace_of

SUBNET = "10.77.0."
MTU = 9000
TOOLS = ("ip", "mount", "nsenter", "unshare")

_PROGRAM = """
import fcntl, os, socket, struct, subprocess, sys
number, name, address, hosts, mtu = sys.argv[1:]
socket.sethostname(name)
# Questions to a name server that is out of reach would take ten seconds each.
for file, place in ((hosts, "/etc/hosts"), ("/dev/null", "/etc/resolv.conf")):
    subprocess.run(["mount", "--bind", file, place], check=True)
tun = os.open("/dev/net/tun", os.O_RDWR)
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
for words in (
    "link set lo up",
    f"addr add {address}/24 dev eth0",
    f"link set eth0 up mtu {mtu}",
    # Programs find their address by the route to a far one.
    "route add default dev eth0",
):
    subprocess.run(["ip", *words.split()], check=True)
line = socket.socket(fileno=int(number))
socket.send_fds(line, [b"+"], [tun])
os.close(tun)
line.recv(1)
"""
"""Keeps the namespaces of a host until the process that asked for it closes the line or
ends."""


class Host:
    """A host, whose ``link_up`` is settable."""

    def __init__(self, name: str, address: str, names: Path) -> None:
        self.name, self.address = name, address
        self.link_up = True
        self._line, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            words = [sys.executable, "-IS", "-c", _PROGRAM, str(number), name, address]
            self._keeper = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", *words, str(names), str(MTU)],
                pass_fds=[number],
                stderr=subprocess.PIPE,
                text=True,
            )
        _, descriptors, _, _ = socket.recv_fds(self._line, 1, 1)
        if not descriptors:
            _, problem = self._keeper.communicate()
            self._line.close()
            raise OSError(f"No host can be made here: {problem.strip()}")
        (self.tun,) = descriptors
        self._started: list[subprocess.Popen[str]] = []
        self._namespace = namespace_of(self._keeper.pid, "net")

    def command(self, words: Sequence[object], folder: Path | None = None) -> list[str]:
        """Returns the command that runs another one on this host, in a folder."""
        enter = [f"--{kind}" for kind in NAMESPACES]
        target = f"--target={self._keeper.pid}"
        # Entering a mount namespace changes the folder.
        there = ["env", f"--chdir={folder or os.getcwd()}"]
        return ["nsenter", target, *enter, *there, *map(str, words)]

    def start(self, words: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        """Starts a command, which ends with the host.

        ``environment`` is added to this process's.
        """
        environment = {**os.environ, **options.pop("environment", {})}
        command = self.command(words, options.pop("cwd", None))
        process = subprocess.Popen(command, env=environment, text=True, **options)
        self._started.append(process)
        return process

    def run(
        self, words: Sequence[object], timeout: float = 60.0, **options: Any
    ) -> str:
        """Runs a command, and returns its standard output."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(words, **pipes, **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            finally:
                process.kill()
        assert process.returncode == 0, (output + errors)[-6000:]
        return output

    def processes(self) -> list[int]:
        """Returns the processes on this host, its keeper excepted."""
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [
            pid
            for pid in pids
            if pid != self._keeper.pid and namespace_of(pid, "net") == self._namespace
        ]

    def lose_power(self) -> None:
        """Ends the link and all processes, which say good-bye to nobody."""
        self.link_up = False
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def listening(self) -> set[tuple[str, int]]:
        """Returns the addresses and ports on which processes of this host listen."""
        lines = self.run(["ss", "--tcp", "--listening", "--numeric", "--no-header"])
        places = (line.split()[3].rpartition(":") for line in lines.splitlines())
        return {(host.strip("[]"), int(port)) for host, _, port in places}

    def close(self) -> None:
        """Ends the host."""
        self.lose_power()
        for process in self._started:
            process.wait(60)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._line.close()
        self._keeper.wait(60)
        assert self._keeper.stderr is not None
        self._keeper.stderr.close()
        os.close(self.tun)


class Network(threading.Thread):
    """The switch between hosts. ``delay_seconds`` and ``loss`` are settable."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        super().__init__(name="switch", daemon=True)
        self.hosts = hosts
        self.delay_seconds = 0.0
        """How long a packet takes, one way."""
        self.loss = 0.0
        """Fraction of the packets that are lost."""
        self.transferred = 0
        """Bytes of all packets that hosts have sent."""
        self._random = random.Random(0)
        self._by_address = {socket.inet_aton(host.address): host for host in hosts}
        self._by_tun = {host.tun: host for host in hosts}
        self._ended, self._end = socket.socketpair()
        self._queue: list[tuple[float, int, Host, bytes]] = []
        self._count = itertools.count()

    def run(self) -> None:
        while True:
            due = self._queue[0][0] - time.monotonic() if self._queue else None
            wait = None if due is None else max(due, 0.0)
            readable, _, _ = select.select([self._ended, *self._by_tun], [], [], wait)
            if self._ended in readable:
                return
            for tun in readable:
                self._take(self._by_tun[tun], os.read(tun, MTU))
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, _, host, packet = heapq.heappop(self._queue)
                if host.link_up:
                    os.write(host.tun, packet)

    def close(self) -> None:
        """Ends the switch."""
        self._end.close()
        self.join()
        self._ended.close()

    def _take(self, source: Host, packet: bytes) -> None:
        self.transferred += len(packet)
        # Kernels look for neighbours by IPv6, which this switch does not speak.
        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        lost = self.loss > 0.0 and self._random.random() < self.loss
        if target is not None and source.link_up and not lost:
            arrival = time.monotonic() + self.delay_seconds
            item = (arrival, next(self._count), target, packet)
            heapq.heappush(self._queue, item)


@contextmanager
def hosts(*names: str) -> Iterator[Network]:
    """Makes hosts that reach each other, and ends them and all their processes."""
    addresses = {name: f"{SUBNET}{number}" for number, name in enumerate(names, 1)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts_")))
        made: list[Host] = []
        for name, address in addresses.items():
            known = {"localhost": "127.0.0.1", **addresses, name: "127.0.1.1"}
            lines = [f"{place} {other}\n" for other, place in known.items()]
            (folder / name).write_text("".join(lines))
            made.append(Host(name, address, folder / name))
            stack.callback(made[-1].close)
        network = Network(made)
        network.start()
        stack.callback(network.close)
        yield network


@functools.cache
def why_no_hosts() -> str:
    """Returns why this process cannot make hosts; empty if it can."""
    missing = [tool for tool in (*TOOLS, "ss") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (util-linux, iproute2)"
    if os.geteuid() != 0:
        return "hosts need root"
    try:
        with hosts("probe"):
            return ""
    except OSError as error:
        return str(error)
