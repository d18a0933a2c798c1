"""One weight update from beginning to end: the only place that orders these calls.

pause → flush → begin → send → end → resume → verify

Whatever fails before the first byte leaves the servers as they were, and generation
goes on. Whatever fails later leaves a mix of old and new weights that nobody may
generate with: the servers stay paused, the engine refuses, and the next update that
succeeds heals both. Where an answer is lost, the worse of the two is assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine, WeightUpdate
from torchrl_sglang.backends.client.control import (
    CONTROL_TIMEOUT_SECONDS,
    ControlPlane,
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
from torchrl_sglang.weight_update.sources.weights import Weights
from torchrl_sglang.weight_update.transports.base import WeightTransport

__all__ = ["update_weights"]

TAKE_OVER_SECONDS = 20.0
"""A session that another sender has open is taken for one of a sender that is gone when
it is still open after so long. ``recover()`` does not wait."""

TAKE_OVER_POLL_SECONDS = 0.2
"""How often it is looked for."""

CLEANUP_SECONDS = 5.0
"""Budget for each call that tidies up after a failure."""


class _Phases:
    """Measures how long each phase takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start


@dataclass
class _State:
    """What is known of the servers while an update goes on."""

    touched: bool
    """They may hold other weights than they did when they last generated."""
    adapter: str | None = None
    """What requests carried before, and carry no longer."""
    opened: set[str] = field(default_factory=set)
    """Servers that said that they opened a session for this update."""
    unclear: set[str] = field(default_factory=set)
    """Servers that were told to, and whose answer was lost."""
    committed: bool = False
    """They said that they hold the new weights, whole."""


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
    """Brings new weights to every server of an engine.

    Afterwards, requests that select no LoRA adapter are computed with these weights
    alone: an adapter that requests carried, whoever published it, is dropped from every
    server before they generate again, and what was under way is sent again without it.

    Args:
        engine: the servers.
        transport: carries the weights.
        weights: all parameters of the served model.
        version: what the servers report as their weight version from then on.
        pause_mode: what happens to the requests that run meanwhile.
        verify: raises :class:`WeightMismatchError` if the servers do not generate with
            these weights; called when they do again.
        flush: empty the prefix caches, where the servers can. Requests carry the weight
            version as a key of the cache, so nothing stale is in reach without it, for
            whoever sends that key. With ``"retract"`` it is done anyway: requests that
            were put off carry the key that they began with.
        whole: what they hold now is whole, as far as is known; if it is not, they are
            in doubt even after a failure that comes before the first byte.
        reason: why this transport; a sentence for the report.
        control_timeout: budget for each call that moves no weights, in seconds.
        held: the caller's hold of the engine, if it has one already.
        checkpoint: the weights are those that the servers were started with.

    Raises:
        WeightTransferError: if it failed. ``untouched`` tells whether the old weights
            are still whole; if not, the engine refuses to generate until an update
            succeeds.
        WeightMismatchError: if the servers took the weights and generate with others.
        WeightSyncStateError: if another update is under way, weights are asleep, or
            requests run that nothing pauses.
    """
    phase = _Phases()
    control = engine.control
    start = time.perf_counter()
    with engine.weight_update() if held is None else nullcontext(held) as update:
        if not transport.connected:
            with phase("connect"):
                transport.connect()
        # What an earlier update left half done is not made whole by sending nothing.
        state = _State(touched=update.was_inconsistent or not whole)
        try:
            with phase("pause"):
                _pause(update, control, pause_mode, control_timeout)
                published = engine.published_adapters(timeout=control_timeout)
                if published or engine.default_adapter is not None:
                    state.adapter = engine.default_adapter
                    _select(engine, None, update, pause_mode, control_timeout)
            if flush or pause_mode == "retract":
                with phase("flush"):
                    _flush(update, control, pause_mode, control_timeout)
            count = _send(
                control,
                transport,
                weights,
                version,
                phase,
                state,
                pause_mode,
                control_timeout,
            )
            if control.capabilities.has_lora:
                with phase("withdraw"):
                    engine.withdraw_adapters(timeout=control_timeout)
            update.commit(version, checkpoint=checkpoint)
            state.committed = True
            # An update that failed, or memory that was given back, left them paused.
            if pause_mode != "none" or control.pausing.paused:
                with phase("resume"):
                    _resume(control, control_timeout)
        except SGLangError as error:
            raise _clean_up(error, engine, update, state) from error
        except BaseException as error:
            _clean_up(error, engine, update, state)
            raise
        if verify is not None and engine.asleep:
            torchrl_logger.warning(
                f"Weights of version {version} were not verified: nothing generates "
                f"while {', '.join(sorted(engine.asleep))} is asleep."
            )
        elif verify is not None:
            with phase("verify"):
                _verify(verify, update, control)
    report = SyncReport(
        version=version,
        transport=transport.name,
        reason=reason,
        num_tensors=len(weights.specs),
        num_bytes=weights.num_bytes,
        num_buckets=count,
        seconds=time.perf_counter() - start,
        phase_seconds=phase.seconds,
    )
    torchrl_logger.info(
        f"Weights of version {version} on {len(control.urls)} server(s): "
        f"{report.num_bytes / 1e9:.3f} GB in {report.seconds:.3f} s by "
        f"{report.transport}, {report.gb_per_second:.1f} GB/s while sending."
    )
    return report


