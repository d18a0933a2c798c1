"""Names of LoRA adapters in requests, and of each load on servers.

``policy@7#18a3f`` is load 0x18a3f of ``policy``, with weight version 7. Requests
without an adapter use an adapter with ``@``, not with ``~``.
"""

from __future__ import annotations

import re
import time

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import Adapter

_NAME = re.compile(r"[A-Za-z0-9._/-]+")

_SERVED = re.compile(
    r"(?P<name>[^@~#]+)((?P<mark>[@~])(?P<version>[^#]*))?(#(?P<load>[0-9a-f]+))?"
)


def check_name(name: str) -> None:
    """Checks the name of an adapter; model names in OpenAI's protocol contain it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is not a name of a LoRA adapter; give letters, digits, '.', "
            f"'_', '-' and '/'."
        )


def make_served_name(name: str, version: str | None, *, published: bool) -> str:
    """Returns a name for a new load; its number is the time, so the newest wins."""
    mark = "@" if published else "~"
    return f"{name}{mark}{version or ''}#{time.time_ns():x}"


def parse_served_name(served_as: str) -> Adapter:
    """Returns the adapter with a served name."""
    match = _SERVED.fullmatch(served_as)
    if match is None:
        return Adapter(name=served_as, served_as=served_as)
    version = match["version"] or None
    return Adapter(name=match["name"], served_as=served_as, version=version)


def is_published(served_as: str) -> bool:
    """Returns whether requests without an adapter use this adapter."""
    match = _SERVED.fullmatch(served_as)
    return match is not None and match["mark"] == "@"


def load_number(served_as: str) -> int:
    """Returns the number of a load; 0 if another program chose the name."""
    match = _SERVED.fullmatch(served_as)
    return int(match["load"] or "0", 16) if match else 0
