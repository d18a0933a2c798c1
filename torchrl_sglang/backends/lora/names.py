"""Names of LoRA adapters: what requests select, and what servers call each load. Pure.

``policy@7#18a3f`` is load 0x18a3f of ``policy``, with weight version 7. Requests that
select no adapter use one with ``@``, and not one with ``~``.
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
    """Returns the adapter that a server calls so."""
    found = _SERVED.fullmatch(served_as)
    if found is None:
        return Adapter(name=served_as, served_as=served_as)
    version = found["version"] or None
    return Adapter(name=found["name"], served_as=served_as, version=version)


def is_published(served_as: str) -> bool:
    """Returns whether requests that select no adapter use this one."""
    found = _SERVED.fullmatch(served_as)
    return found is not None and found["mark"] == "@"


def load_number(served_as: str) -> int:
    """Returns the number of a load; 0 where another program chose the name."""
    found = _SERVED.fullmatch(served_as)
    return int(found["load"] or "0", 16) if found else 0
