"""Address and port of a trainer."""

from __future__ import annotations

import socket


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    with socket.create_server((get_ip(), 0)) as server:
        return int(server.getsockname()[1])
