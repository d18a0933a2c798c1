"""Brings servers back to the checkpoint that they were started with.

It is a weight update like any other, for a trainer that gives up or that was killed;
the servers' own files are the transport.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine, WeightUpdate
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.types import PauseMode, SyncReport
from torchrl_sglang.weight_update import session
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

__all__ = ["checkpoint_path", "recover"]

LOAD_TIMEOUT_SECONDS = 600.0
"""Default timeout for the servers to read their checkpoint."""


def recover(
    engine: RLSGLangEngine,
    *,
    version: str,
    pause_mode: PauseMode,
    load_timeout: float = LOAD_TIMEOUT_SECONDS,
    held: WeightUpdate | None = None,
) -> SyncReport:
    """Makes every server load its checkpoint as a new weight version, and generate.

    The servers may be paused, in an open session, or inconsistent.
    """
    transport = _CheckpointTransport(engine, checkpoint_path(engine), load_timeout)
    # For the report alone; the servers read the files.
    specs = tuple(
        TensorSpec(name=name, dtype=dtype, shape=shape)
        for name, (dtype, shape) in engine.get_model_metadata().items()
    )
    weights = Weights(
        specs=specs, read=lambda: iter(()), device=torch.device("cpu"), stable=True
    )
    return session.update_weights(
        engine,
        transport,
        weights,
        version=version,
        pause_mode="retract" if pause_mode == "none" else pause_mode,
        whole=False,
        held=held,
        checkpoint=True,
    )


def checkpoint_path(engine: RLSGLangEngine) -> str:
    """Returns the path, as the servers see it, that they were started with."""
    capabilities = engine.capabilities
    if capabilities.server_args.get("load_format") == "dummy":
        raise UnsupportedByServerError(
            "The servers were started with load_format='dummy', so there is no "
            "checkpoint to go back to; send them weights instead."
        )
    # A server that has loaded other files reports those as its model's path.
    return str(capabilities.server_args.get("model_path") or capabilities.model_path)


class _CheckpointTransport:
    """Makes every server load files that it has."""

    name: ClassVar[str] = "checkpoint"
    in_session: ClassVar[bool] = False
    adapter_only: ClassVar[bool] = False

    def __init__(self, engine: RLSGLangEngine, path: str, timeout: float) -> None:
        self._engine = engine
        self._path = path
        self._timeout = timeout

    @property
    def connected(self) -> bool:
        return True

    def connect(self) -> None:
        """Does nothing."""

    def send(self, weights: Weights, *, version: str) -> int:
        control = self._engine.control
        try:
            run_sync(control.end_weight_update())
        except RequestRefusedError as error:
            # The usual case: no trainer has left its session open.
            torchrl_logger.debug(f"Before the checkpoint is loaded: {error}")
        loading = control.update_weights_from_disk(
            self._path, weight_version=version, timeout=self._timeout
        )
        try:
            run_sync(loading)
        except ServerError as error:
            # The weights before were not trusted, so the servers count as touched.
            raise WeightTransferError(
                f"The checkpoint {self._path!r} could not be loaded: {error}"
            ) from error
        return 1

    def close(self) -> None:
        """Does nothing."""
