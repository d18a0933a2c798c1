"""THE table of transports: names, options, and which one ``"auto"`` takes."""

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
from torchrl_sglang.weight_update.transports.placement import Topology, reach_of

AUTO = "auto"

_ROWS: tuple[type[WeightTransport], ...] = (
    LoraTransport,
    DiskTransport,
    CudaIpcTransport,
    BroadcastTransport,
    DeltaTransport,
)

TRANSPORTS: Mapping[str, type[WeightTransport]] = {row.name: row for row in _ROWS}
"""Name -> transport."""

_GIVE_DIRECTORY = (
    "give directory=..., a folder that this process and every server see under the "
    "same path."
)

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
    check_choice("transport", transport, [AUTO, *sorted(TRANSPORTS)])
    check_names("SGLangWeightSyncScheme", options, (*_OPTIONS, *arguments))
    options = {name: v for name, v in options.items() if v != _OPTIONS[name][1]}
    if transport != AUTO:
        check_used(transport, options)
    for name in {transport, *(_OPTIONS[option][0] for option in options)} - {AUTO}:
        make_options(name, options, **shared)
    if "directory" in options:
        check_used(DiskTransport.name, options)
    return options


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


def choose(facts: Topology) -> tuple[str, str]:
    """Returns the fastest transport for whole weights that works, and the reason."""
    if facts.directory is not None:
        return DiskTransport.name, f"A directory was given: {facts.directory!r}."
    if facts.pp_size > 1:
        raise ConfigurationError(
            f"The servers have {facts.pp_size} pipeline stages each, and take weights "
            f"from files only; {_GIVE_DIRECTORY}"
        )
    reaches = [reach_of(server, facts) for server in facts.servers]
    if any(reach.shares for reach in reaches):
        for reach in reaches:
            if not reach.opens:
                reason = reach.reason or "It is not known which GPUs it sees."
                raise ConfigurationError(
                    f"A server computes on the GPU of the weights ({facts.device}), "
                    f"which NCCL does not allow, and the server at {reach.url} cannot "
                    f"open their memory: {reason} To send files, {_GIVE_DIRECTORY}"
                )
        reason = f"The servers share the GPU of the weights, {facts.device}."
        return CudaIpcTransport.name, reason
    if not facts.device.startswith("cuda"):
        reason = f"The weights are on {facts.device}, which servers do not share."
    elif all(server.gpus is not None for server in facts.servers):
        reason = f"The servers compute elsewhere than on {facts.device}."
    else:
        reason = (
            f"It is not known that the servers share the GPU of the weights, "
            f"{facts.device}; if they do, give transport='cuda_ipc'."
        )
    return BroadcastTransport.name, reason
