"""Brings servers back to the checkpoint that they were started with.

It is a weight update like any other, for a trainer that gives up or that was killed;
the servers' own files are the transport.
"""

from __future__ import annotations

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
from torchrl_sglang.weight_update.transports.base import CPU, WeightTransport
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

__all__ = ["checkpoint_path", "recover"]

LOAD_TIMEOUT_SECONDS = 600.0
"""Timeout for the servers to read their checkpoint."""


def recover(
    engine: RLSGLangEngine,
    *,
    version: str,
    pause_mode: PauseMode,
    held: WeightUpdate | None = None,
) -> SyncReport:
    """Makes every server load its checkpoint as a new weight version, and generate.

    The servers may be paused, in an open session, or inconsistent.
    """
    # For the report alone; the servers read the files.
    specs = tuple(
        TensorSpec(name=name, dtype=dtype, shape=shape)
        for name, (dtype, shape) in engine.get_model_metadata().items()
    )
    return session.update_weights(
        engine,
        _CheckpointTransport(engine),
        Weights(specs=specs, read=lambda: iter(()), device=CPU, stable=True),
        version=version,
        pause_mode="retract" if pause_mode == "none" else pause_mode,
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


class _CheckpointTransport(WeightTransport):
    """Makes every server load files that it has."""

    name = "checkpoint"

    def send(self, weights: Weights, *, version: str) -> int:
        """Loads the checkpoint; see :class:`.WeightTransport`."""
        control, path = self._engine.control, checkpoint_path(self._engine)
        try:
            run_sync(control.end_weight_update())
        except RequestRefusedError as error:
            # The usual case: no trainer has left its session open.
            torchrl_logger.debug(f"Before the checkpoint is loaded: {error}")
        loading = control.update_weights_from_disk(
            path, weight_version=version, timeout=LOAD_TIMEOUT_SECONDS
        )
        try:
            run_sync(loading)
        except ServerError as error:
            # The weights before were not trusted, so the servers count as touched.
            raise WeightTransferError(
                f"The checkpoint {path!r} could not be loaded: {error}"
            ) from error
        return 1
