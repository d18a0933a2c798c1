"""SGLangWeightSyncScheme: TorchRL's contract for weight synchronisation."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, Literal

import torch.distributed as dist
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    ConfigurationError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.support.checks import check_choice, check_flag, given_once
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.urls import (
    normalize_url,
    split_credentials,
)
from torchrl_sglang.types import ModelMetadata
from torchrl_sglang.weight_update.options import (
    SchemeOptions,
)
from torchrl_sglang.weight_update.sender import SGLangWeightSender
from torchrl_sglang.weight_update.transports.process_group import prepare_nccl


class SGLangWeightSyncScheme(WeightSyncScheme):
    """Sends a trained model's weights to the servers of an engine.

    Used by itself, through :meth:`create_sender`, or with a collector::

        scheme = SGLangWeightSyncScheme(engine, model)
        collector = AsyncLLMCollector(..., weight_sync_schemes={"policy": scheme})
        collector.update_policy_weights_()   # sends, and counts one policy version

    Args:
        engine (RLSGLangEngine or str, optional): the engine, or the URL of a server, or
            given later to :meth:`SGLangWeightSender.init_all_workers_group`.
        model (optional): what is sent when no weights are given, the model that is
            trained; :meth:`SGLangWeightSender.register_model` takes it later. A text is
            ``master_address``, which TorchRL's schemes have in this place.
        master_port (int, optional): port at which servers meet the sender; an option of
            ``"broadcast"``, as is ``master_address``. Defaults to a free one.
        num_gpus (int, optional): GPUs of all servers together, as TorchRL's recipes
            count them; only checked.

    Keyword Args:
        master_address (str, optional): defaults to the address of this machine that
            the servers can reach.
        strategy (str): ``"tensordict"`` (default) or ``"state_dict"``; kept for
            TorchRL, and both are sent the same way.
        transport (str): how weights are sent. ``"broadcast"`` sends them over a process
            group of NCCL or gloo; ``"cuda_ipc"`` has servers on the GPU of the weights
            open their memory; ``"disk"`` writes checkpoints that servers on the same
            file system load; ``"delta"`` sends the elements that changed in plain HTTP
            requests, to servers that were started with
            ``custom_weight_loader="torchrl_sglang_delta.load"``; ``"lora"`` publishes
            the adapter of a PEFT model, or of a folder that PEFT has saved it in, and
            pauses nothing: requests in flight end with the adapter that they began
            with. ``"auto"`` (default) takes
            ``"lora"`` for a model that trains only an adapter that the servers take,
            ``"disk"`` if a ``directory`` is given, ``"cuda_ipc"`` if this engine
            started the servers on the GPU of the weights, and ``"broadcast"``
            otherwise; the report says why.
        device (torch.device or int, optional): where buckets are put together; a
            number is a GPU's. CUDA sends with NCCL, CPU with gloo. Defaults to the
            device of the weights.
        bucket_bytes (int): size of a transfer, in bytes, which servers need beside
            their weights meanwhile. Defaults to 2 GiB.
        pause_mode (str, optional): what happens to requests in flight during an update.
            With ``"continue"`` (default; ``"retract"`` to SGLang) they keep their
            tokens and go on with the new weights, which compute their prefix again.
            Where servers cannot do so, as older ones cannot, the engine that updates
            aborts its own and sends what remains; others' requests raise
            :class:`.GenerationAbortedError`. ``"abort"`` ends them with that error.
            ``"in_place"`` continues them on the stale KV cache of the old weights,
            which ``mixed_state`` of :class:`~torchrl_sglang.GenerationInfo` marks.
            ``"none"`` pauses nothing, and the update is refused if a request runs.
        flush_cache (bool): empty the servers' prefix caches for clients whose requests
            do not carry the weight version as a cache key, as this package's do. It
            takes milliseconds on GPUs, and up to half a second on CPU.
            ``pause_mode="continue"`` always flushes. Defaults to True.
        send_timeout (float): timeout of one bucket, in seconds; with ``"disk"``, of
            loading everything. Defaults to 300.
        control_timeout (float): timeout of each call that moves no weights, such as
            pausing and resuming, in seconds. Defaults to 60.
        restart_timeout (float): how long an update waits for servers that this engine
            starts again, in seconds; one that ends during an update is waited for, and
            the update tried again. 0 waits for none: the update raises its error.
            Defaults to 600.
        wait_for (str): what it waits for before it sends: ``"any"`` (default) server,
            or ``"all"``. With ``"any"``, a server that comes back later generates again
            after the next update.
        verify (bool): compare servers and trainer after every update: a few values,
            where a server tells them, must be equal, and its log-probs of a few prompts
            must equal the log-probs of the sent model, if it can be called. Defaults to
            False.
        encoding (str or WeightEncoding): what is sent of each tensor: ``"identity"``,
            the tensor itself; ``"fp8"``, FP8 values and scales of linear layers
            (:class:`.BlockFP8`); or what an encoding of your own makes of it.
            ``"auto"`` (default) is ``"fp8"`` for servers that were started with
            ``rollout_dtype="fp8"``, and ``"identity"`` otherwise.
        draft (str): what happens to the draft model of servers with speculative
            decoding. ``"auto"`` (default) updates one that is part of the served
            checkpoint (MTP), and leaves one with a checkpoint of its own; ``"keep"``
            leaves both; ``"update"`` sends the same weights to the draft, too, which
            has to know their names, as a copy of the model does. A draft decides how
            fast tokens come, and not which ones.
        process_group (ProcessGroup, optional): the ranks that make the weights
            together, where these do not tell, as DTensors do: ranks of an exporter with
            collectives of its own. All call the sender; the first one sends.
        weight_loader (str): how servers load what ``"broadcast"`` and ``"cuda_ipc"``
            send: ``"traced"``, by copies that were traced once, for servers that were
            started with ``weight_loader="traced"``; ``"sglang"``, by the model's own
            loader. ``"auto"`` (default) is ``"traced"`` for such servers, unless they
            have a draft model.
        flush_cache_on_update (bool, optional): ``flush_cache``, under the name of
            TorchRL's scheme for SGLang.
        server_url (str, optional): URL of the engine, likewise.
        gpus_per_replica (int, optional): GPUs of one server; only checked.
        num_replicas (int, optional): number of servers; only checked.
        **options: of single transports: see :class:`.BroadcastOptions`,
            :class:`.DiskOptions` and :class:`.LoraOptions`.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> scheme = SGLangWeightSyncScheme(engine, model)
        >>> report = scheme.create_sender().update_weights()
        >>> report.num_tensors == len(get_model_metadata(model))
        True
        >>> scheme.shutdown()
    """

    def __init__(
        self,
        engine: RLSGLangEngine | str | None = None,
        model: Any = None,
        master_port: int | None = None,
        num_gpus: int | None = None,
        *,
        master_address: str | None = None,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        flush_cache_on_update: bool | None = None,
        server_url: str | None = None,
        gpus_per_replica: int | None = None,
        num_replicas: int | None = None,
        **options: Any,
    ) -> None:
        check_choice("strategy", strategy, ("tensordict", "state_dict"))
        if engine is not None and server_url is not None:
            raise ConfigurationError(
                f"Give the engine once: engine={engine!r}, "
                f"server_url={hide_passwords(server_url)!r}."
            )
        if isinstance(model, str):
            # Where TorchRL's schemes have it.
            master_address = given_once(
                "master_address", master_address, "the second argument", model
            )
            model = None
        self._model = model
        # TorchRL warns of the other one, which makes no difference here.
        super().__init__("tensordict")
        if flush_cache_on_update is not None:
            flag = check_flag("flush_cache_on_update", flush_cache_on_update)
            options["flush_cache"] = flag
        options |= {"master_address": master_address, "master_port": master_port}
        self.options = SchemeOptions.from_arguments(options)
        self._expected = {
            "num_gpus": num_gpus,
            "gpus_per_replica": gpus_per_replica,
            "num_replicas": num_replicas,
        }
        # Attributes of TorchRL's scheme.
        self.strategy_name = strategy
        self.master_address, self.master_port = master_address, master_port
        self.pause_mode = self.options.pause_mode
        self.flush_cache = self.options.flush_cache
        self.flush_cache_on_update = flush_cache_on_update
        self._sender: SGLangWeightSender | None = None
        self._engine: RLSGLangEngine | None = None
        # Connected to when it is needed: a recipe that gives an address brings the
        # engine itself later.
        url = engine if isinstance(engine, str) else server_url
        self._url = None if url is None else normalize_url(url)
        if engine is not None and not isinstance(engine, str):
            self.use_engine(engine)
        elif dist.is_initialized() and dist.get_rank() > 0:
            # The first rank has the engine.
            prepare_nccl(None)

    @property
    def server_url(self) -> str | None:
        """Address of the servers or of the engine; makes no request."""
        if self._engine is not None:
            return self._engine.server_url
        return None if self._url is None else split_credentials(self._url)[0]

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs of all servers together; ``None`` if it is not known yet."""
        if self._engine is None:
            return self._expected["num_gpus"]
        return self._engine.get_tp_size() * self._engine.get_dp_size()

    @property
    def world_size(self) -> int | None:
        """Number of ranks of a broadcast, the sender's included."""
        if self._engine is not None:
            return 1 + self._engine.get_world_size()
        return None if self.num_gpus is None else 1 + self.num_gpus

    @property
    def engine(self) -> RLSGLangEngine:
        """The engine that weights are sent to, connected to now if a URL was given.

        Raises:
            WeightSyncStateError: if none was given yet.
        """
        if self._engine is None and self._url is not None:
            self.use_engine(AsyncSGLang.connect(self._url))
        if self._engine is None:
            raise WeightSyncStateError(
                "The scheme has no engine: give one to SGLangWeightSyncScheme(engine), "
                "or to sender.init_all_workers_group(metadata, vllm_engine=engine)."
            )
        return self._engine

    @property
    def owns_servers(self) -> bool:
        """Whether this process started the servers; makes no request."""
        return bool(getattr(self._engine, "servers", ()))

    def use_engine(self, engine: RLSGLangEngine) -> None:
        """Takes the engine that weights are sent to, if there is none yet.

        Raises:
            ConfigurationError: if it is not the one that the scheme was made for.
        """
        url = self.server_url
        if not isinstance(engine, RLSGLangEngine):
            raise ConfigurationError(
                f"engine must be an RLSGLangEngine or the address of a server, got "
                f"{engine!r}; give the policy's engine."
            )
        if url not in (None, engine.server_url):
            raise ConfigurationError(
                f"The scheme was made for {self._engine or url}, and the engine is "
                f"{engine!r}; give the same engine, or leave it out."
            )
        actual = {
            # TorchRL's recipes count GPUs in this way.
            "num_gpus": engine.get_tp_size() * engine.get_dp_size(),
            "gpus_per_replica": engine.get_tp_size() * engine.capabilities.pp_size,
            "num_replicas": engine.num_replicas,
        }
        for name, value in self._expected.items():
            if value not in (None, actual[name]):
                raise ConfigurationError(
                    f"{name}={value!r} was given, and {engine!r} has {actual[name]}; "
                    f"leave it out, the engine knows."
                )
        if self._engine is None:
            self._engine = engine
            prepare_nccl(engine.capabilities.args)

    def create_sender(self) -> SGLangWeightSender:
        """Returns the scheme's sender; the same one every time."""
        if self._sender is None:
            self._sender = SGLangWeightSender(self)
            if self._model is not None:
                self._sender.register_model(self._model)
        return self._sender

    def create_receiver(
        self,
        engine: RLSGLangEngine | None = None,
        *,
        vllm_engine: RLSGLangEngine | None = None,
    ) -> SGLangWeightReceiver:
        """Returns the receiving side of the servers.

        Args:
            engine: by default the scheme's.
            vllm_engine: the engine, under the name that TorchRL's schemes use.

        Raises:
            ConfigurationError: if both are given, and are not the same.
        """
        if engine is not None and vllm_engine not in (None, engine):
            raise ConfigurationError(
                f"engine={engine!r} and vllm_engine={vllm_engine!r} are two names of "
                f"one argument; give one of them."
            )
        return SGLangWeightReceiver(engine or vllm_engine or self.engine)

    def create_transport(self, **kwargs: Any) -> Any:
        """Returns the transport that TorchRL gives prepared weights to."""
        return SimpleNamespace(
            send_weights=self.create_sender().send,
            # The sender connects when it sends.
            setup_connection_and_weights_on_sender=lambda: None,
        )

    def prepare_weights(
        self,
        weights: Any,
        model_id: str,
        strategy: WeightStrategy,
        context: Any = None,
    ) -> Any:
        """Returns the weights to send: those given, or the registered model.

        Never the collector's own policy, an inference wrapper without parameters.
        """
        return self.create_sender().resolve(weights)

    def _init_on_sender_impl(
        self, *, model_id: str, context: Any = None, **kwargs: Any
    ) -> None:
        self.model_id = model_id
        self.context = context
        self._register_worker_sender(worker_idx=0)

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, **kwargs: Any
    ) -> None:
        raise UnsupportedByServerError(
            "SGLang servers receive by themselves; initialise this scheme on the "
            "sender, and call create_receiver() to ask about the servers."
        )

    def shutdown(self) -> None:
        """Disconnects from the servers. Safe to call twice."""
        sender = getattr(self, "_sender", None)
        if sender is not None:
            sender.shutdown()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        # The sender holds the model and a process group of this process.
        state: dict[str, Any] = super().__getstate__()
        state["_sender"] = state["_model"] = None
        state["_sender_transports"] = None
        state["options"] = dataclasses.replace(self.options, process_group=None)
        return state


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
        """Raises :class:`.UnsupportedByServerError`: only a sender sends weights."""
        raise UnsupportedByServerError(
            "Weights cannot be applied to an SGLang server from here; send them with "
            "SGLangWeightSender.update_weights(weights)."
        )
