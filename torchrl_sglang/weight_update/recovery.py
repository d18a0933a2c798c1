"""Back to whole weights after an update that nobody will finish.

A trainer that gives up, or another one in the place of a trainer that was killed, has
the servers load the checkpoint that they were started with. It is a weight update like
any other, with the servers' own files as the transport.
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
from torchrl_sglang.weight_update.buckets import TensorSpec
from torchrl_sglang.weight_update.sources.weights import Weights

__all__ = ["recover"]

LOAD_TIMEOUT_SECONDS = 600.0
"""Default budget for the servers to read their checkpoint."""


def recover(
    engine: RLSGLangEngine,
    *,
    version: str,
    pause_mode: PauseMode,
    load_timeout: float = LOAD_TIMEOUT_SECONDS,
    held: WeightUpdate | None = None,
) -> SyncReport:
    """Has every server load the checkpoint that it was started with, and generate.

    Args:
        engine: the servers; paused, in an open session, in doubt or well.
        version: what they report as their weight version from then on.
        pause_mode: what happens to requests that run meanwhile.
        load_timeout: budget for the servers to read their files, in seconds.
        held: the caller's hold of the engine, if it has one.

    Raises:
        UnsupportedByServerError: if the servers were started without a checkpoint.
        WeightTransferError: if they cannot load it; their weights stay inconsistent.
        WeightSyncStateError: if an update is under way, or weights are asleep.
    """
    path = checkpoint_path(engine)
    # Names are for the report alone; the files are read by the servers.
    specs = tuple(
        TensorSpec(name=name, dtype=dtype, shape=shape)
        for name, (dtype, shape) in engine.get_model_metadata().items()
    )
    return session.update_weights(
        engine,
        _OwnFiles(engine, path, load_timeout),
        Weights(
            specs=specs, read=lambda: iter(()), device=torch.device("cpu"), stable=True
        ),
        version=version,
        pause_mode="retract" if pause_mode == "none" else pause_mode,
        whole=False,
        held=held,
        checkpoint=True,
    )


def checkpoint_path(engine: RLSGLangEngine) -> str:
    """Returns what the servers were started with, as they see it.

    Raises:
        UnsupportedByServerError: if that was no checkpoint.
    """
    capabilities = engine.capabilities
    if capabilities.server_args.get("load_format") == "dummy":
        raise UnsupportedByServerError(
            "The servers were started with load_format='dummy', so there is no "
            "checkpoint to go back to; send them weights instead."
        )
    # A server that has loaded other files reports those as its model's path.
    return str(capabilities.server_args.get("model_path") or capabilities.model_path)


class _OwnFiles:
    """A transport that carries nothing: every server has the weights already."""

    name: ClassVar[str] = "checkpoint"
    in_session: ClassVar[bool] = False

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
        try:
            run_sync(
                control.update_weights_from_disk(
                    self._path, weight_version=version, timeout=self._timeout
                )
            )
        except ServerError as error:
            # What they held before is what nobody trusts: it counts as touched.
            raise WeightTransferError(
                f"The checkpoint {self._path!r} could not be loaded: {error}"
            ) from error
        return 1

    def close(self) -> None:
        """Does nothing."""
