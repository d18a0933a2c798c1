"""Names of LoRA adapters: what requests select, and what servers call each load. Pure.

``policy@7#18a3f`` is load 0x18a3f of ``policy``, with weight version 7. Requests that
select no adapter use one with ``@``, and not one with ``~``. From the names that the
servers hold, :func:`find_wanted` computes the adapters that requests may select.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrl_sglang.backends.fleet.weights_state import version_order
from torchrl_sglang.backends.lora.payload import AdapterPayload
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredAdapter:
    """An adapter that requests may select."""

    adapter: Adapter
    content: AdapterPayload | None
    """``None`` where another engine object loaded it."""
    base: str = ""
    """Version of the whole weights when it was loaded."""

    @property
    def number(self) -> int:
        """Number of the load; a larger one is newer."""
        return load_number(self.adapter.served_as)

    def is_replaced(self, version: str) -> bool:
        """Returns whether whole weights of this version replaced it."""
        own = max(version_order(self.adapter.version or ""), version_order(self.base))
        return is_published(self.adapter.served_as) and version_order(version) > own


def served_names(wanted: Mapping[str, DesiredAdapter]) -> frozenset[str]:
    """Returns the servers' names of adapters."""
    return frozenset(each.adapter.served_as for each in wanted.values())


def newest_loads(served: Iterable[str], base: str) -> dict[str, DesiredAdapter]:
    """Returns name -> newest load, of loads over whole weights of version ``base``."""
    # The last one counts: the largest number, or else the first name.
    ordered = sorted(sorted(served, reverse=True), key=load_number)
    adapters = map(parse_served_name, ordered)
    return {
        each.name: DesiredAdapter(adapter=each, content=None, base=base)
        for each in adapters
    }


def find_wanted(
    before: Mapping[str, DesiredAdapter],
    held: Sequence[Collection[str]],
    *,
    ignored: Collection[str],
    latest: Mapping[str, int],
    default: str | None,
    base: str,
) -> dict[str, DesiredAdapter]:
    """Returns the adapters that requests may select, from what each server holds.

    ``ignored`` are being loaded or dropped; ``latest`` is the newest load of each name.
    """
    # An adapter that some servers lack is being loaded or dropped.
    everywhere = set(held[0]).intersection(*held[1:]).difference(ignored)
    found = {
        name: each
        for name, each in newest_loads(everywhere, base).items()
        # A replaced load may outlive its replacement.
        if not 0 < each.number < latest.get(name, 0)
    }
    for name, own in before.items():
        other = found.get(name)
        if other is None:
            # Without the default, requests would silently use the base model.
            if name == default and any(own.adapter.served_as in each for each in held):
                found[name] = own
        elif other.adapter == own.adapter or (
            own.content is not None and other.number <= own.number
        ):
            found[name] = own
    return found


def catch_up(
    before: Mapping[str, DesiredAdapter], held: Iterable[str], version: str
) -> dict[str, DesiredAdapter]:
    """Returns the adapters for the first server that runs again; newer loads win."""
    newest = newest_loads(held, version)
    found = {}
    for name, own in before.items():
        newer = newest.get(name, own)
        if newer.number > own.number:
            found[name] = newer
        elif not own.is_replaced(version):
            found[name] = own
    return found
