"""The phases of a weight update, as vLLM's trainers call them.

``init_weight_transfer_engine`` makes the servers join the trainer's process group. Then
each update is ``start_weight_update``, one or more ``update_weights`` whose tensors the
servers receive from the trainer, and ``finish_weight_update``.
"""

from __future__ import annotations

import threading
from typing import Any

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import GatewayError
from torchrl_sglang.gateway.vllm.broadcasts import (
    BroadcastReceiver,
    check_specs,
    read_specs,
)
from torchrl_sglang.gateway.vllm.transfer import AnnouncedUpdate


class WeightUpdates:
    """Weight updates of a trainer that speaks vLLM's protocol."""

    def __init__(self, engine: RLSGLangEngine, *, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._lock = threading.Lock()
        self._receiver: BroadcastReceiver | None = None
        self._update: AnnouncedUpdate | None = None
        self.stays_paused = False
        """Whether a client has paused generation, so that updates do not resume it."""
        self.labels: dict[str, str] = {}
        """Weight version -> the trainer's name of it."""

    def join(self, init_info: Any) -> None:
        """Makes the servers join a trainer's process group."""
        receiver = BroadcastReceiver(self._engine, init_info, self._timeout)
        with self._lock:
            if self._update is not None and self._update.is_open:
                # Its trainer is gone.
                self._update.abandon()
            self._receiver = receiver
            with self._engine.weight_update():
                receiver.join()

    def start(self) -> None:
        """Begins an update: nothing is computed until its end."""
        with self._lock:
            if self._update is not None and self._update.is_open:
                raise GatewayError(
                    "start_weight_update called while a weight update is already "
                    "active. Call finish_weight_update first, or "
                    "init_weight_transfer_engine to abandon it.",
                    status=500,
                )
            if self._receiver is None or not self._receiver.is_joined:
                raise GatewayError(
                    "NCCL weight transfer not initialized. Call "
                    "init_transfer_engine() first.",
                    status=500,
                )
            self._update = AnnouncedUpdate(
                self._engine,
                self._receiver,
                self._timeout,
                resume=not self.stays_paused,
            )
            self._update.begin()

    def receive(self, update_info: Any) -> None:
        """Receives tensors of the current update."""
        specs = read_specs(update_info)
        update = self._open("start_weight_update must be called before update_weights.")
        check_specs(specs, self._engine)
        update.receive(specs, update.receiver.wire.changed(update_info))

    def finish(self, label: Any) -> None:
        """Ends the current update; the servers compute when they are resumed."""
        update = self._open(
            "finish_weight_update called without a matching start_weight_update."
        )
        update.finish()
        if label is not None:
            self.labels[self._engine.weight_version] = str(label)

    def _open(self, problem: str) -> AnnouncedUpdate:
        with self._lock:
            if self._update is None or not self._update.is_open:
                raise GatewayError(problem, status=500)
            return self._update
