"""The contract between the engine and those who use it: policies and weight updates.

:class:`RLSGLangEngine` is the only thing of this room that the others know. Its one
implementation is :class:`~torchrl_sglang.AsyncSGLang`; a test or an application can
bring another.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchrl_sglang.backends.control_plane import ControlPlane
from torchrl_sglang.types import Completion, ModelMetadata, ServerCapabilities

__all__ = ["RLSGLangEngine"]


class RLSGLangEngine(abc.ABC):
    """An SGLang engine for reinforcement learning: it generates and takes new weights.

    Every method that waits has a time budget, and none leaves an error of another
    library through.

    Examples:
        >>> isinstance(engine, RLSGLangEngine), engine.num_replicas
        (True, 1)
    """

    @property
    @abc.abstractmethod
    def server_url(self) -> str:
        """Address that generation requests go to."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> ServerCapabilities:
        """What the servers can do."""

    @property
    @abc.abstractmethod
    def control(self) -> ControlPlane:
        """Control calls to every server; to be awaited on the background loop."""

    @property
    @abc.abstractmethod
    def weight_version(self) -> str:
        """Version of the weights that the servers generate with."""

    @property
    def num_replicas(self) -> int:
        """Number of servers."""
        return len(self.control.urls)

    @abc.abstractmethod
    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        return_logprobs: bool | Sequence[bool] = False,
        return_prompt_logprobs: bool | Sequence[bool] = False,
        top_logprobs: int | Sequence[int] = 0,
        request_ids: Sequence[str] | None = None,
        session_ids: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        request_timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """Continues a batch of prompts; see :meth:`AsyncSGLang.generate`."""

    @abc.abstractmethod
    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the served model."""

    @abc.abstractmethod
    def get_model_metadata(self) -> ModelMetadata:
        """Returns the name, type and shape of every parameter of the served model."""

    @abc.abstractmethod
    def get_master_address(self) -> str:
        """Returns the address at which servers meet a sender of weights."""

    @abc.abstractmethod
    def get_master_port(self) -> int:
        """Returns a free port for that meeting; a new one at every call."""

    @abc.abstractmethod
    @contextmanager
    def weight_update(self) -> Iterator[WeightUpdate]:
        """Holds the engine for one weight update; a second one is refused meanwhile.

        Raises:
            WeightSyncStateError: if an update is under way.
        """

    @abc.abstractmethod
    def flush_cache(self) -> bool:
        """Empties the prefix cache; returns False if the server is too busy for it."""

    @abc.abstractmethod
    def health(self) -> bool:
        """Returns whether every server answers."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends what this engine owns."""

    def get_tp_size(self) -> int:
        """Returns the tensor-parallel size of each server."""
        return self.capabilities.tp_size

    def get_dp_size(self) -> int:
        """Returns the number of model copies that generate: replicas times dp_size."""
        return self.capabilities.dp_size * self.num_replicas

    def get_world_size(self) -> int:
        """Returns the number of ranks that receive weights, over all servers."""
        return self.capabilities.tp_size * self.capabilities.pp_size * self.num_replicas


class WeightUpdate(abc.ABC):
    """How a weight update tells the engine what became of it."""

    @property
    @abc.abstractmethod
    def already_in_doubt(self) -> bool:
        """Whether an earlier update left a mix of old and new weights."""

    @abc.abstractmethod
    def committed(self, version: str) -> None:
        """The servers hold these weights, whole."""

    @abc.abstractmethod
    def in_doubt(self, reason: str) -> None:
        """The servers may hold a mix of old and new weights: refuse to generate."""
