"""The contract between the engine and those who use it: policies and weight updates.

:class:`RLSGLangEngine` is the only thing of this room that the others know. Its one
implementation is :class:`~torchrl_sglang.AsyncSGLang`; a test or an application can
bring another.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from torchrl_sglang.backends.client.checkpoint_mark import MARK, write_mark
from torchrl_sglang.backends.client.control import (
    CONTROL_TIMEOUT_SECONDS,
    ControlPlane,
)
from torchrl_sglang.backends.generation.request import (
    GenerateRequest,
    check_logprobs_mode,
)
from torchrl_sglang.backends.generation.resume import (
    join_completions,
    resume_request,
)
from torchrl_sglang.backends.lora.names import check_name, parse_served_name
from torchrl_sglang.backends.lora.payload import read_folder, why_not
from torchrl_sglang.backends.support.checks import (
    check_count,
    check_port,
    check_seconds,
)
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.backends.support.gpus import visible_devices
from torchrl_sglang.backends.support.urls import is_this_machine
from torchrl_sglang.backends.support.versions import next_version
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.types import (
    Adapter,
    Completion,
    FusedParameter,
    LogProbsMode,
    ModelMetadata,
    ServerCapabilities,
    ServerPlacement,
)

__all__ = [
    "CONTROL_TIMEOUT_SECONDS",
    "MARK",
    "ControlPlane",
    "GenerateRequest",
    "RLSGLangEngine",
    "WeightUpdate",
    "check_logprobs_mode",
    "check_name",
    "connect",
    "join_completions",
    "parse_served_name",
    "read_folder",
    "resume_request",
    "start",
    "visible_devices",
    "why_not",
    "write_mark",
]

JOIN_TIMEOUT_SECONDS = 60.0
"""Default budget for servers to join a process group."""

RECEIVE_TIMEOUT_SECONDS = 300.0
"""Default budget for servers to receive one tensor."""

WEIGHT_UPDATE_GROUP = "weight_update_group"
"""SGLang's own name for the process group that weights are broadcast in."""


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
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprobs: bool | Sequence[bool] = False,
        return_prompt_logprobs: bool | Sequence[bool] = False,
        top_logprobs: int | Sequence[int] = 0,
        request_ids: Sequence[str] | None = None,
        session_ids: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        request_timeout: float | None = None,
        return_exceptions: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        logprobs_mode: LogProbsMode = "model",
        **sampling: Any,
    ) -> list[Completion]:
        """Continues a batch of prompts; see :meth:`AsyncSGLang.generate`."""

    @abc.abstractmethod
    def generate_requests(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout: float | None = None,
        request_timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """The same as :meth:`generate`, for requests that are made already."""

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
    def look_at_servers(self) -> None:
        """Finds out which servers answer, and what other engine objects sent them."""

    @abc.abstractmethod
    def published_adapters(self, *, timeout: float) -> frozenset[str]:
        """Returns the LoRA adapters that requests carry unless they select another one.

        Those of every engine object of these servers, as the servers call them.
        """

    @abc.abstractmethod
    def withdraw_adapters(self, *, timeout: float) -> None:
        """Has servers drop these, when whole weights take their place.

        Raises:
            SGLangError: if a server still holds one when the budget is used up.
        """

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

    # The calls below are those of TorchRL's engines for SGLang and vLLM.

    def generate_batch(
        self,
        prompts: Sequence[str],
        sampling_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Completion]:
        """Continues several texts; the same as :meth:`generate` with a list of them."""
        return self.generate(list(prompts), sampling_params, **kwargs)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; vLLM's name for :meth:`flush_cache`."""
        return self.flush_cache()

    def get_num_unfinished_requests(
        self, actor_index: int | None = None
    ) -> int | list[int]:
        """Returns how many requests each server computes or has waiting, of all users.

        Args:
            actor_index: the one of this server only.
        """
        loads = run_sync(self.control.loads())
        return _chosen([running + queued for running, queued in loads], actor_index)

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Returns how much of each server's KV cache is in use, from 0 to 1.

        Args:
            actor_index: the one of this server only.

        Raises:
            UnsupportedByServerError: if a server does not tell.
        """
        return _chosen(run_sync(self.control.cache_usages()), actor_index)

    def init_weight_update_group(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        *,
        timeout: float = JOIN_TIMEOUT_SECONDS,
    ) -> None:
        """Has every server join a process group whose first rank is the caller's.

        For a trainer that runs its own collectives. It opens the store at the address
        and joins meanwhile, in another thread. A
        :class:`~torchrl_sglang.SGLangWeightSyncScheme` does all of this by itself.

        Args:
            master_address: where the servers meet the trainer. Defaults to
                :meth:`get_master_address`.
            master_port: likewise; TorchRL's default makes no sense without a store.
            timeout: budget, in seconds.

        Raises:
            ConfigurationError: if there is no port.
            ServerError: if a server does not join.
        """
        if master_port is None:
            raise ConfigurationError(
                "init_weight_update_group needs the master_port of a store that the "
                "trainer has opened. SGLangWeightSyncScheme(engine).create_sender() "
                "opens its own, and needs nothing."
            )
        run_sync(
            self._join(
                master_address=master_address or self.get_master_address(),
                master_port=check_port("master_port", master_port),
                world_size=1 + self.get_world_size(),
                group_name=WEIGHT_UPDATE_GROUP,
                backend="gloo" if self._on_cpu() else "nccl",
                timeout=check_seconds("timeout", timeout),
            )
        )

    def update_weights_from_distributed(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        timeout: float = RECEIVE_TIMEOUT_SECONDS,
    ) -> str:
        """Has every server receive one tensor that the trainer broadcasts meanwhile.

        It is an update with a weight version of its own, and the engine must be idle.
        :meth:`.SGLangWeightSender.update_weights` sends all tensors as one.

        Args:
            name: of the parameter.
            dtype: its type.
            shape: its shape.
            timeout: budget, in seconds.

        Returns:
            The weight version that the servers report from now on.

        Raises:
            WeightSyncStateError: if a request or another update runs.
            ServerError: if a server did not receive it. Generation is refused until an
                update succeeds.
        """
        timeout = check_seconds("timeout", timeout)
        with self.weight_update() as update:
            current = run_sync(self.control.weight_versions())
            known = [*current, self.weight_version, self.newest_version]
            version = next_version(known)
            # The engine refuses to generate from here on, and nothing may be running.
            update.mark_inconsistent(f"The parameter {name!r} is being received.")
            if any(map(sum, run_sync(self.control.loads()))):
                update.abort()
                raise WeightSyncStateError(
                    f"{name!r} cannot be received while the servers compute requests; "
                    f"wait for them, or write SGLangWeightSyncScheme(engine)"
                    f".create_sender().update_weights(model), which pauses them."
                )
            run_sync(
                self._receive(
                    names=[name],
                    dtypes=[str(dtype).removeprefix("torch.")],
                    shapes=[list(shape)],
                    weight_version=version,
                    timeout=timeout,
                )
            )
            update.commit(version)
        return version

    async def _join(self, *, group_name: str, **where: Any) -> None:
        with suppress(RequestRefusedError):
            # One that a trainer before has left; mostly there is none.
            await self.control.destroy_weights_update_group(group_name)
        await self.control.init_weights_update_group(group_name=group_name, **where)

    async def _receive(self, **what: Any) -> None:
        await self.control.begin_weight_update()
        await self.control.update_weights_from_distributed(
            group_name=WEIGHT_UPDATE_GROUP, load_format=None, **what
        )
        await self.control.end_weight_update()
        await self.control.flush_cache()

    def update_weights(self, weights: Any) -> NoReturn:
        """Raises :class:`UnsupportedByServerError`: a sender sends weights."""
        raise UnsupportedByServerError(
            "An engine does not send weights; write "
            "SGLangWeightSyncScheme(engine).create_sender().update_weights(weights)."
        )

    def _on_cpu(self) -> bool:
        return self.capabilities.server_args.get("device") == "cpu"

    def get_tp_size(self) -> int:
        """Returns the tensor-parallel size of each server."""
        return self.capabilities.tp_size

    def get_dp_size(self) -> int:
        """Returns the number of model copies that generate: replicas times dp_size."""
        return self.capabilities.dp_size * self.num_replicas

    def get_world_size(self) -> int:
        """Returns the number of ranks that receive weights, over all servers."""
        return self.capabilities.tp_size * self.capabilities.pp_size * self.num_replicas


Number = TypeVar("Number", int, float)


def _chosen(numbers: list[Number], actor_index: int | None) -> Number | list[Number]:
    """Returns the number of one server, or of each one."""
    if actor_index is None:
        return numbers
    if check_count("actor_index", actor_index, least=0) >= len(numbers):
        raise ConfigurationError(
            f"actor_index={actor_index} is none of the {len(numbers)} servers; they "
            f"count from 0."
        )
    return numbers[actor_index]


def connect(url: str) -> RLSGLangEngine:
    """Connects to a server that runs already; see :meth:`.AsyncSGLang.connect`."""
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    return AsyncSGLang.connect(url)


def start(model: str | os.PathLike[str]) -> RLSGLangEngine:
    """Starts a server for a model; see :meth:`.AsyncSGLang.from_pretrained`."""
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    return AsyncSGLang.from_pretrained(model)


class WeightUpdate(Protocol):
    """Reports to the engine what a weight update does and how it ended."""

    @property
    def was_inconsistent(self) -> bool:
        """Whether an earlier update left a mix of old and new weights."""

    def commit(self, version: str, *, checkpoint: bool = False) -> None:
        """Every server holds this version; call it before generation resumes.

        Args:
            version: of the weights.
            checkpoint: they are the weights that the servers were started with.
        """

    def abort(self) -> None:
        """The servers hold what they held when the update began."""

    def mark_inconsistent(self, reason: str) -> None:
        """The servers may hold a mix of old and new weights: refuse to generate."""

    def aborts_requests(self) -> None:
        """In-flight requests are about to be aborted: send them again."""

    def keeps_requests(self) -> None:
        """In-flight requests continue with the new weights on a stale KV cache."""

    def flushed(self) -> None:
        """The KV cache of the old weights is gone."""
