"""AsyncSGLang: the engine for users.

It composes the folders beside it and delegates to them. The work is asynchronous, on
the background loop of the process; the synchronous methods wait for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch

from torchrl_sglang.backends.client.capabilities import check_takes_weights, find_out
from torchrl_sglang.backends.client.control import ControlPlane
from torchrl_sglang.backends.client.http import HttpClient, limit_in_flight
from torchrl_sglang.backends.client.model_info import ModelReader, ServedModel
from torchrl_sglang.backends.client.router import find_servers
from torchrl_sglang.backends.fleet.adapter_calls import AdapterCalls
from torchrl_sglang.backends.fleet.adapter_registry import AdapterRegistry
from torchrl_sglang.backends.fleet.loop import Supervisor, WatchTimes, revive
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.observe import ServerPoller, ask_stats, discover
from torchrl_sglang.backends.fleet.reconcile import Suspected
from torchrl_sglang.backends.fleet.replica import (
    RemoteRouter,
    Replica,
    ServerHandle,
    format_tags,
)
from torchrl_sglang.backends.fleet.resize import Resize
from torchrl_sglang.backends.fleet.sleep import (
    DRAIN_TIMEOUT_SECONDS,
    SleepControl,
    check_can_sleep,
    check_tags,
)
from torchrl_sglang.backends.fleet.weights_state import ServedWeights, WeightUpdate
from torchrl_sglang.backends.generation.batch import Generation
from torchrl_sglang.backends.generation.dispatch import MAX_ATTEMPTS, Dispatcher
from torchrl_sglang.backends.generation.openai import post_openai
from torchrl_sglang.backends.launch.block_fp8 import UNFILLED, rollout_arguments
from torchrl_sglang.backends.launch.launcher import Launcher, Placement, launch
from torchrl_sglang.backends.launch.loaders import loader_arguments
from torchrl_sglang.backends.launch.make import make_launcher
from torchrl_sglang.backends.launch.paths import absolute_paths
from torchrl_sglang.backends.launch.ports import find_free_port
from torchrl_sglang.backends.launch.process import START_TIMEOUT_SECONDS
from torchrl_sglang.backends.launch.router import router_arguments
from torchrl_sglang.backends.launch.vllm_arguments import translate_vllm_names
from torchrl_sglang.backends.lora.payload import prepare_adapter
from torchrl_sglang.backends.torchrl_calls import (
    TorchRLCalls,
    warn_of_ignored_variables,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    SGLangError,
    WeightSyncStateError,
)
from torchrl_sglang.requests.request import Batch, GenerateRequest, to_batch
from torchrl_sglang.support.checks import (
    check_count,
    check_flag,
    check_seconds,
    given_once,
)
from torchrl_sglang.support.event_loop import (
    iterate,
    iterate_sync,
    on_background_loop,
    run_async,
    run_sync,
    weakly,
)
from torchrl_sglang.support.forks import after_fork
from torchrl_sglang.support.urls import address_facing, is_this_machine
from torchrl_sglang.types import (
    Adapter,
    Completion,
    EngineStats,
    FusedParameter,
    ModelMetadata,
    ServerCapabilities,
    ServerPlacement,
    WeightLoader,
)

MAX_IN_FLIGHT = 2048

MAX_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of an engine's behaviour; see :meth:`AsyncSGLang.from_pretrained`."""

    max_in_flight: int = MAX_IN_FLIGHT
    max_attempts: int = MAX_ATTEMPTS
    max_restarts: int = MAX_RESTARTS
    progress_timeout: float = WatchTimes.progress
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_count("max_in_flight", self.max_in_flight)
        check_count("max_attempts", self.max_attempts)
        check_count("max_restarts", self.max_restarts, least=0)
        check_flag("trust_remote_code", self.trust_remote_code)
        check_seconds("progress_timeout", self.progress_timeout, endless=True)


