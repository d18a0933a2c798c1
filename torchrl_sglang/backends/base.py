"""The contract between the engine and those who use it: policies and weight updates.

:class:`RLSGLangEngine` is the only thing of this room that the others know. Its one
implementation is :class:`~torchrl_sglang.AsyncSGLang`; a test or an application can
bring another.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchrl_sglang.backends.addresses import is_this_machine
from torchrl_sglang.backends.control_plane import ControlPlane
from torchrl_sglang.types import (
    Adapter,
    Completion,
    FusedParameter,
    ModelMetadata,
    ServerCapabilities,
    ServerPlacement,
)

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
    @abc.abstractmethod
    def asleep(self) -> frozenset[str]:
        """What of the servers' memory is released; empty while they are awake."""

    @property
    def model_path(self) -> str:
        """Folder or hub name of the model that the servers were started with."""
        return self.capabilities.model_path

    @property
    def placements(self) -> tuple[ServerPlacement, ...]:
        """Where the servers run, in the order of their ranks."""
        device = self.capabilities.server_args.get("device")
        nodes = int(self.capabilities.server_args.get("nnodes") or 1)
        return tuple(
            ServerPlacement(
                url=url,
                local=nodes == 1 and is_this_machine(url),
                device=device if isinstance(device, str) else None,
            )
            for url in self.control.urls
        )

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
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Continues a batch of prompts; see :meth:`AsyncSGLang.generate`."""

    @property
    @abc.abstractmethod
    def adapters(self) -> dict[str, Adapter]:
        """Name -> LoRA adapter, of those that the servers hold."""

    @property
    @abc.abstractmethod
    def default_adapter(self) -> str | None:
        """Name of the LoRA adapter of requests that select none."""

    @default_adapter.setter
    @abc.abstractmethod
    def default_adapter(self, name: str | None) -> None: ...

    @abc.abstractmethod
    def load_adapter(
        self,
        name: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
        pinned: bool = False,
        version: str | None = None,
        default: bool = False,
        timeout: float | None = None,
    ) -> Adapter:
        """Loads or replaces an adapter; see :meth:`AsyncSGLang.load_adapter`."""

    @abc.abstractmethod
    def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Drops a LoRA adapter; see :meth:`AsyncSGLang.unload_adapter`."""

    @abc.abstractmethod
    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the served model."""

    @abc.abstractmethod
    def get_model_metadata(self) -> ModelMetadata:
        """Returns the name, type and shape of every parameter of the served model."""

    def get_fused_parameters(self) -> dict[str, FusedParameter]:
        """Returns the parameters that a module holds otherwise than checkpoints do."""
        return {}

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
            WeightSyncStateError: if an update is under way, or weights are asleep.
        """

    @abc.abstractmethod
    def sleep(
        self,
        tags: str | Iterable[str] = ("weights", "kv_cache"),
        *,
        abort_first: bool = False,
        drain_timeout: float = 60.0,
    ) -> None:
        """Has every server give GPU memory back; see :meth:`AsyncSGLang.sleep`."""

    @abc.abstractmethod
    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Has them take it again; see :meth:`AsyncSGLang.wake_up`."""

    @abc.abstractmethod
    def revive(self, *, timeout: float = 600.0) -> None:
        """Gets servers back that do not answer; see :meth:`AsyncSGLang.revive`."""

    @abc.abstractmethod
    def flush_cache(self) -> bool:
        """Empties the prefix cache; returns False if the server is too busy for it."""

    @abc.abstractmethod
    def health(self) -> bool:
        """Returns whether every server answers."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends what this engine owns."""

    @property
    @abc.abstractmethod
    def newest_version(self) -> str:
        """Newest version that weights or an adapter of these servers have had."""

    @property
    @abc.abstractmethod
    def base_problem(self) -> str | None:
        """Why an adapter over what the servers hold may not make a policy.

        ``None`` if they hold the checkpoint that they were started with.
        """

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
    def committed(self, version: str, *, checkpoint: bool = False) -> None:
        """The servers hold these weights, whole.

        Args:
            version: of the weights.
            checkpoint: they are those that the servers were started with.
        """

    @abc.abstractmethod
    def in_doubt(self, reason: str) -> None:
        """The servers may hold a mix of old and new weights: refuse to generate."""

    @abc.abstractmethod
    def interrupts(self) -> None:
        """What is under way will be aborted: send it again, and raise no error."""

    @abc.abstractmethod
    def keeps_state(self) -> None:
        """What is under way will go on with attention state of the old weights."""

    @abc.abstractmethod
    def untouched(self) -> None:
        """The servers hold what they held before; so does the engine's opinion."""
