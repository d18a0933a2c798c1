"""The trainer's side: which model, which servers, and the versions that it counts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine, WeightUpdate
from torchrl_sglang.backends.lora.registry import parse_served_name
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.backends.support.versions import next_version
from torchrl_sglang.errors import (
    ServerError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.types import FusedParameter, ModelMetadata, SyncReport
from torchrl_sglang.weight_update import recovery, session
from torchrl_sglang.weight_update.ranks import find_ranks, is_copy
from torchrl_sglang.weight_update.sources.lora import adapter_source, is_plain_lora
from torchrl_sglang.weight_update.sources.source import (
    Remembered,
    check_metadata,
    find_source,
    open_weights,
)
from torchrl_sglang.weight_update.sources.tensors import Source
from torchrl_sglang.weight_update.transports import make_transport
from torchrl_sglang.weight_update.transports.base import WeightTransport
from torchrl_sglang.weight_update.transports.lora import LoraTransport
from torchrl_sglang.weight_update.verify import Verifier

if TYPE_CHECKING:
    from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

__all__ = ["SGLangWeightSender"]


class SGLangWeightSender:
    """Sends weights to all servers of an engine.

    Make one with :meth:`SGLangWeightSyncScheme.create_sender`.

    Examples:
        >>> sender = SGLangWeightSyncScheme(engine).create_sender()
        >>> sender.register_model(model)
        >>> report = sender.update_weights()
        >>> report.version == engine.weight_version
        True
        >>> sender.shutdown()
    """

    def __init__(self, scheme: SGLangWeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: Any = None
        self._metadata: ModelMetadata | None = None
        self._fused: dict[str, FusedParameter] = {}
        self._remembered = Remembered()
        self._transport: WeightTransport | None = None
        self._reason = ""
        self._collectors: list[Any] = []
        self._verifier: Verifier | None = None
        self._last_report: SyncReport | None = None

    @property
    def last_report(self) -> SyncReport | None:
        """What the last update did; ``None`` before the first."""
        return self._last_report

    def register_model(self, model: Any) -> None:
        """Names the model whose weights are sent when none are given.

        Args:
            model: a module, or a wrapper of TorchRL around one.
        """
        self._model = model

    def register_collector(self, collector: Any) -> None:
        """Names a collector whose policy version counts updates, once each.

        Args:
            collector: has ``increment_version()`` and ``policy_version``, as those of
                TorchRL do. Its ``last_sync_report`` is set to what each update did.
        """
        if all(known is not collector for known in self._collectors):
            self._collectors.append(collector)

    def init_all_workers_group(
        self,
        model_metadata: ModelMetadata | None = None,
        vllm_engine: RLSGLangEngine | None = None,
    ) -> None:
        """Meets the servers now instead of at the first update.

        Args:
            model_metadata: name -> (dtype, shape) of what will be sent, checked
                against the served model.
            vllm_engine: the engine, under the name that TorchRL's recipes use; the
                same one as the scheme's, if that was given one.

        Raises:
            WeightMismatchError: if the metadata does not fit the served model.
            WeightTransferError: if the servers do not come.
        """
        if vllm_engine is not None:
            self._scheme.use_engine(vllm_engine)
        if self._model is not None and self._is_left_to_another(self._model):
            return
        if self._model is not None and self._sends_adapter(self._model):
            # An adapter travels in the requests themselves.
            return
        if model_metadata is not None:
            check_metadata(model_metadata, self._served(), self._fused)
        device = self._scheme.device
        if device is None:
            source = find_source(self.resolve(), self._remembered)
            device = open_weights(source, self._served(), self._fused).device
        self._get_transport(device).connect()

    def update_weights(
        self, weights: Any = None, *, verify: bool | None = None
    ) -> SyncReport:
        """Sends weights, and counts a policy version on every registered collector.

        The servers' new version is the policy version that the collectors then have,
        where these count in numbers and where no server has had that version before;
        otherwise it is the next number that no server has had.

        Args:
            weights: by default the registered model's. One of

                - a module, or a wrapper of TorchRL around one; names that DDP,
                  ``torch.compile`` and activation checkpointing give are understood,
                  and adapters of PEFT are merged layer by layer as they are sent;
                - a state dict, or a flat or nested TensorDict;
                - a list or an iterator of (name, tensor);
                - an exporter: a function without arguments that returns such an
                  iterator, or an object that gives a new one whenever it is iterated
                  over. One bucket of its tensors is alive at a time. The first update
                  runs through it once more before it sends, to check names and shapes;
                  give the same object every time.

                Other floating-point types are cast to the served one, tied weights
                are sent once, and fused experts in the pieces of a checkpoint.
            verify: whether to compare servers and trainer afterwards; by default what
                the scheme says.

        Raises:
            WeightMismatchError: if they do not fit the served model; nothing was sent.
                Or if they were sent, and verification found others on a server: it is
                paused, and the engine refuses to generate until an update succeeds.
            WeightTransferError: if sending failed; see its ``untouched``.
            WeightSyncStateError: if there is nothing to send, or another update is
                under way.
            UnsupportedByServerError: if verification has nothing to compare; nothing
                was sent.

        Note:
            Where a model is spread over ranks (FSDP2's ``fully_shard``, or DTensors
            otherwise), **every** rank of its mesh calls this. They gather one bucket
            at a time; the first rank sends it, and needs the servers; all return its
            report or raise its error. A rank waits for a slow server as long as the
            process group's own timeout allows, so give that at least ``send_timeout``.

            With DistributedDataParallel every rank may call, and rank 0 sends: the
            others return a report with ``transport="none"`` at once, unless they have
            started servers of their own. Give ``ddp.module`` to send from a rank in
            any case. A model of one rank is sent by that rank, whatever process groups
            there are.

        Examples:
            >>> sender = SGLangWeightSyncScheme(engine).create_sender()
            >>> def export():
            ...     for name, parameter in model.named_parameters():
            ...         yield name, parameter.float()
            >>> report = sender.update_weights(export)
            >>> report.num_tensors == len(get_model_metadata(model))
            True
            >>> sender.shutdown()
        """
        return self._update(weights, verify=verify)

    def send(self, weights: Any = None) -> SyncReport:
        """The same for a collector that sends through its own scheme and counts itself.

        Every other one is counted here.
        """
        return self._update(weights, counts_itself=self._scheme.context)

    def _update(
        self, weights: Any, *, verify: bool | None = None, counts_itself: Any = None
    ) -> SyncReport:
        given = self.resolve(weights)
        if is_copy(given) and not self._scheme.owns_servers:
            return self._count(_nothing_sent(), counts_itself)
        if verify is None:
            verify = self._scheme.verify
        config = None
        if self._sends_adapter(given):
            source, config = adapter_source(given)
        else:
            source = find_source(given, self._remembered)

        def send(source: Source) -> SyncReport:
            if config is None:
                return self._transfer(source, given, verify)
            return self._publish(source, config, given, verify)

        ranks = find_ranks(source, self._scheme.process_group)
        try:
            report = send(source) if ranks is None else ranks.update(source, send)
        except BaseException:
            self._remembered.forget()
            raise
        return self._count(report, counts_itself)

    def _sends_adapter(self, given: Any) -> bool:
        """Returns whether only a LoRA adapter travels.

        With ``"auto"``, that of a model of one rank whose servers take adapters.
        """
        if self._scheme.transport != "auto" or not is_plain_lora(given):
            return self._scheme.transport == "lora"
        source = find_source(given, self._remembered)
        if find_ranks(source, self._scheme.process_group) is not None:
            # Every rank must come to the same answer, and only one sees the servers.
            return False
        engine = self._scheme.engine
        if engine.capabilities.has_lora:
            engine.look_at_servers()
        return (
            engine.capabilities.has_lora
            and engine.base_problem is None
            and is_plain_lora(given, engine.capabilities.server_args)
        )

    def _publish(
        self, source: Source, config: dict[str, Any], given: Any, verify: bool
    ) -> SyncReport:
        """Sends an adapter; generation goes on with the older one meanwhile."""
        engine = self._scheme.engine
        transport = LoraTransport(
            engine,
            self._scheme.adapter,
            pinned=self._scheme.pin_adapter,
            timeout=self._scheme.send_timeout,
        )
        start = time.perf_counter()
        tensors = dict(
            source.read({name: known.dtype for name, known in source.found.items()})
        )
        with engine.weight_update() as update:
            self._check_base(update)
            version = self._next_version()
            check = None
            if verify:
                check = Verifier(engine).watch_adapter(given, version=version)
            transport.publish(tensors, config, version)
            sent = time.perf_counter()
            if check is not None:
                try:
                    check(engine.adapters[self._scheme.adapter].served_as)
                except BaseException as error:
                    update.mark_inconsistent(str(error) or type(error).__name__)
                    raise
        return SyncReport(
            version=version,
            transport=transport.name,
            reason="transport='lora' was given."
            if self._scheme.transport == "lora"
            else "The model trains a LoRA adapter, and the servers take adapters.",
            num_tensors=len(tensors),
            num_bytes=sum(each.numel() * each.itemsize for each in tensors.values()),
            num_buckets=1,
            seconds=time.perf_counter() - start,
            phase_seconds={
                "send": sent - start,
                **({} if check is None else {"verify": time.perf_counter() - sent}),
            },
        )

    def _check_base(self, update: WeightUpdate) -> None:
        """Checks that an adapter alone makes the policy.

        Raises:
            WeightSyncStateError: if nothing generates with the base weights.
        """
        problem = self._scheme.engine.base_problem
        if problem is None:
            return
        if update.was_inconsistent:
            raise WeightSyncStateError(
                f"A LoRA adapter alone does not help: {problem} Bring the base weights "
                f"back with sender.recover(), or send whole weights with another "
                f"transport."
            )
        torchrl_logger.warning(
            f"A LoRA adapter is published over a base that may not be the one that it "
            f"was trained on: {problem}"
        )

    def _transfer(self, source: Source, given: Any, verify: bool) -> SyncReport:
        engine = self._scheme.engine
        engine.look_at_servers()
        found = open_weights(source, self._served(), self._fused)
        # From here on nobody else can take the version.
        with engine.weight_update() as update:
            version = self._next_version()
            check = None
            if verify:
                if self._verifier is None:
                    self._verifier = Verifier(engine)
                found, check = self._verifier.watch(found, given, version=version)
            return session.update_weights(
                engine,
                self._get_transport(self._scheme.device or found.device),
                found,
                version=version,
                pause_mode=self._scheme.pause_mode,
                flush=self._scheme.flush_cache,
                verify=check,
                reason=self._reason,
                control_timeout=self._scheme.control_timeout,
                held=update,
            )

    def _is_left_to_another(self, model: Any) -> bool:
        """Returns whether another rank sends a model; needs no server."""
        if is_copy(model):
            return not self._scheme.owns_servers
        source = find_source(model, self._remembered)
        ranks = find_ranks(source, self._scheme.process_group)
        return ranks is not None and not ranks.sends

    def recover(self) -> SyncReport:
        """Brings the servers back to the checkpoint that they were started with.

        For a trainer that gives up after an update that failed, and for one that comes
        after a trainer that was killed: whatever the servers hold, they generate again
        afterwards, with whole weights. These have a new version, and every registered
        collector counts it. Servers that this engine owns and that do not answer are
        started again first.

        Returns:
            What was done; ``transport`` is ``"checkpoint"``.

        Raises:
            UnsupportedByServerError: if the servers were started with
                ``load_format="dummy"``; their weights stay inconsistent.
            WeightTransferError: if a server cannot load its checkpoint; likewise.
            ServerTimeoutError: if a server that this engine does not own does not
                answer.
            WeightSyncStateError: if an update is under way, or weights are asleep.

        Examples:
            >>> sender = SGLangWeightSyncScheme(engine).create_sender()
            >>> sender.recover().transport
            'checkpoint'
        """
        engine = self._scheme.engine
        recovery.checkpoint_path(engine)
        with engine.weight_update():
            # Nobody is in the middle of an update.
            self._drop_transport()
        # Servers that are started again belong to an update only if it begins later.
        engine.revive()
        with engine.weight_update() as update:
            report = recovery.recover(
                engine,
                version=self._next_version(),
                pause_mode=self._scheme.pause_mode,
                held=update,
            )
        return self._count(report)

    def _count(self, report: SyncReport, counts_itself: Any = None) -> SyncReport:
        """Counts one policy version on every collector, and tells it what was done."""
        self._last_report = report
        uncounted = []
        for collector in self._all_collectors():
            try:
                collector.last_sync_report = report
                if collector is not counts_itself:
                    collector.increment_version()
            except Exception as error:  # noqa: BLE001 - A remote one raises anything.
                uncounted.append(f"{type(collector).__name__}: {error}")
        if uncounted:
            raise WeightSyncStateError(
                f"Weights of version {report.version} are on the servers, and "
                f"collectors could not count them: {'; '.join(uncounted)}"
            )
        return report

    def resolve(self, weights: Any = None) -> Any:
        """Returns what is to be sent: what is given, or the registered model.

        Raises:
            WeightSyncStateError: if none are given and no model is registered.
        """
        source = self._model if weights is None else weights
        if source is None:
            raise WeightSyncStateError(
                "There are no weights to send: register the model that is trained with "
                "sender.register_model(model), or give weights."
            )
        return source

    def _served(self) -> ModelMetadata:
        if self._metadata is None:
            engine = self._scheme.engine
            self._fused = engine.get_fused_parameters()
            self._metadata = engine.get_model_metadata()
        return self._metadata

    def _next_version(self) -> str:
        # Versions are numbers that only grow, whoever updates and however often the
        # trainer or a server is restarted; so the servers are asked as well.
        engine = self._scheme.engine
        timeout = self._scheme.control_timeout
        try:
            current = run_sync(engine.control.weight_versions(timeout=timeout))
            if engine.capabilities.has_lora:
                held = run_sync(engine.control.adapters(timeout=timeout))
                served = {name for each in held for name in each}
                current += [parse_served_name(name).version or "" for name in served]
        except ServerError as error:
            raise WeightTransferError(
                f"The servers could not be asked which weights they hold, so nothing "
                f"was sent; the update can be tried again. {error}",
                untouched=True,
            ) from error
        adapters = [each.version or "" for each in engine.adapters.values()]
        known = [*current, engine.weight_version, engine.newest_version, *adapters]
        counted = [self._policy_version(each) for each in self._all_collectors()]
        return next_version([*known, *map(str, counted)])

    @staticmethod
    def _policy_version(collector: Any) -> int:
        """Returns what a collector counts up to, or 0 if it counts in other things."""
        try:
            version = getattr(collector, "policy_version", None)
        except Exception as error:
            raise WeightSyncStateError(
                f"The registered {type(collector).__name__} does not tell its policy "
                f"version ({type(error).__name__}: {error}); nothing was sent. If it "
                f"has ended, make a new sender."
            ) from error
        return version if isinstance(version, int) else 0

    def _get_transport(self, device: torch.device) -> WeightTransport:
        if self._transport is None:
            self._transport, self._reason = make_transport(self._scheme, device)
        return self._transport

    def _all_collectors(self) -> list[Any]:
        attached = self._scheme.context
        if attached is None or any(attached is known for known in self._collectors):
            return self._collectors
        return [*self._collectors, attached]

    def flush_cache(self) -> bool:
        """Empties the servers' prefix caches; returns False if one is too busy for it.

        Updates do it by themselves.
        """
        return self._scheme.engine.flush_cache()

    def shutdown(self) -> None:
        """Leaves the servers' process group. Safe to call twice."""
        self._drop_transport()

    def _drop_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _nothing_sent() -> SyncReport:
    return SyncReport(
        version="",
        transport="none",
        num_tensors=0,
        num_bytes=0,
        num_buckets=0,
        seconds=0.0,
    )
