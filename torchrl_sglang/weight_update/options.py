"""The options of a scheme, validated once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_choice, check_flag, check_seconds
from torchrl_sglang.types import PauseMode
from torchrl_sglang.weight_update.encodings.base import WeightEncoding
from torchrl_sglang.weight_update.encodings.registry import (
    ENCODINGS,
    find_encoding,
)
from torchrl_sglang.weight_update.transports.base import TransportOptions
from torchrl_sglang.weight_update.transports.registry import (
    TRANSPORTS,
    check_options,
    planned_transport,
)

RESTART_TIMEOUT_SECONDS = 600.0
"""A start takes minutes where a large model is loaded."""

WaitFor: TypeAlias = Literal["any", "all"]
"""Servers that have to run when weights are sent."""


@dataclass(frozen=True, kw_only=True)
class SchemeOptions(TransportOptions):
    """The options of a :class:`.SGLangWeightSyncScheme`, which documents them."""

    transport: str = "auto"
    transport_options: Mapping[str, Any] = field(default_factory=dict)
    control_timeout: float = CONTROL_TIMEOUT_SECONDS
    device: torch.device | str | int | None = None
    restart_timeout: float = RESTART_TIMEOUT_SECONDS
    wait_for: WaitFor = "any"
    pause_mode: PauseMode = "continue"
    flush_cache: bool = True
    verify: bool = False
    encoding: WeightEncoding | str = "auto"
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> SchemeOptions:
        """Makes them of a scheme's arguments, with the options of single transports."""
        names = {option.name for option in fields(cls)} - {"transport_options"}
        values = {name: arguments[name] for name in names & arguments.keys()}
        if values.get("pause_mode", "") is None:
            del values["pause_mode"]
        options = {name: v for name, v in arguments.items() if name not in names}
        return cls(**values, transport_options=options)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pause_mode", self.pause_mode, get_args(PauseMode))
        check_choice("wait_for", self.wait_for, get_args(WaitFor))
        if self.restart_timeout != 0:
            check_seconds("restart_timeout", self.restart_timeout)
        options = check_options(
            self.transport,
            self.transport_options,
            arguments=[option.name for option in fields(self)],
            **self.shared,
        )
        self._set("transport_options", options)
        transport = planned_transport(self.transport, options)
        if self.weight_loader == "traced" and transport and not transport.traceable:
            names = sorted(name for name, row in TRANSPORTS.items() if row.traceable)
            raise ConfigurationError(
                f"weight_loader='traced' is for transport="
                f"{' and '.join(map(repr, names))}, and transport={transport.name!r} "
                f"does not use it; leave it out."
            )
        seconds = check_seconds("control_timeout", self.control_timeout)
        self._set("control_timeout", seconds)
        self._set("flush_cache", check_flag("flush_cache", self.flush_cache))
        self._set("verify", check_flag("verify", self.verify))
        self._set("encoding", find_encoding(self.encoding))
        if transport and transport.adapter_only:
            self._check_adapter_alone(transport.name)
        encodings = ("auto", *ENCODINGS.values())
        if self.verify and self.encoding not in encodings:
            raise ConfigurationError(
                "verify=True compares the servers with what was read, and an encoding "
                "of your own sends something else; leave one of the two out."
            )
        if self.device is not None:
            self._set("device", _to_device(self.device))

    def _check_adapter_alone(self, transport: str) -> None:
        """Refuses options for whole weights."""
        names: dict[Any, Any] = {row: name for name, row in ENCODINGS.items()}
        encoding = names.get(self.encoding, self.encoding)
        for name, value in (("encoding", encoding), ("draft", self.draft)):
            if value not in ("auto", "keep"):
                raise ConfigurationError(
                    f"{name}={value!r} is for whole weights, and "
                    f"transport={transport!r} sends an adapter alone; leave it out."
                )

    @property
    def shared(self) -> dict[str, Any]:
        """The options of every transport."""
        names = [option.name for option in fields(TransportOptions)]
        return {name: getattr(self, name) for name in names}


def _to_device(device: torch.device | str | int) -> torch.device:
    try:
        place = ("cuda", device) if isinstance(device, int) else (device,)
        parsed = torch.device(*place)
    except (RuntimeError, TypeError):
        parsed = None
    if parsed is None or isinstance(device, bool) or parsed.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"device must be 'cpu', 'cuda' or the number of a GPU, got {device!r}; "
            f"leave it out to send from where the weights are."
        )
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device={device!r} is a GPU, and there is none here; leave it out to send "
            f"from where the weights are."
        )
    return parsed
