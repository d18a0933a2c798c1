"""Orders the calls of one weight update; nothing else does.

Whole weights: pause → flush → begin → send → end → resume → verify. A LoRA adapter is
loaded beside the served weights, so it is only sent and verified.

A failure before the first byte leaves the servers as they were, and generation goes on.
A later one leaves a mix of old and new weights: the servers stay paused and the engine
refuses to generate until an update succeeds. Where an answer is lost, the worse is
assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import (
    CONTROL_TIMEOUT_SECONDS,
    RLSGLangEngine,
    WeightUpdate,
)
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerError,
    SGLangError,
    WeightSyncError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.types import PauseMode, SyncReport
from torchrl_sglang.weight_update.transports.base import WeightTransport
from torchrl_sglang.weight_update.weights import Weights

__all__ = ["update_weights"]

TAKE_OVER_SECONDS = 20.0
"""After this long, another sender's open session is considered abandoned. ``recover()``
does not wait."""

TAKE_OVER_POLL_SECONDS = 0.2
"""How often another sender's session is polled."""

CLEANUP_SECONDS = 5.0
"""Timeout of each call after a failure."""


def update_weights(
    engine: RLSGLangEngine,
    transport: WeightTransport,
    weights: Weights,
    *,
    version: str,
    pause_mode: PauseMode,
    verify: Callable[[], None] | None = None,
    flush: bool = True,
    whole: bool = True,
    reason: str = "",
    control_timeout: float = CONTROL_TIMEOUT_SECONDS,
    held: WeightUpdate | None = None,
    checkpoint: bool = False,
) -> SyncReport:
    """Sends weights, or a LoRA adapter, to every server of an engine.

    After whole weights, requests that select no LoRA adapter are computed with these
    alone: published adapters are dropped from every server before it generates again,
    and requests in flight are sent again without them.

    ``held`` is the engine's weight update, if the caller has begun it. ``whole=False``:
    the servers may hold half of an update, so any failure leaves them inconsistent.
    ``checkpoint``: the weights are those that the servers were started with.
    ``"retract"`` flushes the prefix caches without ``flush``, too: retracted requests
    keep the cache key of the old version.
    """
    start = time.perf_counter()
    with engine.weight_update() if held is None else nullcontext(held) as update:
        session = _Session(
            engine, update, transport, version, pause_mode, control_timeout
        )
        if not transport.connected:
            with session.phase("connect"):
                transport.connect()
        # What an earlier update left half done is not made whole by sending nothing.
        session.touched = update.was_inconsistent or not whole
        if transport.adapter_only:
            count = session.publish(weights)
        else:
            count = session.replace(weights, flush=flush, checkpoint=checkpoint)
        session.verify(verify)
    report = SyncReport(
        version=version,
        transport=transport.name,
        reason=reason,
        num_tensors=len(weights.specs),
        num_bytes=weights.num_bytes,
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


class _Session:
    """One update, and what is known of the servers meanwhile."""

    def __init__(
        self,
        engine: RLSGLangEngine,
        update: WeightUpdate,
        transport: WeightTransport,
        version: str,
        pause_mode: PauseMode,
        timeout: float,
    ) -> None:
        self._engine = engine
        self._control = engine.control
        self._update = update
        self._transport = transport
        self._version = version
        self._pause_mode = pause_mode
        self._timeout = timeout
        self.seconds: dict[str, float] = {}
        # The servers may hold other weights than when they last generated.
        self.touched = False
        # All servers said that they hold the new weights.
        self._committed = False
        # The adapter that requests carried before.
        self._adapter: str | None = None
        # Servers with a session of this update, and those whose answer was lost.
        self._opened: set[str] = set()
        self._unclear: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start

    def publish(self, weights: Weights) -> int:
        """Loads an adapter beside the served weights, while generation goes on."""
        problem = self._engine.base_problem
        if problem is not None and self._update.was_inconsistent:
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
            return self._transport.send(weights, version=self._version)

    def replace(self, weights: Weights, *, flush: bool, checkpoint: bool) -> int:
        """Replaces the served weights; a failure leaves the servers safe."""
        try:
            with self.phase("pause"):
                self._pause()
                self._drop_default_adapter()
            if flush or self._pause_mode == "retract":
                with self.phase("flush"):
                    self._flush()
            count = self._send(weights)
            if self._control.capabilities.has_lora:
                with self.phase("withdraw"):
                    self._engine.withdraw_adapters(timeout=self._timeout)
            self._update.commit(self._version, checkpoint=checkpoint)
            self._committed = True
            # A failed update, or released memory, may have left them paused.
            if self._pause_mode != "none" or self._control.pausing.paused:
                with self.phase("resume"):
                    self._resume(self._timeout)
        except SGLangError as error:
            raise self._clean_up(error) from error
        except BaseException as error:
            self._clean_up(error)
            raise
        return count

    def verify(self, check: Callable[[], None] | None) -> None:
        """Compares servers and trainer, where servers generate."""
        if check is None:
            return
        if self._engine.asleep and not self._transport.adapter_only:
            torchrl_logger.warning(
                f"Weights of version {self._version} were not verified: nothing "
                f"generates while {', '.join(sorted(self._engine.asleep))} is asleep."
            )
            return
        with self.phase("verify"):
            try:
                check()
            except BaseException as error:
                self._update.mark_inconsistent(_text(error))
                if not self._transport.adapter_only:
                    self._stay_paused()
                raise

    def _pause(self) -> None:
        if self._pause_mode != "none":
            if self._pause_mode == "in_place":
                self._update.keeps_requests()
            run_sync(self._control.pause(self._pause_mode, timeout=self._timeout))
            return
        # The engine refuses to generate from here on, and nothing may be running.
        if not self._update.was_inconsistent:
            self._update.mark_inconsistent(
                "A weight update without a pause is in flight."
            )
        running = run_sync(self._control.running_requests(timeout=self._timeout))
        if running:
            raise WeightSyncStateError(
                f"{running} request(s) run, and pause_mode='none' pauses none of them; "
                f"wait for them to end, or use pause_mode='retract'."
            )

    def _drop_default_adapter(self) -> None:
        published = self._engine.published_adapters(timeout=self._timeout)
        if published or self._engine.default_adapter is not None:
            self._adapter = self._engine.default_adapter
            self._select(None, self._pause_mode, self._timeout)

    def _select(self, adapter: str | None, mode: PauseMode, timeout: float) -> None:
        """Makes requests carry another adapter, also those on paused servers."""
        self._engine.default_adapter = adapter
        if mode == "in_place":
            # A server that is paused in place does not end running requests.
            run_sync(self._control.pause("retract", timeout=timeout))
        # They are sent again, and look up their adapter then.
        self._update.aborts_requests()
        run_sync(self._control.abort_all(timeout=timeout))

    def _flush(self) -> None:
        """Empties the prefix caches.

        New requests carry the new weight version as a key and hit no older entry.
        Retracted requests carry the old one and would hit their own prefix, so they are
        aborted and sent again where a cache cannot be flushed while they wait.
        """
        flushed = run_sync(self._control.flush_cache(timeout=self._timeout))
        if not flushed and self._pause_mode == "retract":
            self._update.aborts_requests()
            run_sync(self._control.abort_all(timeout=self._timeout))
            flushed = run_sync(self._control.flush_cache(timeout=self._timeout))
        if not flushed:
            torchrl_logger.debug(
                "A prefix cache could not be flushed; its entries are out of reach "
                "because requests carry the new weight version."
            )
        elif self._pause_mode != "none":
            # Requests that other clients send meanwhile wait.
            self._update.flushed()

    def _send(self, weights: Weights) -> int:
        """Sends the weights, in an update session where the transport needs one."""
        in_session = self._transport.in_session
        if in_session:
            with self.phase("begin"):
                if self._begin() and self._pause_mode != "none":
                    # The sender that had a session open has resumed generation.
                    mode, timeout = self._pause_mode, self._timeout
                    run_sync(self._control.pause(mode, timeout=timeout))
        with self.phase("send"):
            try:
                count = self._transport.send(weights, version=self._version)
            except WeightTransferError as error:
                self.touched = self.touched or not error.untouched
                raise
            except BaseException:
                self.touched = True
                raise
        self.touched = True
        if in_session:
            with self.phase("end"):
                run_sync(self._control.end_weight_update(timeout=self._timeout))
        return count

    def _begin(self) -> bool:
        """Opens a session on every server; returns whether another sender had one open.

        Such a session is waited for, and closed when its sender seems to be gone.
        """
        deadline = time.monotonic() + min(self._timeout, TAKE_OVER_SECONDS)
        waiting = list(self._control.urls)
        others = closed = False
        while True:
            outcomes = self._open_sessions(waiting, self._timeout)
            waiting = [url for url, error in outcomes.items() if _is_open(error)]
            errors = [error for error in outcomes.values() if error is not None]
            failures = [error for error in errors if not _is_open(error)]
            if failures:
                raise failures[0]
            if not waiting:
                return others
            # An abandoned session may have left half of its weights.
            self.touched = others = True
            if time.monotonic() < deadline:
                time.sleep(TAKE_OVER_POLL_SECONDS)
            elif closed:
                raise errors[0]
            else:
                closed = True
                run_sync(
                    self._control.end_weight_update(timeout=self._timeout, urls=waiting)
                )

    def _open_sessions(
        self, urls: list[str], timeout: float
    ) -> dict[str, SGLangError | None]:
        """Asks servers to open a session, and keeps which ones did."""
        # Unclear until there is an answer, also where this is interrupted.
        self._unclear |= set(urls)
        outcomes = run_sync(
            self._control.begin_weight_update_on_each(urls, timeout=timeout)
        )
        # Servers without sessions have no outcome.
        self._unclear -= set(urls)
        for url, error in outcomes.items():
            if error is None:
                self._opened.add(url)
            elif not isinstance(error, RequestRefusedError):
                self._unclear.add(url)
        return outcomes

    def _resume(self, timeout: float) -> None:
        """Resumes generation, twice where the answer was lost, which does no harm."""
        try:
            run_sync(self._control.resume(timeout=timeout))
        except ServerError as error:
            torchrl_logger.debug(f"Generation is resumed once more: {error}")
            run_sync(self._control.resume(timeout=min(timeout, CLEANUP_SECONDS)))

    def _clean_up(self, error: BaseException) -> WeightSyncError:
        """Leaves the servers safe after a failure, and returns the error to raise."""
        if self.touched:
            self._update.mark_inconsistent(_text(error))
        if self._close_sessions():
            self.touched = True
        if not self.touched and self._others_update():
            # They resume generation, with weights that are not known here.
            self.touched = True
        problem, outcome = _text(error), _outcome(committed=self._committed)
        safe = not self.touched
        if safe:
            self._update.abort()
            try:
                self._restore()
            except SGLangError as secondary:
                safe = False
                problem = f"{error} Generation could not be resumed: {secondary}"
                outcome = (
                    f"The servers still hold the old weights, and generation could not "
                    f"be resumed: {secondary} Send the weights again."
                )
            else:
                outcome = (
                    "The servers still hold the old weights and generate with them; "
                    "the update can be tried again."
                )
        if not safe:
            self._update.mark_inconsistent(problem)
            # Other clients of the servers do not know that they are inconsistent.
            self._stay_paused()
        message = f"{error} {outcome}"
        kind = (
            type(error) if isinstance(error, WeightSyncError) else WeightTransferError
        )
        if issubclass(kind, WeightTransferError):
            return kind(message, untouched=not self.touched)
        return kind(message)

    def _restore(self) -> None:
        """Lets untouched servers generate as before."""
        if self._adapter is not None and self._engine.default_adapter is None:
            self._select(self._adapter, "retract", CLEANUP_SECONDS)
        if self._control.pausing.paused:
            self._resume(CLEANUP_SECONDS)

    def _close_sessions(self) -> bool:
        """Closes this update's sessions; returns whether an unclear one was open.

        Then the weights of that server are not known.
        """
        found = False
        for url in sorted(self._opened | self._unclear):
            try:
                closing = self._control.end_weight_update(
                    timeout=CLEANUP_SECONDS, urls=[url]
                )
                run_sync(closing)
            except SGLangError as error:
                torchrl_logger.debug(f"After a failed weight update: {error}")
                none_open = isinstance(error, RequestRefusedError)
            else:
                none_open = False
            if url in self._unclear and not none_open:
                found = True
        return found

    def _others_update(self) -> bool:
        """Returns whether another sender has a session open.

        Only opening one tells. Sessions that could be opened are closed at once.
        """
        urls = [
            url for url in self._control.urls if url not in self._opened | self._unclear
        ]
        self._opened, self._unclear = set(), set()
        outcomes = self._open_sessions(urls, CLEANUP_SECONDS)
        self._close_sessions()
        return any(_is_open(error) for error in outcomes.values())

    def _stay_paused(self) -> None:
        try:
            run_sync(self._control.pause("retract", timeout=CLEANUP_SECONDS))
        except SGLangError as error:
            torchrl_logger.debug(f"An inconsistent server could not be paused: {error}")


def _outcome(*, committed: bool) -> str:
    if committed:
        return (
            "The servers hold the new weights, and generation could not be resumed; "
            "send the weights again."
        )
    return (
        "The servers may hold a mix of old and new weights. They stay paused, and the "
        "engine refuses to generate until a weight update succeeds; send the weights "
        "again."
    )


def _is_open(error: SGLangError | None) -> bool:
    return isinstance(error, RequestRefusedError) and "already open" in str(error)


def _text(error: BaseException) -> str:
    # An interrupt has no text.
    return str(error) or f"{type(error).__name__}."
