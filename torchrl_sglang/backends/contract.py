"""The engine's contract for the layers above.

:class:`~torchrl_sglang.AsyncSGLang` implements it; a test or an application can bring
another engine, and Python reports its missing methods.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.fleet.weights_state import WeightUpdate
from torchrl_sglang.requests.request import GenerateRequest, to_batch
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.types import (
    Adapter,
    Completion,
    FusedParameter,
    LogProbsMode,
    ModelMetadata,
    ServerCapabilities,
    ServerPlacement,
)


class RLSGLangEngine(abc.ABC):
    """An SGLang engine for reinforcement learning: generation and weight updates.

    Every blocking method has a timeout, and every error is one of this package.

    Examples:
        >>> isinstance(engine, RLSGLangEngine), engine.num_replicas
        (True, 1)
        >>> engine.adapters, engine.get_fused_parameters(), sorted(engine.asleep)
        ({}, {}, [])
    """

    capabilities: ServerCapabilities
    """Common capabilities of all servers."""

    control: ControlPlane
    """Control calls to every server, to be awaited on the background loop."""

    # Generation.

    @property
    @abc.abstractmethod
    def weight_version(self) -> str:
        """Version of the weights, or of a default adapter from an update."""

    @abc.abstractmethod
    def get_tokenizer(self, name: str | None = None) -> Any:
        """Returns the tokenizer of the served model, loaded at the first call.

        Args:
            name: folder or hub name of another tokenizer, loaded with the engine's
                ``trust_remote_code``.

        Raises:
            ConfigurationError: if it cannot be read on this machine.
        """

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
        return_partial: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int | None] | None = None,
        logprobs_mode: LogProbsMode = "model",
        token_columns: Sequence[str | TokenColumn] = (),
        **sampling: Any,
    ) -> list[Completion]:
        """Continues a batch of prompts and returns the responses in the same order.

        Args:
            prompts: a text or several; they are tokenized here.
            sampling_params: a common mapping or a mapping for each prompt, under
                SGLang's names or TorchRL's (``max_tokens``, ``stop_sequences``,
                ``seed``). ``max_new_tokens`` is limited by the remaining context; 0
                scores the prompt.
            input_ids: token ids of a prompt or of several, instead of ``prompts``.
            return_logprobs: return the log-prob of each response token. Like the next
                two, for all prompts or for each.
            return_prompt_logprobs: return the model's log-prob of each prompt token.
            top_logprobs: return this many top-k tokens at the position of each response
                token, with their log-probs.
            request_ids: a name for each prompt, for :meth:`.AsyncSGLang.abort`. Several
                prompts can share a name.
            session_ids: requests of a session go to the same server, with their cached
            prefix; a common id or an id for each.
            timeout: timeout of the batch, in seconds. Defaults to 1800.
            request_timeout: timeout of each request from its dispatch, in seconds. A
            timed-out request is an error of its item.
            return_exceptions: return the error of an item in its place instead of
                raising the first error. A raised error aborts the other in-flight
                requests and carries the finished responses as ``completions``.
            return_partial: return the tokens of an aborted request, with
                ``finish_reason`` ``"abort"``, instead of its error.
            adapter: name of the LoRA adapter, in common or for each; ``""`` for the
                base model. Defaults to :attr:`default_adapter`.
            priority: a server starts waiting requests by descending priority; in common
                or for each. It needs servers with ``enable_priority_scheduling=True``.
                SGLang interrupts running requests for much greater priorities, unless
                ``disable_priority_preemption=True``.
            logprobs_mode: kind of the log-probs of response tokens and top-k tokens.
                ``"model"``: the model's own, ``log_softmax(logits)``, independent of
                the sampling parameters, as the trained model and vLLM compute them. If
                the server returns others (penalties, ``logit_bias``, ``min_new_tokens``
                and grammars change the logits before), the finished response is scored
                by the same weights: tokens of weights replaced in the meantime get NaN,
                and a response with only such tokens is generated again. ``"sampling"``:
                the sampling distribution's, as SGLang reports
                it: after temperature, penalties, biases and grammar, and before top-p,
                top-k and min-p. ``"behaviour"``: the actual sampling distribution's,
                renormalized over the tokens left by top-p, top-k and min-p. These are
                in the column ``"sampling_support"``, empty if all were left, and the
                temperature in ``"sampling_temperature"``. It needs SGLang 0.5.20 and a
                finite ``top_k``; without top-p, top-k and min-p it is ``"sampling"``.
            token_columns: further per-token quantities of the servers: names of
                :class:`.TokenColumn`, or rows. They are in the completions'
                ``columns``.
            **sampling: further sampling parameters, for all prompts.

        Returns:
            A completion for each prompt.

        Raises:
            ConfigurationError: if a prompt or a parameter is wrong. Nothing was sent.
            RequestRefusedError: if a server refused an item, see ``index``.
            GenerationAbortedError: if an abort cut a response off.
            ServerUnavailableError: if no server can be reached, after retries.
            ServerDiedError: if every server of this engine has ended.
            ServerTimeoutError: after a timeout.
            UnsupportedByServerError: for a seed, a grammar, log-probs or token columns
            without the servers' support.
            WeightSyncStateError: if a failed update left the weights inconsistent.
        """
        batch = to_batch(
            prompts,
            sampling_params,
            self.get_tokenizer,
            input_ids=input_ids,
            return_logprobs=return_logprobs,
            return_prompt_logprobs=return_prompt_logprobs,
            top_logprobs=top_logprobs,
            request_ids=request_ids,
            session_ids=session_ids,
            adapter=adapter,
            priority=priority,
            logprobs_mode=logprobs_mode,
            token_columns=token_columns,
            **sampling,
        )
        return self.generate_requests(
            batch.requests,
            timeout=timeout,
            request_timeout=request_timeout,
            return_exceptions=return_exceptions,
            return_partial=return_partial,
        )

    @abc.abstractmethod
    def generate_requests(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout: float | None = None,
        request_timeout: float | None = None,
        return_exceptions: bool = False,
        return_partial: bool = False,
    ) -> list[Completion]:
        """Generates like :meth:`generate`, for prepared requests."""

    @abc.abstractmethod
    async def agenerate_requests(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout: float | None = None,
        request_timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """Awaitable :meth:`generate_requests`, for any event loop."""

    @abc.abstractmethod
    def flush_cache(self) -> bool:
        """Empties the prefix cache; returns False if a server is busy for a second."""

    # LoRA adapters.

    @property
    @abc.abstractmethod
    def adapters(self) -> dict[str, Adapter]:
        """Name -> LoRA adapter for requests."""

    @property
    @abc.abstractmethod
    def default_adapter(self) -> str | None:
        """Name of the LoRA adapter of requests by default; ``None``: no adapter.

        Weight updates with an adapter set it, here and in every copy of the engine and
        other engine of these servers.

        Raises:
            ConfigurationError: when it is set to an unloaded adapter.
            UnsupportedByServerError: when it is set, and the servers have no LoRA.
        """

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
        """Loads a LoRA adapter into every server, or replaces the adapter of this name.

        Later requests use the new adapter; in-flight requests end with the old adapter,
        which is dropped after them. Generation is not paused.

        Args:
            name: name of the adapter in requests.
            path: folder in PEFT's format. A folder on another machine, or a hub name,
            is read by the servers.
            tensors: its tensors instead, as ``peft.get_peft_model_state_dict`` returns
                them, on any device.
            config: content of PEFT's ``adapter_config.json``, with ``tensors``.
            pinned: keep it in the batch memory; the servers leave a place for others.
            version: weight version of its completions.
            default: use it for requests without ``adapter``, of every engine object of
                these servers, until whole weights replace it.
            timeout: in seconds. Defaults to 120.

        Raises:
            ConfigurationError: if it is incomplete, if servers refuse it (its rank, its
                modules), or if they have no space for it.
            WeightMismatchError: if its tensors do not fit the served model.
            UnsupportedByServerError: if the servers were started without LoRA.
            ServerTimeoutError: after the timeout. After any error, requests use the
                same adapter as before.
        """

    @abc.abstractmethod
    def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Drops a LoRA adapter from every server, after its requests.

        Args:
            name: name of the adapter.
            timeout: timeout for its requests, in seconds. Defaults to 60.

        Raises:
            ConfigurationError: if there is no adapter of this name.
            ServerTimeoutError: after the timeout; no new request uses the adapter, and
                it is dropped after its last request.
        """

    @abc.abstractmethod
    def published_adapters(self, *, timeout: float) -> frozenset[str]:
        """Queries the served names of default adapters.

        They come from weight updates, or :meth:`load_adapter` with ``default=True``.
        """

    @abc.abstractmethod
    def withdraw_adapters(self, *, timeout: float) -> None:
        """Drops the published adapters, before an update of whole weights.

        Generation must be paused, or idle: requests with such an adapter are aborted.
        """

    # Weight updates.

    @property
    @abc.abstractmethod
    def server_url(self) -> str:
        """Address for generation requests."""

    @property
    @abc.abstractmethod
    def model_path(self) -> str:
        """Folder or hub name of the served model, readable on this machine."""

    @property
    @abc.abstractmethod
    def placements(self) -> tuple[ServerPlacement, ...]:
        """Placements of the running servers, in the order of their ranks."""

    @property
    @abc.abstractmethod
    def newest_version(self) -> str:
        """Newest version of weights or an adapter of these servers so far."""

    @property
    @abc.abstractmethod
    def base_problem(self) -> str | None:
        """Reason why an adapter on the servers' weights may not make a policy.

        ``None`` if they hold the checkpoint of their start.
        """

    @property
    @abc.abstractmethod
    def asleep(self) -> frozenset[str]:
        """Tags of the servers' released memory; empty while they are awake."""

    @abc.abstractmethod
    def get_model_metadata(self) -> ModelMetadata:
        """Returns (dtype, shape) of every parameter, under Hugging Face's names.

        Tied weights appear once. The server's weight loader uses these names, and
        serves the weights in this dtype.
        """

    @abc.abstractmethod
    def get_fused_parameters(self) -> dict[str, FusedParameter]:
        """Returns the parameters fused in a module but not in a checkpoint.

        The names of :meth:`get_model_metadata` are a checkpoint's.
        """

    @abc.abstractmethod
    def get_master_address(self) -> str:
        """Returns this machine's address for the servers' rendezvous with a sender.

        It is loopback where every server is reached by loopback, and otherwise this
        machine's address as they see it.
        """

    @abc.abstractmethod
    def get_master_port(self) -> int:
        """Returns a free port for the rendezvous; a new port at every call."""

    @property
    @abc.abstractmethod
    def restarting(self) -> Sequence[str]:
        """Ended servers, being restarted."""

    @property
    @abc.abstractmethod
    def awaits_weights(self) -> bool:
        """Whether no server serves before a weight update; makes no request."""

    @abc.abstractmethod
    def look_at_servers(self) -> None:
        """Polls the servers' state, and the weights from other engine objects.

        The engine polls by itself after a failed request, and before a weight update.
        """

    @abc.abstractmethod
    def weight_update(self) -> AbstractContextManager[WeightUpdate]:
        """Reserves the engine for a weight update; concurrent updates are refused.

        Raises:
            WeightSyncStateError: if an update is in progress, or weights are asleep.
            UnsupportedByServerError: if servers would continue from stored prefixes of
                the old weights (``hicache_storage_backend`` before SGLang 0.5.20).
        """

    def new_servers(self) -> AbstractContextManager[RLSGLangEngine | None]:
        """Reserves the servers waiting for weights already served by others.

        It excludes weight updates and other calls of this method. After the block, the
        servers are polled.

        Returns:
            A context manager, which yields an engine of only these servers, or ``None``
            if there are none, or none serves.

        Raises:
            WeightSyncStateError: if an update is in progress.
        """
        return nullcontext(None)

    @abc.abstractmethod
    def interrupt_requests(self, *, timeout: float, keep: bool = True) -> None:
        """Aborts in-flight requests that would not continue exactly with new weights.

        A part of weight updates, which have announced it: this engine object sends
        their remaining parts after the update. Requests of other users end with their
        tokens so far.

        Args:
            timeout: in seconds; requests still in flight are then left alone.
            keep: leave requests with an exact continuation alone; False: abort them,
                too, so that nothing of this engine runs before it sends requests again.
        """

    @abc.abstractmethod
    def revive(self, *, timeout: float = 600.0) -> None:
        """Restarts unresponsive servers, and waits for all pending starts.

        A restarted server holds the checkpoint's weights, and waits for a weight update
        if the others hold newer weights.

        Args:
            timeout: timeout of the restarts, in seconds.

        Raises:
            ServerTimeoutError: if a server of another owner does not respond, or after
                the timeout.
            ServerUnavailableError: if such a server cannot be reached.
            ServerDiedError: if every server has been restarted too often.
        """

    # Sleep and end.

    @abc.abstractmethod
    def sleep(
        self,
        tags: str | Iterable[str] = ("weights", "kv_cache"),
        *,
        abort_first: bool = False,
        drain_timeout: float = 60.0,
    ) -> None:
        """Releases GPU memory of every server, for a trainer on the same GPU.

        The servers must have been started with ``enable_memory_saver=True``. From the
        call on, new requests are refused with :class:`.WeightSyncStateError`; the call
        waits for running requests of all users. A later request of another user waits
        in the server until :meth:`wake_up`.

        The order of a training step on a shared GPU::

            engine.sleep()
            ...  # Train.
            engine.wake_up("weights")
            sender.update_weights(model)
            engine.wake_up("kv_cache")

        Released weights are lost, unless the servers were started with
        ``enable_weights_cpu_backup=True``: the engine refuses to generate from
        :meth:`wake_up` to the next weight update. Use a single engine object for sleep
        and wake-up; other objects, and earlier copies, do not notice it. A server ended
        during sleep is restarted after :meth:`wake_up`.

        Args:
            tags: ``"weights"``, ``"kv_cache"`` and ``"cuda_graph"`` (effective with
                ``SGLANG_MEMORY_SAVER_CUDA_GRAPH=1`` in the servers' environment).
                Memory already asleep stays asleep.
            abort_first: abort running requests, of all users, instead of waiting.
            drain_timeout: timeout for running requests, in seconds.

        Raises:
            ConfigurationError: if a tag or the timeout is wrong.
            UnsupportedByServerError: if the servers cannot release memory.
            ServerTimeoutError: if requests still run after the timeout. Nothing was
                released, and generation continues.
            WeightSyncStateError: if a weight update is in progress.
            ServerError: if a server failed; the message names it. The engine stays
                asleep: a second call completes it, and :meth:`wake_up` undoes it.
        """

    @abc.abstractmethod
    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Makes the servers allocate the memory released by :meth:`sleep`.

        When all of it is back, and the weights are not lost, generation continues.

        Args:
            tags: as for :meth:`sleep`; by default all released memory. Awake memory
            stays awake.

        Raises:
            ConfigurationError: if a tag is unknown.
            WeightSyncStateError: if a weight update is in progress.
            ServerError: if a server failed, such as when another process still has the
                memory; the message names it. A second call completes it.
        """

    @abc.abstractmethod
    def health(self) -> bool:
        """Returns whether every server responds."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends the servers of this engine, and closes the connections."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence on each server now out of service, at most the first few.

        It reflects this engine object's state, without queries.
        """
        return ()

    @property
    def num_replicas(self) -> int:
        """Number of servers."""
        return len(self.control.urls)

    def get_tp_size(self) -> int:
        """Returns the tensor-parallel size of each server."""
        return self.capabilities.tp_size

    def get_dp_size(self) -> int:
        """Returns the number of generating model copies: replicas times dp_size."""
        return self.capabilities.dp_size * self.num_replicas

    def get_world_size(self) -> int:
        """Returns the number of ranks receiving weights, over all servers."""
        return self.capabilities.tp_size * self.capabilities.pp_size * self.num_replicas
