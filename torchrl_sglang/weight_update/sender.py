"""The trainer's side: which model, which servers, and the versions that it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.event_loop import run_sync
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.types import ModelMetadata, SyncReport
from torchrl_sglang.weight_update import session
from torchrl_sglang.weight_update.buckets import TensorSpec, plan_buckets
from torchrl_sglang.weight_update.source import (
    NamedTensors,
    named_tensors,
    to_served_names,
)
from torchrl_sglang.weight_update.transports.broadcast import BroadcastTransport

if TYPE_CHECKING:
    from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

__all__ = ["SGLangWeightSender"]


class SGLangWeightSender:
    """Sends weights to all servers of an engine.

    Make one with :meth:`SGLangWeightSyncScheme.create_sender`.

    Examples:
        >>> sender = SGLangWeightSyncScheme(engine).create_sender()
        >>> sender.register_model(model)
        >>> report = sender.update_weights()
        >>> report.version == engine.weight_version
        True
        >>> sender.shutdown()
    """

    def __init__(self, scheme: SGLangWeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: Any = None
        self._metadata: ModelMetadata | None = None
        self._transport: BroadcastTransport | None = None
        self._collectors: list[Any] = []
        self._last_report: SyncReport | None = None

    @property
    def last_report(self) -> SyncReport | None:
        """What the last update did; ``None`` before the first."""
        return self._last_report

    def register_model(self, model: Any) -> None:
        """Names the model whose weights are sent when none are given.

        Args:
            model: a module, or a wrapper of TorchRL around one.
        """
        self._model = model

    def register_collector(self, collector: Any) -> None:
        """Names a collector whose policy version counts direct updates."""
        if all(known is not collector for known in self._collectors):
            self._collectors.append(collector)

    def init_all_workers_group(
        self,
        model_metadata: ModelMetadata | None = None,
        vllm_engine: RLSGLangEngine | None = None,
    ) -> None:
        """Meets the servers now instead of at the first update.

        Args:
            model_metadata: name -> (dtype, shape) of what will be sent, checked
                against the served model.
            vllm_engine: the engine, under the name that TorchRL's recipes use; the
                same one as the scheme's.

        Raises:
            WeightMismatchError: if the metadata does not fit the served model.
            WeightTransferError: if the servers do not come.
        """
        own = self._scheme.engine
        if vllm_engine is not None and (
            getattr(vllm_engine, "server_url", None) != own.server_url
        ):
            raise ConfigurationError(
                f"The scheme was made for {self._scheme.engine!r}, and vllm_engine is "
                f"{vllm_engine!r}; give the same engine, or leave it out."
            )
        if model_metadata is not None:
            described = {
                name: torch.empty(shape, dtype=dtype, device="meta")
                for name, (dtype, shape) in model_metadata.items()
            }
            to_served_names(described, self._served())
        self._get_transport(self._scheme.device).connect()

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Sends weights, and counts a policy version on every registered collector.

        Args:
            weights: a module, a state dict, a TensorDict or an iterable of
                (name, tensor); by default the registered model's.

        Raises:
            WeightMismatchError: if they do not fit the served model; nothing was sent.
            WeightTransferError: if sending failed; see its ``untouched``.
            WeightSyncStateError: if there is nothing to send, or another update is
                under way.
        """
        report = self.send(weights)
        for collector in self._all_collectors():
            collector.increment_version()
        return report

    def send(self, weights: Any = None) -> SyncReport:
        """Sends weights without counting: the caller does that."""
        found = self.resolve(weights)
        served = self._served()
        tensors = to_served_names(found, served)
        specs = [
            TensorSpec(name=name, dtype=dtype, shape=shape)
            for name, (dtype, shape) in served.items()
        ]
        self._last_report = session.update_weights(
            self._scheme.engine,
            self._get_transport(self._scheme.device or _device_of(tensors)),
            plan_buckets(specs, self._scheme.bucket_bytes),
            tensors,
            version=self._next_version(),
            pause_mode=self._scheme.pause_mode,
        )
        return self._last_report

    def resolve(self, weights: Any = None) -> NamedTensors:
        """Returns the tensors to send, under the names that their owner gives them.

        Raises:
            WeightSyncStateError: if none are given and no model is registered.
        """
        source = self._model if weights is None else weights
        if source is None:
            raise WeightSyncStateError(
                "There are no weights to send: register the model that is trained with "
                "sender.register_model(model), or give weights."
            )
        # A module is kept by reference, so its current values are read every time.
        if isinstance(source, (nn.Module, TensorDictBase)):
            with torch.no_grad():
                return named_tensors(source)
        return named_tensors(source)

    def _served(self) -> ModelMetadata:
        if self._metadata is None:
            self._metadata = self._scheme.engine.get_model_metadata()
        return self._metadata

    def _next_version(self) -> str:
        # Versions are numbers that only grow, whoever updates and however often the
        # trainer or a server is restarted; so the servers are asked as well.
        try:
            current = run_sync(self._scheme.engine.control.weight_versions())
        except ServerError as error:
            failure = WeightTransferError(f"The servers could not be asked: {error}")
            failure.untouched = True
            raise failure from error
        known = [*current, self._scheme.engine.weight_version]
        return str(1 + max(int(v) if v.isdigit() else 0 for v in known))

    def _get_transport(self, device: torch.device | None) -> BroadcastTransport:
        if self._transport is None:
            self._transport = BroadcastTransport(
                self._scheme.engine,
                device=device or _device_of(self.resolve()),
                master_address=self._scheme.master_address,
                master_port=self._scheme.master_port,
                connect_timeout=self._scheme.connect_timeout,
                send_timeout=self._scheme.send_timeout,
            )
        return self._transport

    def _all_collectors(self) -> list[Any]:
        attached = self._scheme.context
        if attached is None or any(attached is known for known in self._collectors):
            return self._collectors
        return [*self._collectors, attached]

    def shutdown(self) -> None:
        """Leaves the servers' process group. Safe to call twice."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._collectors.clear()


def _device_of(tensors: NamedTensors) -> torch.device:
    device = next(iter(tensors.values())).device
    if device.type in ("cuda", "cpu"):
        return device
    raise ConfigurationError(
        f"The weights are on {device}; weights are sent from 'cuda' or 'cpu'."
    )
