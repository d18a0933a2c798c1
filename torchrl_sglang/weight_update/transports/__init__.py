"""How weights travel: one file for each way, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.weight_update.transports.base import WeightTransport
from torchrl_sglang.weight_update.transports.broadcast import BroadcastTransport
from torchrl_sglang.weight_update.transports.choose import (
    Choice,
    check_arguments,
    choose,
)
from torchrl_sglang.weight_update.transports.cuda_ipc import CudaIpcTransport
from torchrl_sglang.weight_update.transports.disk import DiskTransport
from torchrl_sglang.weight_update.transports.facts import find_facts

if TYPE_CHECKING:
    from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

__all__ = ["make_transport"]


def make_transport(
    scheme: SGLangWeightSyncScheme, device: torch.device
) -> tuple[WeightTransport, str]:
    """Returns the transport that a scheme asks for, and why it is that one.

    Args:
        scheme: its engine and its options.
        device: where the weights are.

    Raises:
        ConfigurationError: if none is left to ``"auto"``, or the chosen one does not
            use an argument of the scheme.
    """
    on_cpu = all(place.device == "cpu" for place in scheme.engine.placements)
    if scheme.device is None and on_cpu:
        # From a GPU to the CPU they have to go in any case.
        device = torch.device("cpu")
    choice = Choice(
        name=scheme.transport, reason=f"transport={scheme.transport!r} was given."
    )
    if scheme.transport == "auto":
        choice = choose(find_facts(scheme.engine, device, scheme.directory))
        check_arguments(choice.name, scheme.transport_arguments)
        torchrl_logger.info(f"Weights go by {choice.name!r}: {choice.reason}")
    return _make(choice.name, scheme, device), choice.reason


def _make(
    name: str, scheme: SGLangWeightSyncScheme, device: torch.device
) -> WeightTransport:
    if name == "disk":
        assert scheme.directory is not None  # check_arguments() has looked.
        return DiskTransport(
            scheme.engine,
            directory=scheme.directory,
            bucket_bytes=scheme.bucket_bytes,
            send_timeout=scheme.send_timeout,
        )
    if name == "cuda_ipc":
        return CudaIpcTransport(
            scheme.engine,
            device=device,
            bucket_bytes=scheme.bucket_bytes,
            send_timeout=scheme.send_timeout,
        )
    return BroadcastTransport(
        scheme.engine,
        device=device,
        master_address=scheme.master_address,
        master_port=scheme.master_port,
        bucket_bytes=scheme.bucket_bytes,
        connect_timeout=scheme.connect_timeout,
        send_timeout=scheme.send_timeout,
    )
