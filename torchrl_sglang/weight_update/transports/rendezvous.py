"""Opens the store of a process group on one address, never on all of them.

PyTorch's store takes values from anybody who connects, and listens on every address of
the machine by default. gloo listens on the address of the machine's host name.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.support.urls import is_loopback

__all__ = ["gloo_listens_on", "listen_at", "open_store", "variable"]

LISTEN_BACKLOG = 512

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_store(
    address: str, port: int, world_size: int, timeout: datetime.timedelta
) -> dist.TCPStore:
    """Opens a store that ranks reach at an address; port 0 is any free one."""
    listener = listen_at(address, port)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # The store closes it.
        master_listen_fd=listener.detach(),
    )


def listen_at(address: str, port: int) -> socket.socket:
    """Listens on an address alone, or on all with a warning where it is not local.

    A network can translate an address, and a name can be loopback's here only.
    """
    ((family, _, _, _, place), *_) = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM
    )
    if is_loopback(address) or not is_loopback(str(place[0])):
        try:
            return socket.create_server(
                place[:2], family=family, backlog=LISTEN_BACKLOG
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    torchrl_logger.warning(
        f"master_address={address!r} is no address at which other machines reach this "
        f"one, so the process group's store listens on all addresses of this machine, "
        f"where others can connect, too."
    )
    return socket.create_server(("", port), family=family, backlog=LISTEN_BACKLOG)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def gloo_listens_on(address: str) -> AbstractContextManager[None]:
    """Makes gloo listen on loopback if ranks meet there and the user chose nothing."""
    if not is_loopback(address) or GLOO_INTERFACE in os.environ:
        return nullcontext()
    return variable(GLOO_INTERFACE, "lo")
