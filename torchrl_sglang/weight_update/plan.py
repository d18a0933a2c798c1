"""Decides everything about a weight update before its first byte is sent.

:func:`choose_source` finds the tensors, and the ranks that hold them, on the trainer
alone. :func:`plan_update` adds the decisions that depend on the served model. Updates,
repetitions, new servers and the other ranks of a trainer follow one
:class:`UpdatePlan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.weight_update.encodings.base import encode_weights
from torchrl_sglang.weight_update.encodings.registry import encoding_for
from torchrl_sglang.weight_update.options import SchemeOptions
from torchrl_sglang.weight_update.ranks import find_ranks
from torchrl_sglang.weight_update.sources.base import (
    Source,
    SourceCache,
    UserWeights,
)
from torchrl_sglang.weight_update.sources.fingerprints import (
    Fingerprint,
    take_fingerprints,
)
from torchrl_sglang.weight_update.sources.peft import adapter_source, trained_adapter
from torchrl_sglang.weight_update.sources.resolve import find_source
from torchrl_sglang.weight_update.sources.served import ServedTensors, open_weights
from torchrl_sglang.weight_update.transports.base import CPU, WeightTransport
from torchrl_sglang.weight_update.transports.broadcast import BroadcastTransport
from torchrl_sglang.weight_update.transports.cuda_ipc import CudaIpcTransport
from torchrl_sglang.weight_update.transports.disk import DiskTransport
from torchrl_sglang.weight_update.transports.lora import LoraTransport
from torchrl_sglang.weight_update.transports.placement import (
    Topology,
    find_facts,
    reach_of,
)
from torchrl_sglang.weight_update.transports.registry import (
    TRANSPORTS,
    check_used,
    make_options,
)
from torchrl_sglang.weight_update.weights import Weights

_GIVE_DIRECTORY = (
    "give directory=..., a folder that this process and every server see under the "
    "same path."
)


def choose_source(
    weights: UserWeights,
    options: SchemeOptions,
    cache: SourceCache,
    takes_adapter: Callable[[Source], bool],
) -> Source:
    """Resolves the caller's weights into whole ones, or into a LoRA adapter alone.

    ``takes_adapter`` returns whether the servers take one; a single rank calls it.
    """
    source = None
    if options.transport == "auto" and options.process_group is None:
        adapter = trained_adapter(weights)
        if adapter is not None and takes_adapter(adapter):
            source = adapter
    elif options.transport == LoraTransport.name:
        source = adapter_source(weights)
    if source is None:
        source = find_source(weights.value, cache)
    ranks = find_ranks(source, options.process_group)
    return replace(source, origin=weights, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """One weight update, resolved once."""

    options: SchemeOptions
    """Options of the scheme."""
    source: Source
    """The trainer's tensors, and the ranks that hold them."""
    tensors: Weights
    """The tensors under served names."""
    weights: Weights
    """The tensors as they are sent: encoded, unless they are an adapter."""
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    """Fingerprints of the tensors that were read, where they are taken."""

    def transport_to(
        self, engine: RLSGLangEngine, connection: WeightTransport | None = None
    ) -> WeightTransport:
        """Makes the transport to an engine's servers; whole weights keep theirs."""
        adapter, ranks = self.source.adapter is not None, self.source.ranks
        if connection is not None and not adapter:
            return connection
        gpus = () if ranks is None else ranks.gpus
        return make_transport(
            self.options, engine, self.weights.device, adapter=adapter, gpus=gpus
        )


def plan_update(
    source: Source,
    served: ServedTensors | None,
    options: SchemeOptions,
    *,
    fingerprinted: bool = False,
    cache: SourceCache | None = None,
) -> UpdatePlan:
    """Plans an update of a source, validated against the served model.

    An adapter needs none. ``fingerprinted`` takes fingerprints of the tensors, if one
    rank holds them whole. ``cache`` has the plan of tensors that stay in their memory.

    Raises:
        WeightMismatchError: if they do not fit.
        UnsupportedByServerError: if the servers do not take the encoding.
    """
    fingerprints: dict[str, Fingerprint] = {}
    if source.ranks is not None:
        source.ranks.served = served
    elif fingerprinted:
        source = take_fingerprints(source, fingerprints)
    tensors = weights = open_weights(source, served, cache)
    if served is not None:
        encoding = encoding_for(options.encoding, served.quantized)
        weights = replace(
            encode_weights(tensors, encoding), quantized=encoding.quantized
        )
    return UpdatePlan(
        options=options,
        source=source,
        tensors=tensors,
        weights=weights,
        fingerprints=fingerprints,
    )


def make_transport(
    options: SchemeOptions,
    engine: RLSGLangEngine,
    device: torch.device,
    *,
    adapter: bool = False,
    gpus: tuple[frozenset[str], ...] = (),
) -> WeightTransport:
    """Makes the transport to an engine's servers, for weights on a device.

    ``gpus`` names the GPU of each rank that holds them, if several do.
    """
    if isinstance(options.device, torch.device):
        device = options.device
    elif all(server.device == "cpu" for server in engine.placements):
        # From a GPU they have to go to the CPU in any case.
        device = CPU
    name, reason = options.transport, f"transport={options.transport!r} was given."
    if name == "auto" and adapter:
        name = LoraTransport.name
        reason = "The model trains a LoRA adapter, and the servers take adapters."
    elif name == "auto":
        directory = options.transport_options.get("directory")
        path = None if directory is None else str(directory)
        name, reason = choose(find_facts(engine, device, directory=path, ranks=gpus))
        check_used(name, options.transport_options)
        torchrl_logger.info(f"Weights go by {name!r}: {reason}")
    values = make_options(name, options.transport_options, **options.shared)
    transport = TRANSPORTS[name](engine, values, device=device)
    transport.reason, transport.trainer_gpus = reason, gpus
    return transport


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
