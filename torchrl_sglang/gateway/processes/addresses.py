"""The addresses of a gateway's processes."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count, check_port
from torchrl_sglang.support.urls import check_public_url, url_of

MOST_PROCESSES = 64
"""Most processes of one gateway."""

LAST_PORT = 65_535

PROCESS = "{process}"
"""Stands for the number of a process in ``public_url``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessAddresses:
    """Addresses of the owner, which is process 0, and of its workers from 1 on."""

    host: str
    """Address to listen on."""
    port: int
    """Port of the owner, and the first of as many as there are processes; 0 for free
    ones."""
    public_url: str | None
    """Address by which clients reach the gateway; :data:`PROCESS` in it stands for the
    number of the process."""
    num_workers: int
    """Number of workers; 0: the owner serves all."""

    def __post_init__(self) -> None:
        if self.port:
            check_port("port", self.port)
            if self.port + self.num_workers > LAST_PORT:
                raise ConfigurationError(
                    f"port={self.port!r}: {self.num_workers} processes listen on the "
                    f"ports behind it, and there are none behind {LAST_PORT}."
                )
        if self.public_url is None:
            return
        if self.num_workers and PROCESS not in str(self.public_url):
            raise ConfigurationError(
                f"public_url={self.public_url!r} does not say which of "
                f"num_processes={self.num_workers} processes is reached; put "
                f"{PROCESS} where its number from 1 on is to be, such as "
                f"'https://gateway.example.org/{PROCESS}'. The gateway itself is "
                f"process 0."
            )
        self.base(0, 0)

    def port_of(self, process: int) -> int:
        """Returns the port that a process is to listen on; 0 for a free one."""
        return self.port and self.port + process

    def listening(self, port: int) -> str:
        """Returns the address of a process of this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    def reachable(self, port: int) -> str:
        """Returns the address at which this machine reaches a process."""
        return url_of(self.host, port)

    def base(self, process: int, port: int) -> str:
        """Returns the address by which clients reach a process.

        Raises:
            ConfigurationError: if ``public_url`` is no address.
        """
        if self.public_url is None:
            return self.listening(port)
        named = self.public_url
        if isinstance(named, str):
            named = named.replace(PROCESS, str(process))
        return check_public_url(named)


def check_processes(given: object) -> int:
    """Returns the number of workers of a gateway with so many processes.

    Raises:
        ConfigurationError: if it is no number of processes.
    """
    number = check_count("num_processes", given)
    if number > MOST_PROCESSES:
        raise ConfigurationError(
            f"num_processes={number} must be at most {MOST_PROCESSES}."
        )
    return 0 if number == 1 else number
