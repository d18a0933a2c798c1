"""The table of transports: their names and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_choice, check_names
from torchrl_sglang.weight_update.transports.base import (
    TransportOptions,
    WeightTransport,
)
from torchrl_sglang.weight_update.transports.broadcast import BroadcastTransport
from torchrl_sglang.weight_update.transports.cuda_ipc import CudaIpcTransport
from torchrl_sglang.weight_update.transports.delta import DeltaTransport
from torchrl_sglang.weight_update.transports.disk import DiskTransport
from torchrl_sglang.weight_update.transports.lora import LoraTransport

_ROWS: tuple[type[WeightTransport], ...] = (
    LoraTransport,
    DiskTransport,
    CudaIpcTransport,
    BroadcastTransport,
    DeltaTransport,
)

TRANSPORTS: Mapping[str, type[WeightTransport]] = {row.name: row for row in _ROWS}
"""Name -> transport."""

_SHARED = {field.name for field in fields(TransportOptions)}

_OPTIONS: Mapping[str, tuple[str, Any]] = {
    option.name: (name, option.default)
    for name, kind in TRANSPORTS.items()
    for option in fields(kind.options_type)
    if option.name not in _SHARED
}
"""Option -> the transport that has it, and its default."""


def check_options(
    transport: str,
    options: Mapping[str, Any],
    *,
    arguments: Iterable[str] = (),
    **shared: Any,
) -> dict[str, Any]:
    """Validates the options of single transports; returns those without a default.

    ``shared`` has the options of every transport, and ``arguments`` are further ones of
    the scheme, which a wrong name may mean.
    """
    check_choice("transport", transport, ["auto", *sorted(TRANSPORTS)])
    check_names("SGLangWeightSyncScheme", options, (*_OPTIONS, *arguments))
    options = {name: v for name, v in options.items() if v != _OPTIONS[name][1]}
    if transport != "auto":
        check_used(transport, options)
    for name in {transport, *(_OPTIONS[option][0] for option in options)} - {"auto"}:
        make_options(name, options, **shared)
    if "directory" in options:
        check_used(DiskTransport.name, options)
    return options


def planned_transport(
    transport: str, options: Mapping[str, Any]
) -> type[WeightTransport] | None:
    """Returns the transport of these options; ``None``: an update chooses it."""
    # "auto" takes "disk" with a directory.
    return TRANSPORTS.get(DiskTransport.name if "directory" in options else transport)


def check_used(transport: str, options: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigurationError` for an option of another transport."""
    for option, value in options.items():
        owner, _ = _OPTIONS[option]
        if owner != transport:
            raise ConfigurationError(
                f"{option}={value!r} is for transport={owner!r}, and "
                f"transport={transport!r} does not use it; leave it out."
            )


def make_options(
    transport: str, options: Mapping[str, Any], **shared: Any
) -> TransportOptions:
    """Makes the options of one transport from the scheme's."""
    values = {name: v for name, v in options.items() if _OPTIONS[name][0] == transport}
    return TRANSPORTS[transport].options_type(**values, **shared)
