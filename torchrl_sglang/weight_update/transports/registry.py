"""THE table of transports: names, options, and which one ``"auto"`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torchrl_sglang.backends.support.checks import nearest
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.weight_update.transports.base import (
    SelectableTransport,
    TransportOptions,
)
from torchrl_sglang.weight_update.transports.broadcast import BroadcastTransport
from torchrl_sglang.weight_update.transports.cuda_ipc import CudaIpcTransport
from torchrl_sglang.weight_update.transports.disk import DiskTransport
from torchrl_sglang.weight_update.transports.lora import LoraTransport
from torchrl_sglang.weight_update.transports.placement import Facts

__all__ = [
    "AUTO",
    "TRANSPORTS",
    "Choice",
    "check_options",
    "check_used",
    "choose",
    "make_options",
]

AUTO = "auto"

_ROWS: tuple[type[SelectableTransport], ...] = (
    LoraTransport,
    DiskTransport,
    CudaIpcTransport,
    BroadcastTransport,
)
"""All transports, in the order in which ``"auto"`` asks them."""

TRANSPORTS: Mapping[str, type[SelectableTransport]] = {row.name: row for row in _ROWS}
"""Name -> transport."""

_SHARED = {field.name for field in fields(TransportOptions)}

_OPTIONS: Mapping[str, tuple[str, Any]] = {
    option.name: (name, option.default)
    for name, kind in TRANSPORTS.items()
    for option in fields(kind.options_type)
    if option.name not in _SHARED
}
"""Option -> the transport that has it, and its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A transport and the reason for it."""

    name: str
    """Name of the transport."""
    reason: str
    """A sentence."""


def check_options(
    transport: str, given: Mapping[str, Any], **shared: Any
) -> dict[str, Any]:
    """Validates a scheme's options, and returns ``given`` without default values.

    ``given`` has the options of single transports, ``shared`` those that all have.
    """
    known = [AUTO, *sorted(TRANSPORTS)]
    if transport not in known:
        raise ConfigurationError(
            f"transport={transport!r} is not one of {', '.join(map(repr, known))}."
        )
    given = _without_defaults(given)
    if transport != AUTO:
        check_used(transport, given)
    for name in {transport, *map(_owner, given)} - {AUTO}:
        make_options(name, given, **shared)
    TransportOptions(**shared)
    if "directory" in given and len(given) > 1:
        other = next(name for name in given if name != "directory")
        raise ConfigurationError(
            f"directory={given['directory']!r} is for transport='disk', which does not "
            f"use {other}={given[other]!r}; leave one of them out."
        )
    return given


def check_used(transport: str, given: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigurationError` for an option of another transport."""
    for option, value in given.items():
        if _owner(option) != transport:
            raise ConfigurationError(
                f"{option}={value!r} is for transport={_owner(option)!r}, and "
                f"transport={transport!r} does not use it; leave it out."
            )


def make_options(
    transport: str, given: Mapping[str, Any], **shared: Any
) -> TransportOptions:
    """Makes the options of one transport from those of a scheme."""
    own = {name: value for name, value in given.items() if _owner(name) == transport}
    return TRANSPORTS[transport].options_type(**own, **shared)


def _without_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for option, value in given.items():
        if option not in _OPTIONS:
            near = nearest(option, _OPTIONS)
            hint = f"did you mean {near!r}?" if near else "leave it out."
            raise ConfigurationError(
                f"SGLangWeightSyncScheme has no argument {option!r}; {hint}"
            )
        if value != _OPTIONS[option][1]:
            found[option] = value
    return found


def _owner(option: str) -> str:
    return _OPTIONS[option][0]


def choose(facts: Facts) -> Choice:
    """Returns the fastest transport that works.

    Examples:
        >>> from torchrl_sglang.types import ServerPlacement
        >>> server = ServerPlacement(url="http://host-2:80", local=False, device="cuda")
        >>> choose(
        ...     Facts(device="cuda:0", servers=(server,), pp_size=1, directory=None)
        ... ).name
        'broadcast'
    """
    for name, kind in TRANSPORTS.items():
        reason = kind.reason(facts)
        if reason is not None:
            return Choice(name=name, reason=reason)
    raise ConfigurationError(
        f"The servers have {facts.pp_size} pipeline stages each, and take weights from "
        f"files only; give directory=..., a folder that this process and every server "
        f"see under the same path."
    )
