"""Addresses of servers: written, checked, without passwords, and seen from here."""

from __future__ import annotations

import base64
import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "address_facing",
    "hide_passwords",
    "is_loopback",
    "is_this_machine",
    "normalize_url",
    "split_credentials",
    "url_of",
]

LOOPBACK = "127.0.0.1"
"""Where servers on this machine meet the trainer."""

_USER_INFO = re.compile(r"""(?:(?<=://)[^/\s'"]*|[^/\s'":@]+:[^/\s'"]*)@""")
"""User and password in an address, in any text; the scheme can be missing."""


def hide_passwords(text: object) -> str:
    """Returns a text without the users and passwords of the addresses in it. Pure.

    Examples:
        >>> hide_passwords("no answer from http://me:secret@host:80/health")
        'no answer from http://***@host:80/health'
    """
    return _USER_INFO.sub("***@", str(text))


def normalize_url(url: str) -> str:
    """Returns ``scheme://host:port`` without a trailing slash. Pure.

    Raises:
        ConfigurationError: if ``url`` is not an http or https address.
    """
    if not isinstance(url, str):
        raise ConfigurationError(
            f"A server address is a string like 'http://127.0.0.1:30000', got "
            f"{type(url).__name__}."
        )
    full = url if "://" in url else f"http://{url}"
    scheme, _, rest = full.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/") or rest.split() != [rest]:
        raise ConfigurationError(
            f"{hide_passwords(url)!r} is not the address of a server; write it like "
            f"'http://127.0.0.1:30000'."
        )
    return full.rstrip("/")


def split_credentials(url: str) -> tuple[str, str | None]:
    """Returns an address without user and password, and the header that sends them.

    What an engine shows, logs and raises holds its addresses, so these are without
    passwords from the beginning. Pure.

    Args:
        url: an address; see :func:`normalize_url`.

    Returns:
        The normalized address, and the value of the ``Authorization`` header, if it
        holds a user.

    Examples:
        >>> split_credentials("http://me:a%20b@host:80")
        ('http://host:80', 'Basic bWU6YSBi')
    """
    full = normalize_url(url)
    scheme, _, rest = full.partition("://")
    place, slash, path = rest.partition("/")
    user_info, at, place = place.rpartition("@")
    if not at:
        return full, None
    user, _, password = user_info.partition(":")
    text = f"{unquote(user)}:{unquote(password)}"
    header = "Basic " + base64.b64encode(text.encode()).decode()
    return normalize_url(f"{scheme}://{place}{slash}{path}"), header


def url_of(host: str, port: object) -> str:
    """Returns the address at which this machine reaches what listens there. Pure.

    Examples:
        >>> url_of("0.0.0.0", 30000), url_of("::1", 30000)
        ('http://127.0.0.1:30000', 'http://[::1]:30000')
    """
    # What listens on every address is reached from here by the loopback one.
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches what listens there. Pure.

    Examples:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("node-3")
        (True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(url: str) -> bool:
    """Returns whether an address is one of this machine's own.

    Examples:
        >>> is_this_machine("http://localhost:30000")
        True
    """
    host = urlsplit(url).hostname or ""
    if is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


def _can_bind(family: int, place: tuple[object, ...]) -> bool:
    # A socket binds to its own machine's addresses alone.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
            return True
    except OSError:
        return False


def address_facing(urls: Sequence[str]) -> str:
    """Returns this machine's address as servers see it.

    That is the loopback address if all of them are reached by one. Otherwise it is the
    address that this machine sends from to the first one elsewhere; servers on this
    machine reach it, too.

    Args:
        urls: addresses of the servers.

    Raises:
        ConfigurationError: if there is no way to that server.

    Examples:
        >>> address_facing(["http://127.0.0.1:30000", "http://localhost:30001"])
        '127.0.0.1'
    """
    for url in urls:
        parts = urlsplit(url)
        if is_loopback(parts.hostname or LOOPBACK):
            continue
        try:
            ((family, _, _, _, place), *_) = socket.getaddrinfo(
                parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
            )
            # Connecting a datagram socket chooses a route and sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(
                f"This machine knows no way to {url} ({error}), so servers have no "
                f"address to meet it at; give master_address=..."
            ) from error
    return LOOPBACK