class AsyncSGLang(TorchRLCalls):
    """SGLang as an engine for TorchRL.

    Make an engine with :meth:`from_pretrained`, which starts a server and owns it, or
    with :meth:`connect`, which uses a running server. An engine can be used from
    several threads and event loops at once. A pickled or copied engine becomes a
    connection without ownership, without network access.

    Examples:
        >>> with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        ...     (answer,) = engine.generate(
        ...         input_ids=[[5, 6, 7]],
        ...         sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        ...         return_logprobs=True,
        ...     )
        >>> len(answer.token_ids), len(answer.log_probs), answer.finish_reason
        (4, 4, 'length')
    """

    def __init__(
        self,
        fleet: Fleet | None = None,
        capabilities: ServerCapabilities | None = None,
        *,
        model: str | None = None,
        http: HttpClient | None = None,
        settings: Settings | None = None,
        **others: Any,
    ) -> None:
        if not isinstance(fleet, Fleet) or capabilities is None or others:
            # TorchRL's own class is called like this.
            raise ConfigurationError(
                "AsyncSGLang(...) itself starts and finds nothing; write "
                "AsyncSGLang.from_pretrained(model), which starts a server, or "
                "AsyncSGLang.connect(server_url=...) for one that runs."
            )
        warn_of_ignored_variables()
        self._fleet = fleet
        self.capabilities = capabilities
        self._model = model
        self._http = http or HttpClient()
        self._settings = settings or Settings()
        self._closed = False
        self._compose()

    def _compose(self) -> None:
        self._served_model = ServedModel(
            self.capabilities,
            self._model,
            trust_remote_code=self._settings.trust_remote_code,
        )
        self._update_lock = threading.Lock()
        after_fork(self._begin_in_this_process)
        self.control = ControlPlane(self._http, self._fleet, self.capabilities)
        adapter_calls = AdapterCalls(self._http, self.capabilities)
        self._adapters = AdapterRegistry(self.control, self._fleet, adapter_calls)
        self._dispatcher = Dispatcher(
            self._http,
            self._fleet,
            self.capabilities,
            self._adapters,
            max_attempts=self._settings.max_attempts,
            max_in_flight=limit_in_flight(
                self._settings.max_in_flight, len(self._fleet.replicas)
            ),
        )
        in_flight, counters = self._dispatcher.in_flight, self._dispatcher.counters
        self._sleep_control = SleepControl(
            self._fleet,
            self.control,
            in_flight=lambda: in_flight.queued + counters.in_flight,
            abort=lambda: in_flight.abort(None),
        )
        find = partial(
            find_out,
            self._http,
            model=self._model,
            trust_remote_code=self._settings.trust_remote_code,
        )
        self._supervisor = Supervisor(
            self._fleet,
            self._http,
            self.capabilities,
            # The supervisor's callbacks must not hold the fleet: with its last
            # reference, its servers end.
            progress=lambda: (counters.in_flight, counters.completed),
            recall=weakly(in_flight.recall),
            poller=ServerPoller(self._http, self.capabilities, adapter_calls, find),
            max_restarts=self._settings.max_restarts,
            times=WatchTimes(progress=self._settings.progress_timeout),
        )
        self._resize = Resize(
            self._fleet,
            self.control,
            self.capabilities,
            find,
            sent_to=in_flight.sent_to,
            evict=in_flight.evict,
            poll=self._supervisor.poll_now,
        )
        self._generation = Generation(
            self._dispatcher,
            self._served_model.get_tokenizer,
            self._supervisor.poll_now,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | None = None,
        tp_size: int | None = None,
        dp_size: int | None = None,
        *,
        num_replicas: int = 1,
        launcher: Literal["local", "ray"] | Placement = "local",
        device: str | None = None,
        cuda_devices: Sequence[Any] | None = None,
        python: str | os.PathLike[str] | None = None,
        start_timeout: float = START_TIMEOUT_SECONDS,
        timeout: float | None = None,
        parallel_start: bool | Literal["staggered"] | None = None,
        router_policy: str | None = "cache_aware",
        router_args: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_attempts: int = MAX_ATTEMPTS,
        max_restarts: int = MAX_RESTARTS,
        progress_timeout: float = WatchTimes.progress,
        deterministic: bool = False,
        rollout_dtype: str | None = None,
        weight_loader: WeightLoader = "sglang",
        **server_args: Any,
    ) -> Self:
        """Starts servers for ``model`` and a router in front of several; owns them.

        They and everything below them end with :meth:`shutdown`, with the ``with``
        block, with the interpreter, and also when this process is killed. A server that
        ends by itself is restarted; its requests go to the others in the meantime.

        Args:
            model: path or hub name of the model; ``model_name`` is accepted too. In
                this and every other argument, a relative path refers to the current
                folder, also for servers restarted from elsewhere.
            tp_size: number of GPUs for a server's model. Defaults to 1.
            dp_size: number of copies of the model in each server. Defaults to 1; weight
                broadcasts require 1.
            num_replicas: number of servers.
            launcher (str | Placement): place of the servers: ``"local"`` on this
                machine, ``"ray"`` on the nodes of a Ray cluster, a
                :class:`.RayLauncher`, which selects the nodes, or another
                :class:`.Placement`.
            device: ``"cuda"`` or ``"cpu"``; by default ``"cuda"`` if there is a GPU.
            cuda_devices: GPUs for the servers, in the numbering of this process: a list
                for all of them, or for each. By default the last of the visible GPUs,
                because a trainer takes the first.
            python: interpreter with sglang; see
                :func:`~torchrl_sglang.make_sglang_server` for the default.
            start_timeout: timeout for the start of each server, in seconds.
            timeout: the same, under the name of TorchRL's own class.
            parallel_start: start all servers at once (``True``), one after the other
                (``False``) or one per few cores (``"staggered"``). By default all at
                once on GPUs.
            router_policy: the router's choice of a server: ``"cache_aware"``,
                ``"round_robin"``, ``"power_of_two"``, ``"manual"``,
                ``"consistent_hashing"`` or ``"random"``; ``None`` for no router, so
                that this process chooses.
            router_args: further arguments of sglang-router, under its own names.
            api_key: key of the servers. On a Ray cluster of several machines, it is
                generated by default; see :attr:`api_key`.
            admin_api_key: separate key of the servers for updates, aborts, sleep and
            other control calls, which this engine then sends.
            max_in_flight: most in-flight requests, less if the limit of open files is
                low (``ulimit -Hn``).
            max_attempts: number of attempts of a request when connections break or
                servers answer 5xx.
            max_restarts: number of restarts of each server.
            progress_timeout: after this time without a completed request, in seconds,
                every server is probed for a token; a server without a token is
                restarted, unless it reports a pause, for the weight update of another
                engine object.
            deterministic: start the servers in SGLang's deterministic mode
                (``enable_deterministic_inference``), in which a response depends only
                on its prompt, its ``sampling_seed`` and the weights, not on concurrent
                requests. On GPUs only. The attention backend must be ``"triton"``,
                ``"fa3"``, ``"fa4"`` or ``"flashinfer"``. A request without a seed gets
                a random seed. The prefix cache is off, unless
                ``disable_radix_cache=False`` is given: cached values of decoding differ
                in the last bits from a prefill. Defaults to False.
            rollout_dtype: ``"fp8"`` makes the servers hold linear layers as FP8 in
                blocks of 128 x 128, from a checkpoint in bfloat16. They start with
                random weights, and generate after the first weight update, which
                quantizes (:class:`.BlockFP8`). For models of Llama, Mistral, Mixtral,
                Qwen2 and Qwen3 and their mixtures of experts, on GPUs. Defaults to
                None, the checkpoint's own type.
            weight_loader: loader of weight updates. With ``"traced"``, the first update
                traces the copies of the model's own loader between tensors and
                parameters; later updates only repeat these copies, and receive
                broadcasts directly in the parameters. Each rank takes its shard. An
                untraceable model uses its own loader, with a warning. Defaults to
                ``"sglang"``, the model's own loader at every update.
            **server_args: arguments of SGLang's server, under its own names or vLLM's.
                Defaults are SGLang's, but for ``cuda_graph_max_bs_decode``: 512 on GPUs
                of 60 GB or more (``backends/launch/cuda_graphs.py`` has the rule).

        Raises:
            ConfigurationError: if an argument is wrong or no engine is installed.
            ServerStartError: if a server ends or is not ready in time; the
                message has the end of its log. The others have been stopped.
        """
        settings = Settings(
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
            max_restarts=max_restarts,
            progress_timeout=progress_timeout,
            # The server's argument, which holds for reading the model here, too.
            trust_remote_code=server_args.get("trust_remote_code") or False,
        )
        for alias in ("model_name", "model_path"):
            other = server_args.pop(alias, None)
            model = given_once("model", model, alias, other)
        if model is None:
            raise ConfigurationError("Give the model: a folder, or a hub name.")
        if timeout is not None:
            start_timeout = check_seconds("timeout", timeout)
        if check_flag("deterministic", deterministic):
            server_args["enable_deterministic_inference"] = True
        sizes = {"tp_size": tp_size, "dp_size": dp_size}
        server_args |= {name: size for name, size in sizes.items() if size is not None}
        router = router_arguments(
            num_replicas,
            policy=router_policy,
            api_key=api_key,
            router_args=router_args or {},
        )
        if rollout_dtype is not None:
            server_args |= rollout_arguments(
                rollout_dtype, str(model), translate_vllm_names(server_args), device
            )
        spec = {"model": model, "api_key": api_key, "device": device, "python": python}
        if admin_api_key is not None:
            spec["admin_api_key"] = admin_api_key
        if loader_arguments(weight_loader, {}):
            spec["weight_loader"] = weight_loader
        servers = make_launcher(
            launcher,
            num_replicas,
            {**spec, **server_args},
            cuda_devices=cuda_devices,
            start_timeout=start_timeout,
            parallel=parallel_start,
        )
        engine = cls._launched(
            servers, settings, router=router, admin_api_key=admin_api_key
        )
        if rollout_dtype is not None:
            engine._fleet.change_weights(
                partial(ServedWeights.mark_inconsistent, reason=UNFILLED)
            )
        return engine

    @classmethod
    def _launched(
        cls,
        launcher: Launcher,
        settings: Settings,
        *,
        router: Mapping[str, Any] | None,
        admin_api_key: str | None = None,
    ) -> Self:
        """Starts a launcher's servers, and owns them."""
        fleet = launch(launcher, router=router)
        try:
            http = HttpClient(launcher.api_key, admin_api_key=admin_api_key)
            return cls._connected(fleet, http, settings)
        except BaseException:
            fleet.stop()
            raise

    @classmethod
    def connect(
        cls,
        url: str | None = None,
        *,
        server_url: str | None = None,
        urls: Sequence[str] | None = None,
        router_url: str | None = None,
        model: str | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_attempts: int = MAX_ATTEMPTS,
        trust_remote_code: bool = False,
    ) -> Self:
        """Uses servers running elsewhere, without owning them.

        It follows their state: a server that is down, was restarted by its owner or has
        stale weights gets no requests until it has current weights. Of several servers,
        at least one must respond now.

        Args:
            url: address of a server, like ``"http://127.0.0.1:30000"``. User and
                password in an address (``"http://me:secret@host:80"``) are sent and
                never shown.
            server_url: the same, under the name of TorchRL's own class.
            urls: addresses of several servers of the same model, instead.
            router_url: address of a router in front of them. Without ``urls`` the
                router provides the servers. Control calls go to each server directly,
                so this process must reach them.
            model: folder or hub name with the served model's configuration and
            tokenizer, if the server's reported path cannot be read here.
            api_key: key of the servers.
            admin_api_key: separate key for updates, aborts, sleep and other control.
            max_in_flight: as for :meth:`from_pretrained`, like ``max_attempts``.
            max_attempts: number of attempts of a request.
            trust_remote_code: run the served model's code to read its configuration,
                tokenizer and parameters here, independently of the servers.

        Raises:
            ServerUnavailableError: if no SGLang server answers there.
            ServerTimeoutError: if the only server does not answer in time.
            ConfigurationError: if an address or the model is wrong, or the servers do
                not serve the same.
        """
        settings = Settings(
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
            trust_remote_code=trust_remote_code,
        )
        addresses, place, http = run_sync(
            find_servers(
                given_once("url", url, "server_url", server_url),
                urls,
                router_url=router_url,
                api_key=api_key,
                admin_api_key=admin_api_key,
            )
        )
        if model is not None:
            # Copies of the engine are in other folders.
            model = absolute_paths({"model": model})["model"]
        fleet = Fleet(
            [Replica(url=address) for address in addresses],
            router=None if place is None else RemoteRouter(url=place),
        )
        return cls._connected(fleet, http, settings, model=model)

    @classmethod
    def _connected(
        cls,
        fleet: Fleet,
        http: HttpClient,
        settings: Settings,
        *,
        model: str | None = None,
    ) -> Self:
        trusted = settings.trust_remote_code
        find = partial(
            find_out, http, model=model, trust_remote_code=trusted, reader=ModelReader()
        )
        try:
            capabilities = run_sync(discover(fleet, find))
        finally:
            run_sync(http.close())
        return cls(fleet, capabilities, model=model, http=http, settings=settings)

    @property
    def server_url(self) -> str:
        router = self._fleet.router
        return self.replicas[0].url if router is None else router.url

    @property
    def api_key(self) -> str | None:
        """Key of the servers, for other clients; keep it secret."""
        return self._http.api_key

    @property
    def servers(self) -> tuple[ServerHandle, ...]:
        """The server processes of this engine, a handle for each replica."""
        handles = (replica.handle for replica in self.replicas)
        return tuple(handle for handle in handles if handle is not None)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Last known state of every server; reads it without a request.

        Includes others' and unavailable servers. :meth:`stats` asks the servers.

        Examples:
            >>> [(replica.url, replica.state) for replica in engine.replicas]
            [('http://...', 'serving')]
        """
        return self._fleet.replicas

    @property
    def model_path(self) -> str:
        return self._served_model.path

    @property
    def placements(self) -> tuple[ServerPlacement, ...]:
        located = {replica.url: replica.location for replica in self.replicas}
        args = self.capabilities.args
        return tuple(
            ServerPlacement(
                url=url,
                local=args.nnodes == 1 and is_this_machine(url),
                device=args.device,
                gpus=None if (at := located.get(url)) is None else at.gpus,
                visible_gpus=None if at is None else at.visible_gpus,
            )
            for url in self.control.urls
        )

    @property
    def weight_version(self) -> str:
        adapter = self.adapters.get(self.default_adapter or "")
        if adapter is not None and adapter.version is not None:
            return adapter.version
        return self._fleet.weights.version

    @property
    def newest_version(self) -> str:
        return self._fleet.weights.newest

    @property
    def base_problem(self) -> str | None:
        return self._fleet.state.base_problem

    @property
    def asleep(self) -> frozenset[str]:
        return self._fleet.asleep

    @property
    def problems(self) -> tuple[str, ...]:
        return self._fleet.state.problems

    def generate_requests(
        self, requests: Sequence[GenerateRequest], **options: Any
    ) -> list[Completion]:
        self._check_usable()
        return run_sync(self._generation.run(Batch(requests=requests, **options)))

    async def agenerate_requests(
        self, requests: Sequence[GenerateRequest], **options: Any
    ) -> list[Completion]:
        if self._fleet.weights.second_hand:
            # It asks the servers, which blocks.
            await asyncio.to_thread(self._check_usable)
        self._check_usable()
        work = self._generation.run(Batch(requests=requests, **options))
        return await run_async(work)

    def _to_batch(self, prompts: Any, sampling_params: Any, **options: Any) -> Batch:
        # Tokenizes in the caller's thread, to keep the background loop free.
        self._check_usable()
        return to_batch(prompts, sampling_params, self.get_tokenizer, **options)

    async def _to_batch_aside(self, prompts: Any, *args: Any, **options: Any) -> Batch:
        # A thread costs more than it saves where there is nothing to tokenize.
        if prompts is None:
            return self._to_batch(prompts, *args, **options)
        return await asyncio.to_thread(self._to_batch, prompts, *args, **options)

    async def agenerate(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> list[Completion]:
        """The same as :meth:`generate`, to be awaited on any event loop."""
        batch = await self._to_batch_aside(prompts, sampling_params, **options)
        return await run_async(self._generation.run(batch))

    def generate_iter(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> Iterator[tuple[int, Completion | SGLangError]]:
        """Generates like :meth:`generate`, and yields each response as it finishes.

        Closing the iterator aborts the in-flight requests.

        Yields:
            ``(index, completion)``, in the order of completion. With
            ``return_exceptions=True`` an item's error is yielded in its place.

        Examples:
            >>> answers = engine.generate_iter(
            ...     input_ids=[[5, 6], [7]],
            ...     sampling_params=[{"max_new_tokens": 40}, {"max_new_tokens": 1}],
            ... )
            >>> sorted(index for index, answer in answers)
            [0, 1]
        """
        batch = self._to_batch(prompts, sampling_params, **options)
        yield from iterate_sync(self._generation.stream(batch))

    async def agenerate_iter(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> AsyncIterator[tuple[int, Completion | SGLangError]]:
        """The same as :meth:`generate_iter`, to be iterated on any event loop."""
        batch = await self._to_batch_aside(prompts, sampling_params, **options)
        async with aclosing(iterate(self._generation.stream(batch))) as stream:
            async for item in stream:
                yield item

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Aborts requests on the servers; they raise :class:`.GenerationAbortedError`.

        With ``return_partial=True`` they return the tokens so far.

        Args:
            request_ids: names in :meth:`generate`. By default all requests, also of
                other users of the servers.

        Returns:
            The number of aborted in-flight requests of this engine object.
        """
        self._check_open()
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        return run_sync(self._dispatcher.in_flight.abort(request_ids))

    @property
    def adapters(self) -> dict[str, Adapter]:
        return self._adapters.table

    @property
    def default_adapter(self) -> str | None:
        return self._adapters.default

    @default_adapter.setter
    def default_adapter(self, name: str | None) -> None:
        self._adapters.default = name

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
        self._check_open()
        self._adapters.check_new(name, version)
        content = prepare_adapter(
            path=path,
            tensors=tensors,
            config=config,
            capabilities=self.capabilities,
            get_metadata=self.get_model_metadata,
        )
        loaded = run_sync(
            self._adapters.load(
                name,
                content,
                pinned=pinned,
                version=version,
                make_default=default,
                timeout=timeout,
            )
        )
        # A server of somebody else may be started again, and needs it then.
        self._supervisor.begin()
        return loaded

    def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        self._check_open()
        run_sync(self._adapters.unload(name, timeout=timeout))

    @property
    def restarting(self) -> Sequence[str]:
        self._fleet.notice_deaths()
        return self._fleet.state.restarting

    @property
    def awaits_weights(self) -> bool:
        return self._fleet.state.awaits_weights

    def look_at_servers(self) -> None:
        self._check_open()
        self._fleet.apply(Suspected())
        run_sync(self._supervisor.poll_now())

    def published_adapters(self, *, timeout: float) -> frozenset[str]:
        self._check_open()
        return run_sync(self._adapters.published(timeout=timeout))

    def withdraw_adapters(self, *, timeout: float) -> None:
        self._check_open()
        run_sync(self._adapters.withdraw(timeout=timeout))

    @property
    def openai_base_url(self) -> str:
        """Address for clients of OpenAI's protocol: same servers, same weights.

        Such a client does not know the weight version. Give it :attr:`weight_version`
        as ``extra_body={"extra_key": ...}``, or nothing: an update empties the prefix
        cache, if the server can.

        Of several servers it is the router's address. The router drops fields outside
        of OpenAI's protocol from a chat, such as ``extra_key``, ``cache_salt``,
        ``stop_regex``, ``return_meta_info`` and ``return_routed_experts``, and still
        answers 200. :meth:`chat_completion` sends a chat to a server directly.
        """
        return f"{self.server_url}/v1"

    def chat_completion(
        self,
        payload: Mapping[str, Any],
        *,
        session_id: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Sends a chat to the servers in OpenAI's protocol, retried like any request.

        It bypasses a router, which drops most of SGLang's fields beside OpenAI's.

        Args:
            payload: content for ``/v1/chat/completions``. ``model`` can be omitted.
                ``lora_path`` selects a LoRA adapter by its name, like ``adapter`` in
                :meth:`generate`.
            session_id: turns of a session go to the server with their cached prefix.
            timeout: in seconds. Defaults to 1800.

        Returns:
            The answer, unchanged, with all choices finished: a request aborted by a
            weight update is sent again. Log-probs in it are the server's own, after
            penalties, biases and grammar, unlike :meth:`generate`'s.

        Raises:
            ConfigurationError: if ``payload`` requests a stream.
            GenerationAbortedError: if :meth:`abort`, an update with
                ``pause_mode="abort"`` or another user of the servers cut it off.
            UnsupportedByServerError: if ``return_meta_info``, ``return_hidden_states``,
                ``return_routed_experts`` or ``return_sampling_mask`` was requested and
                is not in the answer.
            SGLangError: as :meth:`generate` does.

        Examples:
            >>> chat = [{"role": "user", "content": "Hi"}]
            >>> answer = engine.chat_completion({"messages": chat, "max_tokens": 4})
            >>> answer["usage"]["completion_tokens"] <= 4
            True
        """
        path = "/v1/chat/completions"
        return run_sync(self._call(path, payload, session_id, timeout))

    def completion(self, payload: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The same as :meth:`chat_completion`, for ``/v1/completions``."""
        return run_sync(self._call("/v1/completions", payload, **options))

    async def achat_completion(
        self, payload: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        """The same as :meth:`chat_completion`, to be awaited on any event loop."""
        call = self._call("/v1/chat/completions", payload, **options)
        return await run_async(call)

    async def _call(
        self,
        path: str,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        self._check_usable()
        return await post_openai(
            self._dispatcher, path, payload, session_id=session_id, timeout=timeout
        )

    def stats(self) -> EngineStats:
        """Returns totals of this engine and the current activity of its servers.

        :func:`.serve_metrics` exports them to Prometheus, and :attr:`metrics_urls` are
        the servers' own metrics.

        Examples:
            >>> stats = engine.stats()
            >>> stats.servers[0].state, stats.in_flight
            ('serving', 0)
        """
        self._check_open()
        servers = run_sync(ask_stats(self._fleet, self.control))
        # Read afterwards: calls cancelled before have left the loop.
        done = self._dispatcher.counters
        return EngineStats(
            in_flight=done.in_flight,
            queued=self._dispatcher.in_flight.queued,
            completed=done.completed,
            retries=done.retries,
            restarts=self._fleet.state.past_restarts
            + sum(replica.restarts for replica in self.replicas),
            tokens_per_second=done.tokens_per_second,
            prompt_tokens=done.prompt_tokens,
            response_tokens=done.response_tokens,
            cached_tokens=done.cached_tokens,
            retractions=done.retractions,
            request_seconds=done.request_seconds.read(),
            queue_seconds=done.queue_seconds.read(),
            first_token_seconds=done.first_token_seconds.read(),
            response_lengths=done.response_lengths.read(),
            cache_hit_rate=done.cached_tokens / max(done.prompt_tokens, 1),
            weight_version=self._fleet.weights.version,
            servers=servers,
        )

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """Addresses of the servers' own metrics, in Prometheus' text format.

        Servers have them if they were started with ``enable_metrics=True``. They answer
        without a key. A restarted server may have another address.
        """
        if not self.capabilities.args.enable_metrics:
            return ()
        return tuple(f"{url}/metrics" for url in self.control.urls)

    def start_profile(self, output_dir: str | None = None, **options: Any) -> None:
        """Starts PyTorch's profiler in every server.

        Args:
            output_dir: folder for the traces, on the servers' machine.
            **options: for SGLang's ``/start_profile``, such as ``num_steps``.
        """
        self._check_open()
        folder = {} if output_dir is None else {"output_dir": output_dir}
        run_sync(self.control.start_profile({**folder, **options}))

    def stop_profile(self) -> None:
        """Stops the profiler; the servers write their traces."""
        self._check_open()
        run_sync(self.control.stop_profile())

    def _check_open(self) -> None:
        if self._closed:
            raise ServerUnavailableError(
                f"The engine at {self.server_url} was shut down; make a new one."
            )
        state = self._fleet.state
        # The owner of the servers watches them all the time.
        follows = self._fleet.directory is not None and not state.owns_any
        if state.needs_poll or follows:
            self._supervisor.begin()

    def _check_usable(self) -> None:
        self._check_open()
        self._fleet.state.check_awake()
        if self._fleet.weights.second_hand and not on_background_loop():
            # It may have been mended since this copy was made.
            self.look_at_servers()
        if (reason := self._fleet.weights.inconsistent) is not None:
            raise WeightSyncStateError(
                f"The weights on {self.server_url} are inconsistent: {reason} "
                f"Generation stays paused until a weight update succeeds; send the "
                f"weights again."
            )

    def get_tokenizer(self, name: str | None = None) -> Any:
        return self._served_model.get_tokenizer(name)

    def get_model_metadata(self) -> ModelMetadata:
        return self._served_model.get_metadata()

    def get_fused_parameters(self) -> dict[str, FusedParameter]:
        return self._served_model.get_fused_parameters()

    def get_master_address(self) -> str:
        return address_facing(self.control.urls)

    def get_master_port(self) -> int:
        return find_free_port()

    @contextmanager
    def weight_update(self) -> Iterator[WeightUpdate]:
        self._check_open()
        check_takes_weights(self.capabilities)
        with self._alone(), self._fleet.weight_update() as update:
            yield update

    @contextmanager
    def new_servers(self) -> Iterator[AsyncSGLang | None]:
        self._check_open()
        check_takes_weights(self.capabilities)
        fleet = self._fleet
        with self._alone():
            fleet.state.check_awake()
            new = [replica for replica in fleet.replicas if replica.state == "stale"]
            if not new or not fleet.serving or fleet.weights.inconsistent is not None:
                yield None
                return
            part = AsyncSGLang(
                Fleet([replica.without_handle() for replica in new]),
                self.capabilities,
                model=self._model,
                http=self._http,
                settings=self._settings,
            )
            yield part
            for replica in new:
                fleet.learn(replica, lambda now: replace(now, foreign_version=""))
            self.look_at_servers()

    def interrupt_requests(self, *, timeout: float, keep: bool = True) -> None:
        keeps_requests = self.capabilities.keeps_requests
        run_sync(
            self._dispatcher.in_flight.interrupt(
                self.control.loads,
                keep=keep and keeps_requests,
                others=not keeps_requests,
                timeout=timeout,
            )
        )

    def _begin_in_this_process(self) -> None:
        # A thread of the parent may have held it.
        self._update_lock = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the lock for exclusive operations: weight update, sleep, wake-up."""
        if not self._update_lock.acquire(blocking=False):
            raise WeightSyncStateError(
                f"A weight update, sleep() or wake_up() of {self.server_url} is in "
                f"progress; wait for it to end."
            )
        try:
            yield
        finally:
            self._update_lock.release()

    def sleep(
        self,
        tags: str | Iterable[str] = ("weights", "kv_cache"),
        *,
        abort_first: bool = False,
        drain_timeout: float = DRAIN_TIMEOUT_SECONDS,
    ) -> None:
        self._check_open()
        kinds = check_tags(tags)
        check_can_sleep(self.capabilities, self.server_url)
        drain_timeout = check_seconds("drain_timeout", drain_timeout, zero=True)
        with self._alone():
            run_sync(
                self._sleep_control.sleep(
                    kinds, abort_first=abort_first, drain_timeout=drain_timeout
                )
            )

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        self._check_open()
        kinds = self._fleet.asleep if tags is None else check_tags(tags)
        with self._alone():
            run_sync(self._sleep_control.wake_up(kinds))

    def revive(self, *, timeout: float = START_TIMEOUT_SECONDS) -> None:
        self._check_open()
        check_seconds("timeout", timeout)
        self._fleet.state.check_weights_awake()
        run_sync(revive(self._fleet, self.control, timeout=timeout))

    def add_servers(
        self,
        servers: int | str | Sequence[str] = 1,
        *,
        cuda_devices: Sequence[Any] | None = None,
    ) -> tuple[str, ...]:
        """Adds servers while the others generate and take weight updates.

        The others keep running. A new server gets requests when it has the current
        weights and LoRA adapters: at once if they are the checkpoint's; otherwise with
        the next weight update, or with :meth:`.SGLangWeightSender.update_new_servers`
        before.

        Args:
            servers: the number of servers to start, with the arguments and in the place
                of the others; or the addresses of running servers, with the same
                ``api_key`` and like the others in model, SGLang and arguments. If the
                model is in another folder there, the server waits for weights.
            cuda_devices: GPUs of servers on this machine, as for
                :meth:`from_pretrained`. By default GPUs without a server and without
                memory of this process. On a Ray cluster, Ray assigns them.

        Returns:
            The addresses of the new servers.

        Raises:
            ConfigurationError: if an address is wrong or already in use, if a server
                differs from the others, or if there is no place or GPU for more.
            ServerStartError: if a server ends or is not ready within ``start_timeout``;
                none was added then.
            ServerUnavailableError: if no SGLang server answers at an address, or the
                engine was shut down during the call.
            ServerTimeoutError: if a server does not answer in time.
            UnsupportedByServerError: if the launcher cannot start more.
            WeightSyncStateError: if the engine is asleep.

        Examples:
            >>> (url,) = engine.add_servers(1)
            >>> engine.num_replicas, engine.servers[-1].url == url
            (2, True)
            >>> removed = engine.remove_servers(url)
            >>> engine.num_replicas
            1
        """
        self._check_open()
        return self._resize.add(servers, cuda_devices)

    def remove_servers(
        self,
        servers: int | str | Sequence[str],
        *,
        drain_timeout: float = DRAIN_TIMEOUT_SECONDS,
    ) -> tuple[str, ...]:
        """Removes servers while the others generate and take weight updates.

        They get no more requests from the call on. Their running requests finish, or
        are aborted after the timeout and continue on other servers from their last
        tokens. A server of this engine is stopped then, and its GPUs are free; another
        server continues without this engine.

        Args:
            servers: addresses of servers, or a number of them: first servers out of
            service, then the newest.
            drain_timeout: timeout for running requests, in seconds; 0 aborts them at
                once. Defaults to 60.

        Returns:
            The addresses of the removed servers.

        Raises:
            ConfigurationError: if an address is not a server's, if the server is being
                removed already, or if no serving server would be left.
            ServerTimeoutError: if a weight update with these servers did not end; they
                stay.
        """
        self._check_open()
        seconds = check_seconds("drain_timeout", drain_timeout, zero=True)
        return self._resize.remove(servers, seconds)

    def flush_cache(self) -> bool:
        self._check_open()
        return run_sync(self.control.flush_when_idle())

    def health(self) -> bool:
        alive = all(replica.runs for replica in self.replicas)
        return not self._closed and alive and run_sync(self.control.healthy())

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fleet.close()
        try:
            self._resize.close()
            self._supervisor.stop()
            run_sync(self._dispatcher.in_flight.close())
            run_sync(self._adapters.close())
            run_sync(self._http.close())
        finally:
            self._fleet.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        # Ownership, locks and the tokenizer remain here; the rest is plain values.
        names = ("_fleet", "capabilities", "_model", "_http", "_settings", "_closed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compose()

    def __repr__(self) -> str:
        fleet = self._fleet
        if self._closed:
            status = "closed"
        elif fleet.asleep:
            status = f"asleep: {format_tags(fleet.asleep)}"
        elif fleet.weights.inconsistent is not None:
            status = "weights inconsistent"
        else:
            states = Counter(replica.state for replica in fleet.replicas)
            status = ", ".join(f"{n} {s}" if n > 1 else s for s, n in states.items())
        owned = any(replica.handle is not None for replica in fleet.replicas)
        return (
            f"AsyncSGLang({self.server_url!r}, "
            f"model={self.capabilities.model_path!r}, "
            f"weight_version={fleet.weights.version!r}, owned={owned}, "
            f"status={status!r})"
        )
