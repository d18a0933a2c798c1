"""SGLangWeightSyncScheme: TorchRL's contract for weight synchronisation."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS
from torchrl_sglang.backends.lora.registry import check_name
from torchrl_sglang.backends.support.checks import (
    check_count,
    check_flag,
    check_port,
    check_seconds,
)
from torchrl_sglang.backends.support.urls import (
    hide_passwords,
    normalize_url,
    split_credentials,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.types import PauseMode
from torchrl_sglang.weight_update.receiver import SGLangWeightReceiver
from torchrl_sglang.weight_update.sender import SGLangWeightSender
from torchrl_sglang.weight_update.transports import nccl
from torchrl_sglang.weight_update.transports.base import (
    BUCKET_BYTES,
    SEND_TIMEOUT_SECONDS,
)
from torchrl_sglang.weight_update.transports.broadcast import CONNECT_TIMEOUT_SECONDS
from torchrl_sglang.weight_update.transports.choose import (
    TransportName,
    check_arguments,
)

__all__ = ["SGLangWeightSyncScheme"]

ADAPTER = "policy"
"""Default name of the LoRA adapter that updates publish."""


class SGLangWeightSyncScheme(WeightSyncScheme):
    """Sends a trained model's weights to the servers of an engine.

    Used by itself, through :meth:`create_sender`, or attached to a collector::

        sender = scheme.create_sender()
        sender.register_model(model)
        collector._setup_weight_sync(None, {"policy": scheme})
        collector.update_policy_weights_()   # sends, and counts one policy version

    Args:
        engine (RLSGLangEngine or str, optional): the engine, or the URL of a server. A
            recipe may give it to :meth:`SGLangWeightSender.init_all_workers_group`
            instead.
        master_address (str, optional): where servers meet the sender. It, the next one
            and ``connect_timeout`` are for ``"broadcast"``. Defaults to the address of
            this machine that they can reach.
        master_port (int, optional): defaults to one that is free.
        num_gpus (int, optional): of all servers together, as TorchRL's recipes count
            them; only checked.

    Keyword Args:
        strategy (str): ``"tensordict"`` (default) or ``"state_dict"``; kept for
            TorchRL, and both are sent the same way.
        transport (str): how weights travel. ``"broadcast"`` sends them over a process
            group of NCCL or gloo; ``"cuda_ipc"`` has servers on the GPU of the weights
            open their memory; ``"disk"`` writes checkpoints that servers on the same
            file system load; ``"lora"`` publishes the adapter of a PEFT model, or of a
            folder that PEFT has saved it in, and pauses nothing: requests under way
            end with the adapter that they began with. ``"auto"`` (default) takes
            ``"lora"`` for a model that trains nothing but one that the servers take,
            ``"disk"`` if a ``directory`` is given, ``"cuda_ipc"`` if this engine
            started the servers on the GPU of the weights, and ``"broadcast"``
            otherwise; the report says why.
        directory (str, optional): where ``"disk"`` writes: a folder for this trainer
            alone that every server sees under the same path. The last two checkpoints
            stay there.
        adapter (str): what ``"lora"`` calls the adapter that it publishes. Requests
            that select no adapter carry it. Defaults to ``"policy"``.
        pin_adapter (bool): whether servers keep it among those that batches are
            computed with. Defaults to False.
        device (torch.device or int, optional): where buckets are put together; a
            number is a GPU's. CUDA sends with NCCL, CPU with gloo. Defaults to the
            device of the weights.
        bucket_bytes (int): size of a transfer, in bytes: the room that servers need
            beside their weights meanwhile. Defaults to 2 GiB.
        pause_mode (str, optional): what happens to requests that run during an update.
            ``"retract"`` (default) computes their prefix again with the new weights;
            where a server cannot empty its prefix cache while requests wait, as older
            versions of SGLang cannot, it ends them, the engine that updates sends its
            own again from their beginning, and those of others raise
            :class:`GenerationAbortedError`. ``"abort"`` ends them, and they raise that
            error. ``"in_place"`` lets them go on with attention state of the old
            weights, so that what they generate belongs to no version alone
            (``mixed_state`` of :class:`~torchrl_sglang.GenerationInfo` marks it).
            ``"none"`` pauses nothing: it is for a caller that generates nothing
            meanwhile, and the update is refused if a request runs.
        flush_cache (bool): empty the servers' prefix caches, also where it is not
            needed; ``pause_mode="retract"`` needs it. Requests of this package carry
            the weight version as a key of the cache, so that nothing stale is in reach
            otherwise; clients that speak OpenAI's protocol may not. A flush also
            has a server give memory back that the next update needs again, which takes
            some milliseconds on GPUs, and up to half a second on CPU. Defaults to True.
        connect_timeout (float): budget for servers to join, in seconds.
        send_timeout (float): budget for one bucket, in seconds; with ``"disk"``, for
            the servers to load everything.
        control_timeout (float): budget for each call that moves no weights, such as
            pausing and resuming, in seconds.
        verify (bool): whether every update ends with a comparison. A few values are
            read back from every server, where it can tell them, and must be what was
            sent; and every server scores a few prompts, which the model that was sent
            scores too, if it is one that can be called. Defaults to False.
        process_group (ProcessGroup, optional): the ranks that make the weights
            together, where these do not tell, as DTensors do: those of an exporter that
            runs collectives of its own, such as a bridge from Megatron. All of them
            call the sender and run through the exporter; the first one sends.
        flush_cache_on_update (bool, optional): ``flush_cache``, under the name of
            TorchRL's scheme for SGLang.
        server_url (str, optional): the engine, likewise.
        gpus_per_replica (int, optional): of one server; only checked.
        num_replicas (int, optional): number of servers; only checked.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> scheme = SGLangWeightSyncScheme(engine)
        >>> sender = scheme.create_sender()
        >>> sender.register_model(model)
        >>> report = sender.update_weights()
        >>> report.num_tensors == len(get_model_metadata(model))
        True
        >>> scheme.shutdown()
    """

    def __init__(
        self,
        engine: RLSGLangEngine | str | None = None,
        master_address: str | None = None,
        master_port: int | None = None,
        num_gpus: int | None = None,
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        transport: TransportName = "auto",
        directory: str | os.PathLike[str] | None = None,
        adapter: str = ADAPTER,
        pin_adapter: bool = False,
        device: torch.device | str | int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        pause_mode: PauseMode | None = None,
        flush_cache: bool = True,
        flush_cache_on_update: bool | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
        control_timeout: float = CONTROL_TIMEOUT_SECONDS,
        verify: bool = False,
        process_group: dist.ProcessGroup | None = None,
        server_url: str | None = None,
        gpus_per_replica: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        if strategy not in ("tensordict", "state_dict"):
            raise ConfigurationError(
                f"strategy={strategy!r} is not one of 'tensordict' and 'state_dict'."
            )
        # TorchRL warns of what it would do with the other one, which is not done here.
        super().__init__("tensordict")
        pause_mode = "retract" if pause_mode is None else pause_mode
        if pause_mode not in get_args(PauseMode):
            raise ConfigurationError(
                f"pause_mode={pause_mode!r} is not one of "
                f"{', '.join(map(repr, get_args(PauseMode)))}."
            )
        check_seconds("connect_timeout", connect_timeout)
        check_seconds("send_timeout", send_timeout)
        check_seconds("control_timeout", control_timeout)
        pin_adapter = check_flag("pin_adapter", pin_adapter)
        flush_cache = check_flag("flush_cache", flush_cache)
        if flush_cache_on_update is not None:
            flush_cache = check_flag("flush_cache_on_update", flush_cache_on_update)
        verify = check_flag("verify", verify)
        bucket_bytes = check_count("bucket_bytes", bucket_bytes)
        check_name(adapter)
        if master_port is not None:
            master_port = check_port("master_port", master_port)
        if directory is not None:
            directory = _to_folder(directory)
        self.transport_arguments = {
            name: value
            for name, value, unset in (
                ("directory", directory, None),
                ("adapter", adapter, ADAPTER),
                ("pin_adapter", pin_adapter, False),
                ("master_address", master_address, None),
                ("master_port", master_port, None),
                ("connect_timeout", connect_timeout, CONNECT_TIMEOUT_SECONDS),
            )
            if value != unset
        }
        check_arguments(transport, self.transport_arguments)
        if engine is not None and server_url is not None:
            raise ConfigurationError(
                f"Give the engine once: engine={engine!r}, "
                f"server_url={hide_passwords(server_url)!r}."
            )
        self._engine: RLSGLangEngine | None = None
        # An address is connected to when it is needed: a recipe that gives one brings
        # the engine itself later.
        if isinstance(engine, str):
            engine, server_url = None, engine
        self._server_url = None if server_url is None else normalize_url(server_url)
        self._expected = {
            "num_gpus": num_gpus,
            "gpus_per_replica": gpus_per_replica,
            "num_replicas": num_replicas,
        }
        if engine is not None:
            self.use_engine(engine)
        self.device = None if device is None else _to_device(device)
        self.transport: TransportName = transport
        self.directory = directory
        self.adapter = adapter
        self.pin_adapter = pin_adapter
        self.master_address = master_address
        self.master_port = master_port
        self.bucket_bytes = bucket_bytes
        self.pause_mode: PauseMode = pause_mode
        self.flush_cache = flush_cache
        self.connect_timeout = connect_timeout
        self.send_timeout = send_timeout
        self.control_timeout = control_timeout
        self.verify = verify
        self.process_group = process_group
        self.strategy_name = strategy
        self._sender: SGLangWeightSender | None = None

    @property
    def server_url(self) -> str | None:
        """Address that the scheme was made for or whose engine it has; asks nobody."""
        if self._engine is not None:
            return self._engine.server_url
        return (
            None if self._server_url is None else split_credentials(self._server_url)[0]
        )

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs of all servers together; ``None`` if it is not known yet."""
        if self._engine is None:
            return self._expected["num_gpus"]
        return self._engine.get_tp_size() * self._engine.get_dp_size()

    @property
    def world_size(self) -> int | None:
        """Number of ranks that weights are broadcast among, the sender's included."""
        if self._engine is not None:
            return 1 + self._engine.get_world_size()
        return None if self.num_gpus is None else 1 + self.num_gpus

    @property
    def engine(self) -> RLSGLangEngine:
        """The servers.

        Raises:
            WeightSyncStateError: if none were given yet.
        """
        if self._engine is None and self._server_url is not None:
            self.use_engine(AsyncSGLang.connect(self._server_url))
        if self._engine is None:
            raise WeightSyncStateError(
                "The scheme has no engine: give one to SGLangWeightSyncScheme(engine), "
                "or to sender.init_all_workers_group(metadata, vllm_engine=engine)."
            )
        return self._engine

    @property
    def owns_servers(self) -> bool:
        """Whether this process has started servers; does not connect to any."""
        return bool(getattr(self._engine, "servers", ()))

    def use_engine(self, engine: RLSGLangEngine) -> None:
        """Takes the engine that weights are sent to, if there is none yet.

        Raises:
            ConfigurationError: if it is not the one that the scheme was made for.
        """
        known = self.server_url
        if not isinstance(engine, RLSGLangEngine):
            raise ConfigurationError(
                f"{engine!r} is no engine that weights are sent to; give the same "
                f"engine as the policy's, or the address of a server."
            )
        if known not in (None, engine.server_url):
            raise ConfigurationError(
                f"The scheme was made for {self._engine or known}, and the engine is "
                f"{engine!r}; give the same engine, or leave it out."
            )
        actual = {
            # As TorchRL's recipes count them.
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
            server_args = engine.capabilities.server_args
            if server_args.get("device") != "cpu" and torch.cuda.is_available():
                # The sooner the better: NCCL reads it with its first communicator.
                nccl.share_settings(server_args, refuse=False)

    def create_sender(self) -> SGLangWeightSender:
        """Returns the scheme's sender; the same one every time."""
        if self._sender is None:
            self._sender = SGLangWeightSender(self)
        return self._sender

    def create_receiver(
        self, engine: RLSGLangEngine | None = None
    ) -> SGLangWeightReceiver:
        """Returns the view of the receiving servers.

        Args:
            engine: the servers; by default the scheme's.
        """
        return SGLangWeightReceiver(self, engine or self.engine)

    def create_transport(self, **kwargs: Any) -> _SchemeTransport:
        """Returns what TorchRL hands prepared weights to."""
        return _SchemeTransport(self.create_sender())

    def prepare_weights(
        self,
        weights: Any,
        model_id: str,
        strategy: WeightStrategy,
        context: Any = None,
    ) -> Any:
        """Returns the tensors to send: those given, or the registered model's.

        The collector's own policy is an inference wrapper without parameters, so it is
        never what is meant.

        Raises:
            WeightSyncStateError: if none are given and no model is registered.
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
        """Leaves the servers. Safe to call twice."""
        sender = getattr(self, "_sender", None)
        if sender is not None:
            sender.shutdown()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        # The sender holds the model and a process group of this process.
        state: dict[str, Any] = super().__getstate__()
        state["_sender"] = None
        state["_sender_transports"] = None
        state["process_group"] = None
        return state


def _to_folder(directory: str | os.PathLike[str]) -> str:
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str) or not path.strip():
        raise ConfigurationError(
            f"directory={directory!r} is no folder; give a path that this process and "
            f"every server see."
        )
    return path


def _to_device(device: torch.device | str | int) -> torch.device:
    try:
        found = (
            torch.device("cuda", device)
            if type(device) is int
            else torch.device(device)
        )
    except (RuntimeError, TypeError):
        found = None
    if found is None or isinstance(device, bool) or found.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"device={device!r} is not one that weights are sent from; give 'cpu', "
            f"'cuda' or the number of a GPU, or leave it out."
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device={device!r} is a GPU, and there is none here; leave it out to send "
            f"from where the weights are."
        )
    return found


class _SchemeTransport:
    """TorchRL's transport protocol over a sender. The collector counts versions."""

    def __init__(self, sender: SGLangWeightSender) -> None:
        self._sender = sender

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: servers start with their weights, and are met when needed."""

    def send_weights(self, weights: Any) -> None:
        self._sender.send(weights)

    def receive_weights(self, **kwargs: Any) -> None:
        """Does nothing: servers receive by themselves."""

    def setup_connection_and_weights_on_receiver(self, **kwargs: Any) -> None:
        """Does nothing: servers receive by themselves."""

    def check_connection(self) -> bool:
        return True

    def shutdown(self) -> None:
        self._sender.shutdown()
