"""Order of the control calls of a weight update.

Whole weights: pause → flush → begin → send → end → resume → verify; this engine's
requests are sent again only then. A LoRA adapter is loaded beside the served weights,
so it is only sent and verified.

A failure before the first byte leaves the servers unchanged, and generation continues.
A later failure leaves a mix of old and new weights: the servers stay paused and the
engine refuses to generate until an update succeeds. If a response is lost, the worse
case is assumed.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchrl_sglang.backends.client.capabilities import check_weight_route
from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS, ControlPlane
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.fleet.weights_state import WeightUpdate
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerError,
    SGLangError,
    WeightSyncError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.checks import some_of
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import DraftUpdate, PauseMode, SyncReport, WeightRoute

TAKE_OVER_SECONDS = 20.0
"""After this long, another sender's open session is considered abandoned. ``recover()``
does not wait."""

TAKE_OVER_POLL_SECONDS = 0.2

CLEANUP_SECONDS = 5.0
"""Timeout of each call after a failure, to servers that still answer."""

LOOK_SECONDS = 2.0
"""Timeout for finding the servers that still answer."""


class UpdateContent(Protocol):
    """Contents of an update."""

    @property
    def specs(self) -> Sized:
        """Descriptions of the tensors."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, as they are sent."""

    @property
    def quantized(self) -> str | None:
        """Quantization of the encoded weights."""


class Transfer(abc.ABC):
    """Carries the bytes of updates, and orders nothing."""

    name: str
    """Name of the transport in reports."""
    reason: str = ""
    """Reason why the transport was chosen."""
    route: WeightRoute | None = None
    """Route by which servers load whole weights; ``None``: none are sent."""
    in_session: bool = False
    """Servers take the tensors only between begin and end calls, if they have these."""
    adapter_only: bool = False
    """Whether the transport loads an adapter beside the weights; nothing is paused."""
    is_checkpoint: bool = False
    """Whether servers load their original weights; they may hold half of an update, so
    any failure leaves them inconsistent."""
    draft: DraftUpdate = "auto"
    """Treatment of a draft model."""
    resumes: bool = True
    """Whether servers generate again after the update; otherwise they stay paused."""
    wire_bytes: int | None = None
    """Bytes of the last update's requests to all servers together, where these are not
    the bytes of the tensors."""

    @property
    def connected(self) -> bool:
        """Whether :meth:`send` can be called; False again after a failure."""
        return True

    def connect(self) -> None:  # noqa: B027 - Not every transport connects.
        """Connects to the servers; touches no weights.

        Raises:
            WeightTransferError: if a server refuses or does not answer in time.
            UnsupportedByServerError: if this transport cannot reach these servers.
        """

    @abc.abstractmethod
    def send(self, weights: Any, *, version: str) -> int:
        """Makes every server load the weights; returns the number of transfers."""


def update_weights(
    engine: RLSGLangEngine,
    transport: Transfer,
    weights: UpdateContent,
    *,
    version: str,
    pause_mode: PauseMode,
    verify: Callable[[], None] | None = None,
    flush: bool = True,
    control_timeout: float = CONTROL_TIMEOUT_SECONDS,
    held: WeightUpdate | None = None,
    choose_again: Callable[[], str] | None = None,
) -> SyncReport:
    """Sends weights, or a LoRA adapter, to every server of an engine.

    After whole weights, requests without a LoRA adapter are computed only with these:
    published adapters are dropped from every server before it generates again.

    ``held`` is the engine's weight update, if the caller has begun it. ``"continue"``
    always flushes prefix caches: retracted requests keep the cache key of the old
    version. ``choose_again`` returns another version if another trainer, which may have
    chosen the same, has updated the servers in the meantime.
    """
    start = time.perf_counter()
    if transport.route is not None:
        check_weight_route(
            engine.capabilities,
            transport.route,
            quantized=weights.quantized,
            draft=transport.draft,
        )
    with engine.weight_update() if held is None else nullcontext(held) as update:
        session = _UpdateSession(
            engine=engine,
            update=update,
            transport=transport,
            version=version,
            # The servers' name for it.
            pause_mode="retract" if pause_mode == "continue" else pause_mode,
            timeout=control_timeout,
            verified=verify is not None,
            flush=flush or pause_mode == "continue",
            choose_again=choose_again,
            # After an update that stopped halfway, weights are mixed from the start.
            touched=update.was_inconsistent or transport.is_checkpoint,
        )
        if not transport.connected:
            with session.phase("connect"):
                transport.connect()
        if transport.adapter_only:
            count = session.publish(weights)
        else:
            count = session.replace(weights)
        if verify is not None:
            session.verify(verify)
        # Earlier, all requests would queue on the server that resumes first.
        update.releases_requests()
    version = session.version
    report = SyncReport(
        version=version,
        transport=transport.name,
        reason=transport.reason,
        num_tensors=len(weights.specs),
        num_bytes=weights.num_bytes,
        wire_bytes=transport.wire_bytes,
        num_buckets=count,
        seconds=time.perf_counter() - start,
        phase_seconds=session.seconds,
    )
    torchrl_logger.info(
        f"Weights of version {version} on {len(engine.control.urls)} server(s): "
        f"{report.num_bytes / 1e9:.3f} GB in {report.seconds:.3f} s by "
        f"{report.transport}, {report.gb_per_second:.1f} GB/s while sending."
    )
    return report