def _flush(
    update: WeightUpdate, control: ControlPlane, mode: PauseMode, timeout: float
) -> None:
    """Empties the prefix caches.

    New requests carry the new weight version as a key and find no older entry. Those
    that were put off carry the old one, and would find their own prefix: where the
    caches cannot be emptied while they wait, they are to begin anew.
    """
    flushed = run_sync(control.flush_cache(timeout=timeout))
    if not flushed and mode == "retract":
        update.aborts_requests()
        run_sync(control.abort_all(timeout=timeout))
        flushed = run_sync(control.flush_cache(timeout=timeout))
    if flushed:
        if mode != "none":
            # What others send meanwhile waits.
            update.flushed()
        return
    torchrl_logger.debug(
        "A prefix cache could not be flushed; its entries are out of reach because "
        "requests carry the new weight version."
    )


def _send(
    control: ControlPlane,
    transport: WeightTransport,
    weights: Weights,
    version: str,
    phase: _Phases,
    state: _State,
    pause_mode: PauseMode,
    timeout: float,
) -> int:
    """Returns how many transfers it took; tells ``state`` when the first has begun."""
    if transport.in_session:
        with phase("begin"):
            if _begin(control, state, timeout) and pause_mode != "none":
                # The sender that had them open has let generation go on.
                run_sync(control.pause(pause_mode, timeout=timeout))
    with phase("send"):
        try:
            count = transport.send(weights, version=version)
        except WeightTransferError as error:
            state.touched = state.touched or not error.untouched
            raise
        except BaseException:
            state.touched = True
            raise
    state.touched = True
    if transport.in_session:
        with phase("end"):
            run_sync(control.end_weight_update(timeout=timeout))
    return count


def _pause(
    update: WeightUpdate,
    control: ControlPlane,
    mode: PauseMode,
    timeout: float,
) -> None:
    if mode != "none":
        if mode == "in_place":
            update.keeps_requests()
        run_sync(control.pause(mode, timeout=timeout))
        return
    # The engine refuses to generate from here on, and nothing may be running.
    if not update.was_inconsistent:
        update.mark_inconsistent("A weight update without a pause is in progress.")
    running = run_sync(control.running_requests(timeout=timeout))
    if running:
        raise WeightSyncStateError(
            f"{running} request(s) run, and pause_mode='none' pauses none of them; "
            f"wait for them to end, or use pause_mode='retract'."
        )


def _verify(
    verify: Callable[[], None], update: WeightUpdate, control: ControlPlane
) -> None:
    try:
        verify()
    except BaseException as error:
        update.mark_inconsistent(_told(error))
        _stay_paused(control)
        raise


def _begin(control: ControlPlane, state: _State, timeout: float) -> bool:
    """Opens a session on every server.

    One that another sender has open is waited for, and closed when that sender seems to
    be gone.

    Returns:
        Whether another sender had one open.
    """
    deadline = time.monotonic() + min(timeout, TAKE_OVER_SECONDS)
    waiting = list(control.urls)
    others = False
    given_up = False
    while True:
        # Until there is an answer, also where this is interrupted.
        asked = set(waiting)
        state.unclear |= asked
        outcomes = run_sync(
            control.begin_weight_update_on_each(waiting, timeout=timeout)
        )
        state.opened.update(url for url, error in outcomes.items() if error is None)
        lost = {url for url, error in outcomes.items() if not _is_answer(error)}
        state.unclear = state.unclear - asked | lost
        waiting = [url for url, error in outcomes.items() if _is_open(error)]
        failures = [e for e in outcomes.values() if e is not None and not _is_open(e)]
        if failures:
            raise failures[0]
        if not waiting:
            return others
        # Whoever left a session open may have left half of its weights.
        state.touched = others = True
        if time.monotonic() < deadline:
            time.sleep(TAKE_OVER_POLL_SECONDS)
        elif given_up:
            raise next(error for error in outcomes.values() if error is not None)
        else:
            given_up = True
            run_sync(control.end_weight_update(timeout=timeout, urls=waiting))


