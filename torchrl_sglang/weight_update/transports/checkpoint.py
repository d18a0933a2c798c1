"""Brings servers back to the checkpoint that they were started with.

A weight update like any other, whose transport is the servers' own files.
"""

from __future__ import annotations

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.weight_update.transports.base import WeightTransport
from torchrl_sglang.weight_update.weights import Weights

__all__ = ["CheckpointTransport", "checkpoint_path"]

LOAD_TIMEOUT_SECONDS = 600.0
"""Timeout for the servers to read their checkpoint."""


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


class CheckpointTransport(WeightTransport):
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