@dataclass(kw_only=True)
class _UpdateSession:
    """The state of an update and its servers."""

    engine: RLSGLangEngine
    update: WeightUpdate
    transport: Transfer
    version: str
    pause_mode: PauseMode
    timeout: float
    verified: bool
    """Whether servers and trainer are compared before requests are sent again."""
    flush: bool
    choose_again: Callable[[], str] | None
    touched: bool
    """Whether the servers may hold other weights than at their last generation."""
    committed: bool = False
    """Whether all servers confirmed the new weights."""
    adapter: str | None = None
    opened: set[str] = field(default_factory=set)
    """Servers with a session of this update; ``unclear`` servers may have a session."""
    unclear: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    cleanup: ControlPlane | None = None
    """Control calls after a failure."""

    @property
    def control(self) -> ControlPlane:
        return self.cleanup or self.engine.control

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start

    def publish(self, weights: UpdateContent) -> int:
        """Loads an adapter beside the served weights, while generation continues."""
        problem = self.engine.base_problem
        if problem is not None and self.update.was_inconsistent:
            raise WeightSyncStateError(
                f"A LoRA adapter alone does not help: {problem} Bring the base weights "
                f"back with sender.recover(), or send whole weights with another "
                f"transport."
            )
        if problem is not None:
            torchrl_logger.warning(
                f"A LoRA adapter is published over a base that may not be the one that "
                f"it was trained on: {problem}"
            )
        with self.phase("send"):
            count = self.transport.send(weights, version=self.version)
        self.update.replaced_adapter()
        return count

    def replace(self, weights: UpdateContent) -> int:
        """Replaces the served weights; a failure leaves the servers safe."""
        try:
            with self.phase("pause"):
                self._pause()
                self._drop_default_adapter()
            if self.flush:
                with self.phase("flush"):
                    self._flush()
            count = self._send(weights)
            if self.control.capabilities.has_lora:
                with self.phase("withdraw"):
                    self.engine.withdraw_adapters(timeout=self.timeout)
            self.update.commit(self.version, checkpoint=self.transport.is_checkpoint)
            self.committed = True
            # A failed update, or released memory, may have left them paused.
            paused = self.pause_mode != "none" or self.control.paused
            if self.transport.resumes and paused:
                with self.phase("resume"):
                    self._resume(self.timeout)
        except SGLangError as error:
            raise self._clean_up(error) from error
        except BaseException as error:
            self._clean_up(error)
            raise
        return count

    def verify(self, check: Callable[[], None]) -> None:
        """Compares servers and trainer, where servers generate."""
        if self.engine.asleep and not self.transport.adapter_only:
            torchrl_logger.warning(
                f"Weights of version {self.version} were not verified: nothing "
                f"generates while {', '.join(sorted(self.engine.asleep))} is asleep."
            )
            return
        adapter_only = self.transport.adapter_only
        with self.phase("verify"):
            try:
                check()
            except BaseException as error:
                self.update.mark_inconsistent(_text(error), base_intact=adapter_only)
                if not adapter_only:
                    self._stay_paused()
                if not isinstance(error, ServerError):
                    raise
                raise WeightTransferError(
                    f"Weights of version {self.version} were sent, and servers could "
                    f"not be asked whether they have them: {error} The engine refuses "
                    f"to generate until a weight update succeeds; send the weights "
                    f"again.",
                    untouched=False,
                ) from error

    def _pause(self) -> None:
        if self.pause_mode == "retract" and not self.control.paused:
            self.update.holds_requests()
            self.update.aborts_requests()
            # Unverified weights generate nothing.
            self.engine.interrupt_requests(timeout=self.timeout, keep=not self.verified)
        if self.pause_mode != "none":
            if self.pause_mode == "in_place":
                self.update.keeps_requests()
            run_sync(self.control.pause(self.pause_mode, timeout=self.timeout))
            return
        # The engine refuses to generate from here on, and nothing may be running.
        if not self.update.was_inconsistent:
            self.update.mark_inconsistent(
                "A weight update without a pause is in flight."
            )
        running = run_sync(self.control.running_requests(timeout=self.timeout))
        if running:
            raise WeightSyncStateError(
                f"{running} request(s) run, and pause_mode='none' pauses none of them; "
                f"wait for them to end, or use pause_mode='continue'."
            )

    def _drop_default_adapter(self) -> None:
        published = self.engine.published_adapters(timeout=self.timeout)
        if published or self.engine.default_adapter is not None:
            self.adapter = self.engine.default_adapter
            self._select(None, self.pause_mode, self.timeout)

    def _select(self, adapter: str | None, mode: PauseMode, timeout: float) -> None:
        """Changes the adapter of requests, also on paused servers."""
        self.engine.default_adapter = adapter
        if mode == "in_place":
            # A server paused in place does not end running requests.
            run_sync(self.control.pause("retract", timeout=timeout))
        self._abort_all(timeout)

    def _abort_all(self, timeout: float) -> None:
        """Aborts all requests; this engine sends its own again, with the new state."""
        self.update.aborts_requests()
        run_sync(self.control.abort_all(timeout=timeout))

    def _flush(self) -> None:
        """Empties the prefix caches.

        New requests carry the new weight version as a key and hit no older entry.
        Retracted requests carry the old version and would hit their own prefix, so they
        are aborted and sent again if a cache cannot be flushed while they wait.
        """
        flushed = run_sync(self.control.flush_cache(timeout=self.timeout))
        if not flushed and self.pause_mode == "retract":
            self._abort_all(self.timeout)
            flushed = run_sync(self.control.flush_cache(timeout=self.timeout))
        if flushed and self.pause_mode != "none":
            # Requests of other clients wait.
            self.update.flushed()

    def _send(self, weights: UpdateContent) -> int:
        """Sends the weights, in an update session if the transport needs one."""
        in_session = self.transport.in_session
        if in_session:
            with self.phase("begin"):
                if self._begin():
                    self._follow_another_update()
        with self.phase("send"):
            try:
                count = self.transport.send(weights, version=self.version)
            except BaseException as error:
                if not (isinstance(error, WeightTransferError) and error.untouched):
                    self.touched = True
                raise
        self.touched = True
        if in_session:
            with self.phase("end"):
                run_sync(self.control.end_weight_update(timeout=self.timeout))
        return count

    def _follow_another_update(self) -> None:
        """Begins again after the end of another sender's session."""
        if self.choose_again is not None:
            self.version = self.choose_again()
        if self.pause_mode == "none":
            return
        # Generation was resumed, and has filled the caches.
        run_sync(self.control.pause(self.pause_mode, timeout=self.timeout))
        if self.flush:
            self._flush()

    def _begin(self) -> bool:
        """Opens a session on every server; returns whether another sender had any.

        It waits for such a session, and closes it when its sender seems to be gone.
        """
        deadline = time.monotonic() + min(self.timeout, TAKE_OVER_SECONDS)
        waiting = list(self.control.urls)
        is_foreign = closed = False
        while True:
            outcomes = self._open_sessions(waiting, self.timeout)
            waiting = [url for url, error in outcomes.items() if _is_open(error)]
            late = time.monotonic() >= deadline
            for error in outcomes.values():
                if error is not None and (not _is_open(error) or (late and closed)):
                    raise error
            if not waiting:
                return is_foreign
            # An abandoned session may have left half of its weights.
            self.touched = is_foreign = True
            if not late:
                time.sleep(TAKE_OVER_POLL_SECONDS)
                continue
            closed = True
            # Its sender may have closed it just now.
            with suppress(RequestRefusedError):
                run_sync(
                    self.control.end_weight_update(timeout=self.timeout, urls=waiting)
                )

    def _open_sessions(
        self, urls: list[str], timeout: float
    ) -> dict[str, SGLangError | None]:
        """Opens sessions on servers, and records successes."""
        # Unclear until the response, also if this is interrupted.
        self.unclear |= set(urls)
        outcomes = run_sync(
            self.control.begin_weight_update_on_each(
                urls, timeout=timeout, draft=self.transport.draft
            )
        )
        # Servers without sessions have no outcome.
        self.unclear -= set(urls)
        for url, error in outcomes.items():
            if error is None:
                self.opened.add(url)
            elif not isinstance(error, RequestRefusedError):
                self.unclear.add(url)
        return outcomes

    def _resume(self, timeout: float) -> None:
        """Resumes generation; repeats the harmless call if its response was lost."""
        try:
            run_sync(self.control.resume(timeout=timeout))
        except ServerError as error:
            # Where the process has ended, what still answers at its address is not the
            # server that requests are sent to.
            if not {*self.engine.restarting}.isdisjoint(self.control.urls):
                raise
            torchrl_logger.debug(f"Generation is resumed once more: {error}")
            run_sync(self.control.resume(timeout=min(timeout, CLEANUP_SECONDS)))

    def _clean_up(self, error: BaseException) -> WeightSyncError:
        """Leaves the servers safe after a failure, and returns the error to raise."""
        failure = problem = _text(error) + self._look()
        if self.touched:
            self.update.mark_inconsistent(problem)
        if self._close_sessions() or (not self.touched and self._others_update()):
            self.touched = True
        outcome = _NOT_RESUMED if self.committed else _MIXED
        safe = not self.touched
        if safe:
            self.update.abort()
            outcome = _RESTORED
            try:
                self._restore()
            except SGLangError as secondary:
                safe = False
                not_resumed = f"generation could not be resumed: {secondary}"
                problem = f"{failure} And {not_resumed}"
                outcome = (
                    f"The servers still hold the old weights, and {not_resumed} Send "
                    f"the weights again."
                )
        if not safe:
            self.update.mark_inconsistent(problem)
            # A server, gone now, may come back with it.
            self.update.reserve(self.version)
            # Other clients of the servers do not know about the inconsistency.
            self._stay_paused()
        kind = (
            type(error) if isinstance(error, WeightSyncError) else WeightTransferError
        )
        if issubclass(kind, WeightTransferError):
            return kind(f"{failure} {outcome}", untouched=not self.touched)
        return kind(f"{failure} {outcome}")

    def _look(self) -> str:
        """Finds the servers that still answer; returns a sentence about the others."""
        self.cleanup = run_sync(self.engine.control.impatient(timeout=LOOK_SECONDS))
        silent = ", ".join(some_of(sorted(self.cleanup.silent or ())))
        return f" No answer comes from {silent}." if silent else ""

    def _restore(self) -> None:
        """Lets untouched servers generate as before."""
        if self.adapter is not None and self.engine.default_adapter is None:
            self._select(self.adapter, "retract", CLEANUP_SECONDS)
        if self.transport.resumes and self.control.paused:
            self._resume(CLEANUP_SECONDS)

    def _close_sessions(self) -> bool:
        """Closes this update's sessions; returns whether an unclear server had any."""
        outcomes = run_sync(
            self.control.end_weight_update_on_each(
                sorted(self.opened | self.unclear), timeout=CLEANUP_SECONDS
            )
        )
        for error in filter(None, outcomes.values()):
            torchrl_logger.debug(f"After a failed weight update: {error}")
        refused = {u for u, e in outcomes.items() if isinstance(e, RequestRefusedError)}
        return not self.unclear <= refused

    def _others_update(self) -> bool:
        """Tries to open sessions; returns whether another sender has a session."""
        urls = [
            url for url in self.control.urls if url not in self.opened | self.unclear
        ]
        self.opened, self.unclear = set(), set()
        outcomes = self._open_sessions(urls, CLEANUP_SECONDS)
        self._close_sessions()
        return any(_is_open(error) for error in outcomes.values())

    def _stay_paused(self) -> None:
        try:
            run_sync(self.control.pause("retract", timeout=CLEANUP_SECONDS))
        except SGLangError as error:
            torchrl_logger.debug(f"An inconsistent server could not be paused: {error}")


_NOT_RESUMED = (
    "The servers hold the new weights, and generation could not be resumed; send the "
    "weights again."
)
_MIXED = (
    "The servers may hold a mix of old and new weights. They stay paused, and the "
    "engine refuses to generate until a weight update succeeds; send the weights again."
)
_RESTORED = (
    "The servers still hold the old weights and generate with them; the update can be "
    "tried again."
)


def _is_open(error: SGLangError | None) -> bool:
    return isinstance(error, RequestRefusedError) and "already open" in str(error)


def _text(error: BaseException) -> str:
    """Returns an error as a complete sentence."""
    # An interrupt has no text.
    text = str(error).rstrip() or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
