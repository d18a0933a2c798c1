"""The trainer's side: which model is sent, and which version it gets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from torchrl.weight_update import WeightSyncScheme

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.fleet.weights_state import next_version, version_order
from torchrl_sglang.backends.lora.names import is_published, parse_served_name
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerError,
    ServerTimeoutError,
    ServerUnavailableError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.checks import check_flag
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import span
from torchrl_sglang.types import ModelMetadata, SyncReport, UpdateStats
from torchrl_sglang.weight_update.new_servers import fill
from torchrl_sglang.weight_update.options import SchemeOptions
from torchrl_sglang.weight_update.plan import (
    UpdatePlan,
    choose_source,
    make_transport,
    plan_update,
)
from torchrl_sglang.weight_update.ranks import Participation, Ranks
from torchrl_sglang.weight_update.registered_collectors import RegisteredCollectors
from torchrl_sglang.weight_update.sources.base import (
    Source,
    SourceCache,
    UserWeights,
    unwrap,
)
from torchrl_sglang.weight_update.sources.fingerprints import Fingerprint, are_equal
from torchrl_sglang.weight_update.sources.peft import adapter_fits
from torchrl_sglang.weight_update.sources.served import ServedTensors, plan_names
from torchrl_sglang.weight_update.totals import UpdateTotals
from torchrl_sglang.weight_update.transports.base import CPU, WeightTransport
from torchrl_sglang.weight_update.transports.disk import (
    CheckpointTransport,
    checkpoint_path,
)
from torchrl_sglang.weight_update.verify import watch
from torchrl_sglang.weight_update.weights import Weights, specs_of

END_SECONDS = 3.0
"""Wait for the process of a server that has closed its connections to end."""


class SGLangWeightSender:
    """Sends weights to all servers of an engine.

    Make one with :meth:`SGLangWeightSyncScheme.create_sender`.

    Examples:
        >>> sender = SGLangWeightSyncScheme(engine, model).create_sender()
        >>> report = sender.update_weights()
        >>> report.version == engine.weight_version
        True
        >>> sender.shutdown()
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._options: SchemeOptions = scheme.options
        self._model: Any = None
        self._cache = SourceCache()
        self.transport: WeightTransport | None = None
        """The transport of whole weights; an adapter's keeps no connection."""
        self._memory_of_ranks: Ranks | None = None
        self._collectors = RegisteredCollectors(scheme)
        self._last_report: SyncReport | None = None
        self._totals = UpdateTotals()
        self._sent_registered = False
        self._sent: dict[str, Fingerprint] = {}
        """What the last update has read of the registered model."""
        self._chosen: list[str] = []
        """Versions of the updates that were begun, also of those that failed."""
        self._warned = False

    @property
    def last_report(self) -> SyncReport | None:
        """Report of the last update; ``None`` before the first."""
        return self._last_report

    def stats(self) -> UpdateStats:
        """Returns the totals of all updates since this sender was made.

        Sending to servers that have joined counts as one, too.

        Examples:
            >>> sender = SGLangWeightSyncScheme(engine, model).create_sender()
            >>> _ = sender.update_weights()
            >>> sender.stats().failures, sum(sender.stats().updates.values())
            (0, 1)
            >>> sender.shutdown()
        """
        return self._totals.read()

    @property
    def _engine(self) -> RLSGLangEngine:
        engine: RLSGLangEngine = self._scheme.engine
        return engine

    def register_model(self, model: Any) -> None:
        """Registers the model whose weights are sent when none are given."""
        self._model = model

    def register_collector(self, collector: Any) -> None:
        """Registers a collector whose policy version counts updates, once each.

        It has ``increment_version()`` and ``policy_version``, like TorchRL's senders.
        Its ``last_sync_report`` is set to each update's report. The sender does not
        keep it alive, and forgets it with a warning when it has ended: when one of the
        two raises :class:`.CollectionError`, or its Ray actor is dead.
        """
        self._collectors.register(collector)

    def unregister_collector(self, collector: Any) -> None:
        """Forgets a collector, whose policy version counts no more updates.

        ``shutdown()`` of this package's collectors does it. Safe to call twice.
        """
        self._collectors.unregister(collector)

    def init_all_workers_group(
        self,
        model_metadata: ModelMetadata | None = None,
        vllm_engine: RLSGLangEngine | None = None,
    ) -> None:
        """Connects to the servers now instead of at the first update.

        Weights that ranks hold together on GPUs are checked only.

        Args:
            model_metadata: name -> (dtype, shape) of the weights to come, checked
                against the served model.
            vllm_engine: the engine, under the name that TorchRL's recipes use; the
                same one as the scheme's, if that was given one.

        Raises:
            WeightMismatchError: if the metadata does not fit the served model.
            WeightTransferError: if the servers do not join.
        """
        if vllm_engine is not None:
            self._scheme.use_engine(vllm_engine)
        source = None
        if self._model is not None:
            weights = unwrap(self._model)
            if self._is_idle_copy(weights):
                return
            source = self._source_of(weights)
            idle = source.ranks is not None and not source.ranks.sends
            # An adapter travels in the requests themselves.
            if idle or source.adapter is not None:
                return
        if model_metadata is not None:
            plan_names(specs_of(model_metadata), self._served)
        device = CPU
        if self._options.device is None:
            source = source or self._source_of(unwrap(self.resolve()))
            device = self._plan(source).weights.device
            if source.ranks is not None and device.type == "cuda":
                # The GPUs of the other ranks are known at the first update.
                return
        if self.transport is None:
            self.transport = make_transport(self._options, self._engine, device)
        self.transport.connect()

    def update_weights(
        self, weights: Any = None, *, verify: bool | None = None
    ) -> SyncReport:
        """Sends weights, and counts a policy version on every registered collector.

        The servers' new version is the policy version that the collectors then have, if
        these are numbers and no server has had that version before; otherwise it is the
        next number that no server has had.

        Args:
            weights: by default the registered model's. One of

                - a module, or a wrapper of TorchRL around one; names that DDP,
                  ``torch.compile`` and activation checkpointing give are understood,
                  and adapters of PEFT are merged layer by layer as they are sent;
                - a state dict, or a flat or nested TensorDict;
                - a list or an iterator of (name, tensor);
                - an exporter: a function that returns such an iterator, or an object
                  that can be iterated over anew. One bucket of its tensors is alive at
                  a time. The first update also runs through it to check names and
                  shapes; give the same object every time.

                Other floating-point types are cast to the served one, tied weights
                are sent once, and fused experts in the pieces of a checkpoint.
            verify: compare servers and trainer afterwards. Defaults to the scheme's.

        Raises:
            WeightMismatchError: if they do not fit the served model; nothing was sent.
                Or if verification found a NaN, or other weights on a server: it is
                paused, and the engine refuses to generate until an update succeeds.
            ConfigurationError: with ``transport="lora"``, if the adapter alone is not
                what the model computes with; nothing was sent.
            WeightTransferError: if sending failed; see its ``untouched``.
            WeightSyncStateError: if there is nothing to send, another update is in
                flight, or another rank sends for this rank's collector.
            UnsupportedByServerError: if verification has nothing to compare; nothing
                was sent.

        Note:
            Where a model is spread over ranks (FSDP2's ``fully_shard``, or DTensors
            otherwise), **every** rank of its mesh calls this. They gather one bucket
            at a time; the first rank sends it, and needs the servers; all return its
            report or raise its error. The process group's own timeout must be longer
            than ``send_timeout`` and ``restart_timeout`` together, for which others may
            wait for the first rank. With DistributedDataParallel every rank may call,
            and rank 0 sends: the others return a report with ``transport="none"`` at
            once, unless they have started servers of their own or give ``ddp.module``.
            An :class:`.AsyncLLMCollector` on another rank would not learn the versions
            that rank 0 sends, and is refused.

        Examples:
            >>> sender = SGLangWeightSyncScheme(engine).create_sender()
            >>> report = sender.update_weights(model.named_parameters)
            >>> report.num_tensors == len(get_model_metadata(model))
            True
            >>> sender.shutdown()
        """
        return self._update(weights, verify=verify)

    def send(self, weights: Any = None) -> SyncReport:
        """Sends weights for a collector that counts this update itself."""
        return self._update(weights, counts_itself=self._scheme.context)

    def _update(
        self, weights: Any, *, verify: bool | None = None, counts_itself: Any = None
    ) -> SyncReport:
        user_weights = unwrap(self.resolve(weights))
        if self._is_idle_copy(user_weights):
            self._collectors.check_idle()
            report = SyncReport(
                version="",
                transport="none",
                num_tensors=0,
                num_bytes=0,
                num_buckets=0,
                seconds=0.0,
            )
            return self._count(report, counts_itself)
        if verify is None:
            verify = self._options.verify
        verify = check_flag("verify", verify)
        with self._totals.counting_failures(), span("weight_update") as traced:
            with self._collectors.announced():
                source = self._source_of(user_weights)
                report = self._send_until(source, verify)
            traced.set(
                version=report.version,
                transport=report.transport,
                bytes=report.num_bytes,
                **{f"{name}_seconds": s for name, s in report.phase_seconds.items()},
            )
        # From here on nothing may fail: the servers have these weights.
        self._sent_registered = user_weights.value is self._model
        return self._count(report, counts_itself)

    def is_spread(self, weights: Any = None) -> bool:
        """Whether ranks hold weights together, so that all of them have to send them.

        Args:
            weights: as for :meth:`update_weights`.
        """
        return self._source_of(unwrap(self.resolve(weights))).ranks is not None

    def refresh(self) -> SyncReport | None:
        """Sends the registered model again if no server has its weights any more.

        That is so when all servers have ended and this engine has started them again:
        they generate only after a weight update. An :class:`.AsyncLLMCollector` calls
        it while the trainer waits for a batch. It counts no policy version, unless the
        model was trained since the last update: these weights are a new one.

        Returns:
            SyncReport | None: ``None`` if nothing was to be sent, or the weights of the
            last update were not the registered model's, or are spread over ranks.
        """
        if not (self._sent_registered and self._engine.awaits_weights):
            return None
        source = self._source_of(unwrap(self._model))
        if source.ranks is not None:
            return None
        torchrl_logger.warning(
            "All servers were started again, so that they are sent the weights again."
        )
        if self._is_trained(self._plan(source)):
            return self._update(self._model, verify=False)
        with self._totals.counting_failures():
            report = self._send_until(source, verify=False, counts=False)
        self._last_report = report
        self._totals.add(report)
        return report

    def update_new_servers(self) -> SyncReport | None:
        """Sends the weights of the last update to servers that have joined since.

        Without it they wait for the next update. The others go on generating, and their
        version stays the same. The registered model must have the weights of the last
        update still: call it before the optimizer's next step. A server that was
        started again counts as one that has joined.

        Returns:
            SyncReport | None: ``None`` if no server waits for weights, or no other one
            serves.

        Raises:
            WeightSyncStateError: if the last update did not send the registered
                model's weights, they have changed since, or ranks hold them together.
            WeightMismatchError: if a server then holds other values than one of the
                others, as far as servers tell them, or scores prompts differently.
            WeightTransferError: if sending failed. After any error, the new servers get
                no request before the next update.

        Examples:
            >>> sender = SGLangWeightSyncScheme(engine, model).create_sender()
            >>> _ = sender.update_weights()
            >>> sender.update_new_servers() is None
            True
            >>> sender.shutdown()
        """
        engine = self._engine
        engine.look_at_servers()
        with engine.new_servers() as new, self._totals.counting_failures():
            if new is None:
                return None
            report = fill(new, engine, *self._plan_last_update())
            self._totals.add(report)
            return report

    def _plan_last_update(self) -> tuple[UpdatePlan, str]:
        """Plans to send the weights of the last update; returns their version, too."""
        report, advice = self._last_report, "They get the weights of the next update."
        if (
            report is None
            or not self._sent_registered
            or report.version != self._engine.weight_version
            or report.transport in ("none", "lora", "checkpoint")
        ):
            raise WeightSyncStateError(
                f"New servers wait for weights, and the current ones are not from "
                f"this sender's registered model. {advice}"
            )
        source = self._source_of(unwrap(self._model))
        if source.ranks is not None:
            raise WeightSyncStateError(
                f"New servers wait for weights, which ranks hold together. {advice}"
            )
        plan = self._plan(source)
        if self._is_trained(plan):
            raise WeightSyncStateError(
                f"New servers wait for weights, and the registered model was trained "
                f"since the last update. {advice}"
            )
        return plan, report.version

    def _is_trained(self, plan: UpdatePlan) -> bool:
        """Reads the registered model; returns whether the last update sent another."""
        deque(plan.tensors.read(), maxlen=0)
        return not are_equal(self._sent, plan.fingerprints)

    def _source_of(self, weights: UserWeights) -> Source:
        """Returns the source of weights: whole ones, or a LoRA adapter alone."""
        return choose_source(weights, self._options, self._cache, self._takes_adapter)

    def _takes_adapter(self, adapter: Source) -> bool:
        engine = self._engine
        if not engine.capabilities.has_lora:
            return False
        engine.look_at_servers()
        problem = engine.base_problem
        return problem is None and adapter_fits(adapter, engine.capabilities.args)

    @cached_property
    def _served(self) -> ServedTensors:
        engine = self._engine
        return ServedTensors(
            metadata=engine.get_model_metadata(),
            fused=engine.get_fused_parameters(),
            quantized=engine.capabilities.quantized,
        )

    def _plan(self, source: Source) -> UpdatePlan:
        served = None if source.adapter is not None else self._served
        registered = source.origin.value is self._model
        return plan_update(
            source, served, self._options, fingerprinted=registered, cache=self._cache
        )

    def _send_until(
        self, source: Source, verify: bool, *, counts: bool = True
    ) -> SyncReport:
        """Sends weights; again, if a server ends meanwhile that is started again.

        ``counts``: collectors are going to count this update.
        """
        deadline = time.monotonic() + self._options.restart_timeout
        lost: WeightTransferError | None = None
        while True:
            try:
                return self._attempt(source, verify, deadline, lost, counts=counts)
            except WeightTransferError as error:
                # An iterator cannot be sent a second time.
                weights = source.origin
                if not error.server_lost or isinstance(weights.value, Iterator):
                    raise
                lost = error
            source = self._source_of(weights)

    def _attempt(
        self,
        source: Source,
        verify: bool,
        deadline: float,
        lost: WeightTransferError | None,
        *,
        counts: bool,
    ) -> SyncReport:
        """Sends weights once; ``lost``: why the attempt before has failed."""
        # Servers may read the other ranks' memory until the next update.
        self._memory_of_ranks = source.ranks

        def send(source: Source) -> SyncReport:
            self._wait_for_servers(deadline, lost)
            try:
                return self._send(source, verify, counts=counts)
            except WeightTransferError as error:
                # ``server_lost`` reaches all ranks, so that all repeat it or none.
                if (
                    _may_be_lost(error)
                    and self._is_restarting()
                    and time.monotonic() < deadline
                ):
                    raise error.replace(server_lost=True) from error.__cause__
                raise

        try:
            if source.ranks is None:
                return send(source)
            report: SyncReport = source.ranks.update(source, send, self._take_part)
            return report
        except BaseException:
            self._cache.forget()
            raise

    def _take_part(self, source: Source, message: Participation) -> None:
        """Sends, on another rank, its part of the first one's transfer."""
        ranks, problem, weights = source.ranks, None, None
        try:
            weights = plan_update(source, message.served, self._options).weights
        except Exception as error:  # noqa: BLE001 - The first rank raises it.
            problem = f"Rank {ranks.position} of the trainer: {error}"
        if ranks.agree(problem) is None and weights is not None:
            message.plan.take_part(weights, ranks)
        else:
            ranks.outcome = ranks.share(None)

    def _is_restarting(self) -> bool:
        """Returns whether this engine starts a server again that it has just lost."""
        # A connection breaks a moment before the process has ended.
        soon = time.monotonic() + END_SECONDS * self._scheme.owns_servers
        while not (down := self._engine.restarting) and time.monotonic() < soon:
            time.sleep(0.05)
        return bool(down)

    def _wait_for_servers(
        self, deadline: float, lost: WeightTransferError | None
    ) -> None:
        """Waits for servers that are started again, as the options say.

        Raises:
            WeightTransferError: if they are not there in time; nothing was sent.
        """
        engine, options = self._engine, self._options
        down = engine.restarting
        needed = lost or options.wait_for == "all" or not engine.control.urls
        if not (down and needed and options.restart_timeout):
            return
        torchrl_logger.warning(
            f"A weight update waits for {', '.join(down)}, which is started again."
            + (f" {lost}" if lost else "")
        )
        try:
            engine.revive(timeout=max(deadline - time.monotonic(), 1.0))
        except (ServerError, WeightSyncStateError) as error:
            raise WeightTransferError(
                f"Servers that were started again are not there, so nothing was sent; "
                f"the update can be tried again. {error}",
                untouched=lost is None or lost.untouched,
            ) from error

    def _is_idle_copy(self, weights: UserWeights) -> bool:
        """Returns whether another rank of DistributedDataParallel sends."""
        return weights.is_copy and not self._scheme.owns_servers

    def _send(self, source: Source, verify: bool, *, counts: bool) -> SyncReport:
        engine = self._engine
        if source.adapter is None:
            engine.look_at_servers()
        plan = self._plan(source)
        self._sent = plan.fingerprints
        # From here on no other update can take the version.
        with engine.weight_update() as update:
            version = self._next_version()
            weights, check = plan.weights, None
            if verify:
                weights, check = watch(engine, weights, source.origin, version=version)
            announce = (
                self._collectors.announce if counts else self._collectors.announce_again
            )
            announce(version)

            def choose_again() -> str:
                other = self._next_version()
                if counts:
                    # The first one may be the other trainer's.
                    self._collectors.withdraw()
                announce(other)
                return other

            transport = plan.transport_to(engine, self.transport)
            if source.adapter is None:
                self.transport = transport
            return session.update_weights(
                engine,
                transport,
                weights,
                version=version,
                pause_mode=self._options.pause_mode,
                flush=self._options.flush_cache,
                verify=check,
                control_timeout=self._options.control_timeout,
                held=update,
                choose_again=choose_again,
            )

    def recover(self) -> SyncReport:
        """Brings the servers back to the checkpoint that they were started with.

        For a trainer that gives up after a failed update, and for the successor of a
        trainer that was killed: whatever the servers hold, they generate with whole
        weights afterwards. These have a new version, which every registered collector
        counts. Servers that this engine owns and that do not answer are restarted.

        Raises:
            UnsupportedByServerError: if the servers were started with
                ``load_format="dummy"``; their weights stay inconsistent.
            WeightTransferError: if a server cannot load its checkpoint; likewise.
            ServerTimeoutError: if a server that this engine does not own does not
                answer.
            WeightSyncStateError: if an update is in flight, or weights are asleep.

        Examples:
            >>> sender = SGLangWeightSyncScheme(engine).create_sender()
            >>> sender.recover().transport
            'checkpoint'
        """
        engine, pause_mode = self._engine, self._options.pause_mode
        checkpoint_path(engine)
        # From here on the servers have others than the registered model's.
        self._sent_registered = False
        with engine.weight_update():
            # No update is in flight.
            self.shutdown()

        def load() -> SyncReport:
            # Restarted servers belong to an update only if it begins later.
            engine.revive()
            # For the report alone; the servers read the files.
            specs = tuple(specs_of(engine.get_model_metadata()).values())
            weights = Weights(
                specs=specs, read=lambda: iter(()), device=CPU, stable=True
            )
            with engine.weight_update() as update:
                version = self._next_version()
                self._collectors.announce(version)
                return session.update_weights(
                    engine,
                    CheckpointTransport(engine, self._options),
                    weights,
                    version=version,
                    pause_mode="retract" if pause_mode == "none" else pause_mode,
                    control_timeout=self._options.control_timeout,
                    held=update,
                )

        with self._totals.counting_failures(), self._collectors.announced():
            try:
                report = load()
            except WeightTransferError as error:
                if not _server_was_lost(error):
                    raise
                # It ended between the two.
                report = load()
        return self._count(report)

    def _count(self, report: SyncReport, counts_itself: Any = None) -> SyncReport:
        """Counts one policy version on every collector, and gives it the report."""
        self._last_report = report
        if report.transport != "none":
            self._totals.add(report)
        self._collectors.count(report, counts_itself)
        return report

    def resolve(self, weights: Any = None) -> Any:
        """Returns the weights to send: those given, or the registered model."""
        value = self._model if weights is None else weights
        if value is None:
            raise WeightSyncStateError(
                "There are no weights to send: give the model that is trained, "
                "SGLangWeightSyncScheme(engine, model), or give weights."
            )
        return value

    def _next_version(self) -> str:
        # Versions only grow, whoever updates and however often the trainer or a server
        # is restarted, so the servers are asked as well.
        engine, timeout = self._engine, self._options.control_timeout
        try:
            versions = run_sync(engine.control.weight_versions(timeout=timeout))
            held: Sequence[tuple[str, ...]] = ()
            if engine.capabilities.has_lora:
                held = run_sync(engine.control.adapters(timeout=timeout))
        except ServerError as error:
            raise WeightTransferError(
                f"The servers could not be asked which weights they hold, so nothing "
                f"was sent; the update can be tried again. {error}",
                untouched=True,
            ) from error
        # Senders publish theirs; a user's own has whatever version it was given.
        version_of = {
            name: parse_served_name(name).version or "" for name in chain(*held)
        }
        published = [version_of[name] for name in version_of if is_published(name)]
        self._warn_of_others([*versions, *published])
        versions += version_of.values()
        versions += [adapter.version or "" for adapter in engine.adapters.values()]
        versions += [str(count) for count in self._collectors.counts()]
        versions += [engine.weight_version, engine.newest_version]
        version = next_version(versions)
        self._chosen.append(version)
        return version

    def _warn_of_others(self, served: Sequence[str]) -> None:
        """Warns once of weights that another sender has sent since the last update."""
        if self._warned or not self._chosen:
            return
        first = version_order(self._chosen[0])
        for version in served:
            if version_order(version) > first and version not in self._chosen:
                self._warned = True
                torchrl_logger.warning(
                    f"The servers at {self._engine.server_url} have weights of version "
                    f"{version!r}, and this sender's last update was version "
                    f"{self._chosen[-1]!r}: another trainer, or another sender of this "
                    f"one, updates these servers, too. What was generated in between "
                    f"is of its weights. Give each trainer servers of its own, and "
                    f"send all updates of a trainer with one sender. This is said once."
                )
                return

    def flush_cache(self) -> bool:
        """Empties the prefix caches, as updates do; False if a server is too busy."""
        return self._engine.flush_cache()

    def shutdown(self) -> None:
        """Leaves the servers' process group. Safe to call twice."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None


def _may_be_lost(error: BaseException | None) -> bool:
    """Returns whether an error can come of a server that is gone: none has answered.

    A collective with it breaks with an error of its own.
    """
    answers = (RequestRefusedError, ServerTimeoutError)
    return not any(isinstance(cause, answers) for cause in _causes(error))


def _server_was_lost(error: BaseException | None) -> bool:
    """Returns whether an error comes of a server that is gone."""
    return any(isinstance(cause, ServerUnavailableError) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes, each once: a chain may be a circle."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
