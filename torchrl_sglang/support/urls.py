"""Addresses of servers: parsed, checked, shown without passwords, and located."""

from __future__ import annotations

import base64
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

from yarl import URL

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.passwords import hide_passwords

LOOPBACK = "127.0.0.1"

KEY_VARIABLE = "TORCHRL_SGLANG_API_KEY"
"""Environment variable with the servers' key."""

ADMIN_KEY_VARIABLE = "TORCHRL_SGLANG_ADMIN_API_KEY"
"""Environment variable with the servers' key for control calls, if it differs."""


_SIOCGIFADDR = 0x8915


def normalize_url(url: str) -> str:
    """Returns ``scheme://host:port`` without a trailing slash."""
    if not isinstance(url, str):
        raise ConfigurationError(
            f"A server address is a string like 'http://127.0.0.1:30000', got "
            f"{type(url).__name__}."
        )
    full = url if "://" in url else f"http://{url}"
    try:
        parsed = URL(full)
    except ValueError:
        parsed = URL()
    is_http = parsed.scheme in ("http", "https") and parsed.host
    if not is_http or full.split() != [full]:
        raise ConfigurationError(
            f"{hide_passwords(url)!r} is not the address of a server; write it like "
            f"'http://127.0.0.1:30000'."
        )
    return full.rstrip("/")


def check_public_url(given: str) -> str:
    """Returns a gateway's public address without a trailing slash."""
    full = normalize_url(given)
    parsed = URL(full)
    extra = parsed.user or parsed.password or parsed.query_string or parsed.fragment
    if "://" not in given or extra or parsed.host in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"public_url={hide_passwords(given)!r} must be the address by which agents "
            f"reach the gateway, such as 'https://gateway.example.org', with its "
            f"scheme, and without a user or a query."
        )
    return full


def split_credentials(url: str) -> tuple[str, str | None]:
    """Returns an address without its user, and the ``Authorization`` header for it.

    Addresses are shown, logged and raised, so they hold no password from the beginning.
    """
    full = normalize_url(url)
    parsed = URL(full)
    if parsed.user is None and parsed.password is None:
        return full, None
    login = base64.b64encode(f"{parsed.user or ''}:{parsed.password or ''}".encode())
    port = "" if parsed.explicit_port is None else f":{parsed.explicit_port}"
    shown = f"{parsed.scheme}://{parsed.host_subcomponent}{port}{parsed.raw_path}"
    return shown.rstrip("/"), f"Basic {login.decode()}"


def address_hint(url: str) -> str:
    """Returns the end of a message about an address without a server."""
    if not url.endswith("/v1"):
        return ""
    return f" Leave the /v1 out, which clients of OpenAI's protocol want: {url[:-3]}"


def url_of(host: str, port: object) -> str:
    """Returns the address of this machine's own listener."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_of(host: str) -> str | None:
    """Returns the network interface with an IPv4 address of this machine, if any.

    Gloo takes the address of the machine's name otherwise: on Debian, 127.0.1.1.
    """
    if is_loopback(host):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # The interface has no address.
                continue
            if socket.inet_ntoa(reply[20:24]) == host:
                return name
    return None


def is_this_machine(url: str) -> bool:
    """Returns whether an address belongs to this machine."""
    host = URL(url).host or ""
    if is_loopback(host):
        return True
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in addresses)


def _can_bind(family: int, place: tuple[object, ...]) -> bool:
    # A socket binds to its own machine's addresses alone.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
            return True
    except OSError:
        return False


def address_facing(urls: Sequence[str]) -> str:
    """Returns this machine's address from the servers' point of view.

    It is loopback if all servers are on loopback, and otherwise the source address for
    the first other server; local servers reach this address, too.
    """
    for url in urls:
        parsed = URL(url)
        if is_loopback(parsed.host or LOOPBACK):
            continue
        try:
            ((family, _, _, _, place), *_) = socket.getaddrinfo(
                parsed.host, parsed.port or 80, type=socket.SOCK_DGRAM
            )
            # Connecting a datagram socket chooses a route and sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"This machine has no route to {url} ({error}), so servers have no "
                f"address to meet it at; give master_address=..."
            ) from error
    return LOOPBACK
