"""SGLangWeightSyncScheme: TorchRL's contract for weight synchronisation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.types import PauseMode
from torchrl_sglang.weight_update.receiver import SGLangWeightReceiver
from torchrl_sglang.weight_update.sender import SGLangWeightSender
from torchrl_sglang.weight_update.transports.broadcast import (
    CONNECT_TIMEOUT_SECONDS,
    SEND_TIMEOUT_SECONDS,
)

__all__ = ["SGLangWeightSyncScheme"]

BUCKET_BYTES = 1 << 30
"""Default size of a bucket: the server needs that much room beside its weights."""


class SGLangWeightSyncScheme(WeightSyncScheme):
    """Sends a trained model's weights to the servers of an engine.

    Used by itself, through :meth:`create_sender`, or attached to a collector::

        sender = scheme.create_sender()
        sender.register_model(model)
        collector._setup_weight_sync(None, {"policy": scheme})
        collector.update_policy_weights_()   # sends, and counts one policy version

    Args:
        engine (RLSGLangEngine or str): the engine, or the URL of a server.

    Keyword Args:
        strategy (str): ``"tensordict"`` (default) or ``"state_dict"``; kept for
            TorchRL, and both are sent the same way.
        device (torch.device, optional): where buckets are put together. CUDA sends
            with NCCL, CPU with gloo. Defaults to the device of the weights.
        master_address (str, optional): where servers meet the sender. Defaults to the
            address of this machine that they can reach.
        master_port (int, optional): defaults to one that is free.
        bucket_bytes (int): size of a transfer, in bytes. Defaults to 1 GiB.
        pause_mode (str): what happens to requests that run during an update.
            ``"retract"`` (default) computes their prefix again with the new weights,
            ``"abort"`` ends them, ``"in_place"`` lets them go on with attention state
            of the old weights.
        connect_timeout (float): budget for servers to join, in seconds.
        send_timeout (float): budget for one bucket, in seconds.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> scheme = SGLangWeightSyncScheme(engine)
        >>> sender = scheme.create_sender()
        >>> sender.register_model(model)
        >>> report = sender.update_weights()
        >>> report.num_tensors == len(get_model_metadata(model))
        True
        >>> scheme.shutdown()
    """

    def __init__(
        self,
        engine: RLSGLangEngine | str,
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        device: torch.device | str | None = None,
        master_address: str | None = None,
        master_port: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        pause_mode: PauseMode = "retract",
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(strategy)
        if pause_mode not in ("retract", "abort", "in_place"):
            raise ConfigurationError(
                f"pause_mode={pause_mode!r} is not one of 'retract', 'abort' and "
                f"'in_place'."
            )
        if bucket_bytes <= 0:
            raise ConfigurationError(
                f"bucket_bytes={bucket_bytes} is not a size; give a positive number."
            )
        self.engine = AsyncSGLang.connect(engine) if isinstance(engine, str) else engine
        self.device = None if device is None else torch.device(device)
        self.master_address = master_address
        self.master_port = master_port
        self.bucket_bytes = bucket_bytes
        self.pause_mode: PauseMode = pause_mode
        self.connect_timeout = connect_timeout
        self.send_timeout = send_timeout
        self._sender: SGLangWeightSender | None = None

    def create_sender(self) -> SGLangWeightSender:
        """Returns the scheme's sender; the same one every time."""
        if self._sender is None:
            self._sender = SGLangWeightSender(self)
        return self._sender

    def create_receiver(
        self, engine: RLSGLangEngine | None = None
    ) -> SGLangWeightReceiver:
        """Returns the view of the receiving servers.

        Args:
            engine: the servers; by default the scheme's.
        """
        return SGLangWeightReceiver(self, engine or self.engine)

    def create_transport(self, **kwargs: Any) -> _SchemeTransport:
        """Returns what TorchRL hands prepared weights to."""
        return _SchemeTransport(self.create_sender())

    def prepare_weights(
        self,
        weights: Any,
        model_id: str,
        strategy: WeightStrategy,
        context: Any = None,
    ) -> Any:
        """Returns the tensors to send: those given, or the registered model's.

        The collector's own policy is an inference wrapper without parameters, so it is
        never what is meant.

        Raises:
            WeightSyncStateError: if none are given and no model is registered.
        """
        return self.create_sender().resolve(weights)

    def _init_on_sender_impl(
        self, *, model_id: str, context: Any = None, **kwargs: Any
    ) -> None:
        self.model_id = model_id
        self.context = context
        self._register_worker_sender(worker_idx=0)

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, **kwargs: Any
    ) -> None:
        raise UnsupportedByServerError(
            "SGLang servers receive by themselves; initialise this scheme on the "
            "sender, and call create_receiver() to ask about the servers."
        )

    def shutdown(self) -> None:
        """Leaves the servers. Safe to call twice."""
        sender = getattr(self, "_sender", None)
        if sender is not None:
            sender.shutdown()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        # The sender holds the model and a process group of this process.
        state: dict[str, Any] = super().__getstate__()
        state["_sender"] = None
        state["_sender_transports"] = None
        return state


class _SchemeTransport:
    """TorchRL's transport protocol over a sender. The collector counts versions."""

    def __init__(self, sender: SGLangWeightSender) -> None:
        self._sender = sender

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: servers start with their weights, and are met when needed."""

    def send_weights(self, weights: Any) -> None:
        self._sender.send(weights)

    def receive_weights(self, **kwargs: Any) -> None:
        """Does nothing: servers receive by themselves."""

    def setup_connection_and_weights_on_receiver(self, **kwargs: Any) -> None:
        """Does nothing: servers receive by themselves."""

    def check_connection(self) -> bool:
        return True

    def shutdown(self) -> None:
        self._sender.shutdown()
