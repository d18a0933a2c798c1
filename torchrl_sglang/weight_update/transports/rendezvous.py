"""Where the ranks of a process group meet: it listens on one address, never on all.

A store of PyTorch takes values from whoever connects and asks nobody for a key, and by
itself it listens on every address of the machine. gloo listens on the address that the
machine's name stands for.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.support.urls import is_loopback

__all__ = ["GLOO_INTERFACE", "gloo_listens_on", "listen_at", "open_store"]

LISTEN_BACKLOG = 512
"""Ranks that can connect at the same moment."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network interface that gloo listens on."""


def open_store(
    address: str, port: int, world_size: int, timeout: datetime.timedelta
) -> dist.TCPStore:
    """Returns a store that ranks reach at an address.

    Args:
        address: where they meet.
        port: at which port; 0 for one that is free.
        world_size: how many ranks there are.
        timeout: for what is awaited in it.

    Raises:
        OSError: if it cannot listen there.
        RuntimeError: if PyTorch cannot reach it.
    """
    listener = listen_at(address, port)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # The store closes it at its end.
        master_listen_fd=listener.detach(),
    )


def listen_at(address: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address alone.

    An address that is none of this machine's can lead here, where a network translates
    addresses, and a name that is loopback's here can be another address's elsewhere.
    Then the socket listens on all of this machine's, with a warning.

    Raises:
        OSError: if the port is taken, or the address is unknown.
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
        f"one, so servers are awaited on all of its addresses, where others can "
        f"connect, too."
    )
    return socket.create_server(("", port), family=family, backlog=LISTEN_BACKLOG)


@contextmanager
def gloo_listens_on(address: str) -> Iterator[None]:
    """Has gloo groups that are made inside listen on loopback, if ranks meet there.

    What the user has chosen stays.
    """
    if not is_loopback(address) or GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]
