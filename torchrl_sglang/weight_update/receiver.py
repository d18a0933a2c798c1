"""The receiving side of TorchRL's contract: SGLang receives by itself."""

from __future__ import annotations

from typing import Any

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.types import ModelMetadata

__all__ = ["SGLangWeightReceiver"]


class SGLangWeightReceiver:
    """Answers questions about the servers that receive weights.

    Nothing runs here: servers receive when the sender asks them to, over HTTP.

    Examples:
        >>> receiver = SGLangWeightSyncScheme(engine).create_receiver()
        >>> receiver.weight_versions() == [engine.weight_version]
        True
    """

    def __init__(self, engine: RLSGLangEngine) -> None:
        self._engine = engine

    def weight_versions(self) -> list[str]:
        """Returns the weight version that each server reports."""
        return run_sync(self._engine.control.weight_versions())

    def init_all_workers_group(self, model_metadata: ModelMetadata) -> None:
        """Does nothing: servers join when the sender asks them to."""

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Returns False: weights are pushed, and loaded as they come."""
        return False

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Raises :class:`UnsupportedByServerError`: only a sender sends weights."""
        raise UnsupportedByServerError(
            "Weights cannot be applied to an SGLang server from here; send them with "
            "SGLangWeightSender.update_weights(weights)."
        )