def _is_answer(error: SGLangError | None) -> bool:
    return error is None or isinstance(error, RequestRefusedError)


def _is_open(error: SGLangError | None) -> bool:
    return isinstance(error, RequestRefusedError) and "already open" in str(error)


def _resume(control: ControlPlane, timeout: float) -> None:
    """Lets generation go on.

    Twice does no harm, and the answer of a server that does generate may be lost.
    """
    try:
        run_sync(control.resume(timeout=timeout))
    except ServerError as error:
        torchrl_logger.debug(f"Generation is to be resumed once more: {error}")
        run_sync(control.resume(timeout=min(timeout, CLEANUP_SECONDS)))


def _close_session(control: ControlPlane, state: _State) -> None:
    """Closes the sessions of an update that failed, and nobody else's.

    Where the answer to opening one was lost, the answer to closing it tells: if one was
    open, what that server holds is not known.
    """
    for url in sorted(state.opened | state.unclear):
        try:
            run_sync(control.end_weight_update(timeout=CLEANUP_SECONDS, urls=[url]))
        except SGLangError as error:
            torchrl_logger.debug(f"After a failed weight update: {error}")
            known = isinstance(error, RequestRefusedError)
        else:
            known = False
        if url in state.unclear and not known:
            state.touched = True


def _others_update(control: ControlPlane, state: _State) -> bool:
    """Returns whether another sender has a session open.

    Only opening a session tells. One that could be opened is closed at once.
    """
    urls = [url for url in control.urls if url not in state.opened | state.unclear]
    outcomes = run_sync(
        control.begin_weight_update_on_each(urls, timeout=CLEANUP_SECONDS)
    )
    opened = {url for url, error in outcomes.items() if error is None}
    lost = {url for url, error in outcomes.items() if not _is_answer(error)}
    _close_session(control, _State(touched=False, opened=opened, unclear=lost))
    return any(_is_open(error) for error in outcomes.values())


def _told(error: BaseException) -> str:
    # An interrupt has nothing to say.
    return str(error) or f"{type(error).__name__}."


def _select(
    engine: RLSGLangEngine,
    adapter: str | None,
    update: WeightUpdate,
    mode: PauseMode,
    timeout: float,
) -> None:
    """Has requests carry another adapter, also those that wait on paused servers."""
    engine.default_adapter = adapter
    if mode == "in_place":
        # A server that is paused in place ends nothing that runs.
        run_sync(engine.control.pause("retract", timeout=timeout))
    # They are sent again, and what they carry is looked up when they are.
    update.aborts_requests()
    run_sync(engine.control.abort_all(timeout=timeout))


def _clean_up(
    error: BaseException, engine: RLSGLangEngine, update: WeightUpdate, state: _State
) -> WeightSyncError:
    """Leaves the servers safe after a failure, and returns the error that tells."""
    control = engine.control
    if state.touched:
        update.mark_inconsistent(_told(error))
    _close_session(control, state)
    if not state.touched and _others_update(control, state):
        # Generation is theirs to resume, and what they have sent is not known.
        state.touched = True
    safe, doubt = not state.touched, _told(error)
    if safe:
        update.abort()
        outcome = (
            "The servers still hold the old weights and generate with them; the update "
            "can be tried again."
        )
        try:
            if state.adapter is not None and engine.default_adapter is None:
                _select(engine, state.adapter, update, "retract", CLEANUP_SECONDS)
            if control.pausing.paused:
                _resume(control, CLEANUP_SECONDS)
        except SGLangError as secondary:
            safe, doubt = False, f"{error} Generation could not be resumed: {secondary}"
            outcome = (
                f"The servers still hold the old weights, and generation could not be "
                f"resumed: {secondary} Send the weights again."
            )
    elif state.committed:
        outcome = (
            "The servers hold the new weights, and generation could not be resumed; "
            "send the weights again."
        )
    else:
        outcome = (
            "The servers may hold a mix of old and new weights. They stay paused, and "
            "the engine refuses to generate until a weight update succeeds; send the "
            "weights again."
        )
    if not safe:
        update.mark_inconsistent(doubt)
        # Other users of the servers know nothing of this engine's doubt.
        _stay_paused(control)
    message = f"{error} {outcome}"
    kind = type(error) if isinstance(error, WeightSyncError) else WeightTransferError
    if issubclass(kind, WeightTransferError):
        return kind(message, untouched=not state.touched)
    return kind(message)


def _stay_paused(control: ControlPlane) -> None:
    try:
        run_sync(control.pause("retract", timeout=CLEANUP_SECONDS))
    except SGLangError as error:
        torchrl_logger.debug(f"A server in doubt could not be paused: {error}")
