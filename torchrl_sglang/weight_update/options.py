"""The options of a scheme, validated once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import CONTROL_TIMEOUT_SECONDS, RLSGLangEngine
from torchrl_sglang.backends.support.checks import check_flag, check_seconds
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import PauseMode
from torchrl_sglang.weight_update.transports.base import (
    BUCKET_BYTES,
    SEND_TIMEOUT_SECONDS,
    SelectableTransport,
)
from torchrl_sglang.weight_update.transports.placement import find_facts
from torchrl_sglang.weight_update.transports.registry import (
    AUTO,
    TRANSPORTS,
    Choice,
    check_options,
    check_used,
    choose,
    make_options,
)

__all__ = ["SchemeOptions"]


@dataclass(frozen=True, kw_only=True)
class SchemeOptions:
    """The options of a :class:`.SGLangWeightSyncScheme`, which documents them."""

    transport: str = AUTO
    """Name of the transport."""
    transport_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of single transports that are no defaults."""
    bucket_bytes: int = BUCKET_BYTES
    """Size of a transfer, in bytes."""
    send_timeout: float = SEND_TIMEOUT_SECONDS
    """Timeout of one transfer, in seconds."""
    control_timeout: float = CONTROL_TIMEOUT_SECONDS
    """Timeout of each call that moves no weights, in seconds."""
    device: torch.device | str | int | None = None
    """Where buckets are put together; by default where the weights are."""
    pause_mode: PauseMode = "retract"
    """What happens to requests in flight."""
    flush_cache: bool = True
    """Empty prefix caches where it is not needed, too."""
    verify: bool = False
    """Compare servers and trainer after every update."""
    process_group: dist.ProcessGroup | None = None
    """Ranks that make the weights together, where the weights do not tell."""

    def __post_init__(self) -> None:
        if self.pause_mode not in get_args(PauseMode):
            raise ConfigurationError(
                f"pause_mode={self.pause_mode!r} is not one of "
                f"{', '.join(map(repr, get_args(PauseMode)))}."
            )
        given = check_options(self.transport, self.transport_options, **self._shared)
        checked = {
            "control_timeout": check_seconds("control_timeout", self.control_timeout),
            "flush_cache": check_flag("flush_cache", self.flush_cache),
            "verify": check_flag("verify", self.verify),
            "device": None if self.device is None else _to_device(self.device),
            "transport_options": given,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def _shared(self) -> dict[str, Any]:
        return {"bucket_bytes": self.bucket_bytes, "send_timeout": self.send_timeout}

    def make_transport(
        self, engine: RLSGLangEngine, device: torch.device, *, adapter: bool = False
    ) -> tuple[SelectableTransport, str]:
        """Makes the transport for weights on a device, and tells why it is that one."""
        if self.device is None:
            if all(server.device == "cpu" for server in engine.placements):
                # From a GPU they have to go to the CPU in any case.
                device = torch.device("cpu")
        elif isinstance(self.device, torch.device):
            device = self.device
        choice = self._choose(engine, device, adapter)
        options = make_options(choice.name, self.transport_options, **self._shared)
        made = TRANSPORTS[choice.name](engine, options, device=device)
        return made, choice.reason

    def _choose(
        self, engine: RLSGLangEngine, device: torch.device, adapter: bool
    ) -> Choice:
        if self.transport != AUTO:
            reason = f"transport={self.transport!r} was given."
            return Choice(name=self.transport, reason=reason)
        directory = self.transport_options.get("directory")
        facts = find_facts(
            engine,
            device,
            directory=None if directory is None else str(directory),
            adapter=adapter,
        )
        choice = choose(facts)
        if not adapter:
            check_used(choice.name, self.transport_options)
            torchrl_logger.info(f"Weights go by {choice.name!r}: {choice.reason}")
        return choice


def _to_device(device: torch.device | str | int) -> torch.device:
    try:
        found = (
            torch.device("cuda", device)
            if type(device) is int
            else torch.device(device)
        )
    except (RuntimeError, TypeError):
        found = None
    if found is None or isinstance(device, bool) or found.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"device must be 'cpu', 'cuda' or the number of a GPU, got {device!r}; "
            f"leave it out to send from where the weights are."
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device={device!r} is a GPU, and there is none here; leave it out to send "
            f"from where the weights are."
        )
    return found
