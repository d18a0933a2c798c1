"""One weight update from beginning to end: the only place that orders these calls.

pause → flush → begin → send every bucket → end → resume

Whatever fails before the first byte leaves the servers as they were, and generation
goes on. Whatever fails later leaves a mix of old and new weights that nobody may
generate with: the servers stay paused, the engine refuses, and the next update that
succeeds heals both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.backends.base import RLSGLangEngine, WeightUpdate
from torchrl_sglang.backends.control_plane import ControlPlane
from torchrl_sglang.backends.event_loop import run_sync
from torchrl_sglang.errors import (
    RequestRefusedError,
    SGLangError,
    WeightTransferError,
)
from torchrl_sglang.types import PauseMode, SyncReport
from torchrl_sglang.weight_update.buckets import Bucket
from torchrl_sglang.weight_update.source import NamedTensors
from torchrl_sglang.weight_update.transports.base import WeightTransport

__all__ = ["update_weights"]

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


def update_weights(
    engine: RLSGLangEngine,
    transport: WeightTransport,
    buckets: list[Bucket],
    tensors: NamedTensors,
    *,
    version: str,
    pause_mode: PauseMode,
) -> SyncReport:
    """Brings new weights to every server of an engine.

    Args:
        engine: the servers.
        transport: carries the buckets.
        buckets: layout of all parameters of the served model.
        tensors: their values.
        version: what the servers report as their weight version from then on.
        pause_mode: what happens to the requests that run meanwhile.

    Raises:
        WeightTransferError: if it failed. ``untouched`` tells whether the old weights
            are still whole; if not, the engine refuses to generate until an update
            succeeds.
        WeightSyncStateError: if another update is under way.
    """
    phase = _Phases()
    control = engine.control
    start = time.perf_counter()
    with engine.weight_update() as update:
        if not transport.connected:
            with phase("connect"):
                transport.connect()
        # What an earlier update left half done is not made whole by sending nothing.
        touched = update.already_in_doubt
        try:
            with phase("pause"):
                run_sync(control.pause(pause_mode))
            with phase("flush"):
                flushed = run_sync(control.flush_cache())
            if not flushed:
                torchrl_logger.debug(
                    "A prefix cache could not be flushed; its entries are out of reach "
                    "because requests carry the new weight version."
                )
            with phase("begin"):
                _begin(control)
            with phase("send"):
                for index, bucket in enumerate(buckets):
                    last = index == len(buckets) - 1
                    try:
                        transport.send(
                            bucket, tensors, weight_version=version if last else None
                        )
                    except WeightTransferError as error:
                        touched = touched or not error.untouched
                        raise
                    touched = True
            with phase("end"):
                run_sync(control.end_weight_update())
            update.committed(version)
            with phase("resume"):
                run_sync(control.resume())
        except SGLangError as error:
            raise _clean_up(error, update, control, touched) from error
        except BaseException as error:
            _clean_up(error, update, control, touched)
            raise
    report = SyncReport(
        version=version,
        num_tensors=sum(len(bucket.specs) for bucket in buckets),
        num_bytes=sum(bucket.num_bytes for bucket in buckets),
        num_buckets=len(buckets),
        seconds=time.perf_counter() - start,
        phase_seconds=phase.seconds,
    )
    torchrl_logger.debug(f"Weights updated: {report}")
    return report


def _begin(control: ControlPlane) -> None:
    try:
        run_sync(control.begin_weight_update())
    except RequestRefusedError as error:
        if "already open" not in str(error):
            raise
        # A sender that failed before left its session open.
        run_sync(control.end_weight_update())
        run_sync(control.begin_weight_update())


def _clean_up(
    error: BaseException,
    update: WeightUpdate,
    control: ControlPlane,
    touched: bool,
) -> WeightTransferError:
    """Leaves the servers safe after a failure, and returns the error that tells."""
    if touched:
        update.in_doubt(str(error))
        outcome = (
            "The servers may hold a mix of old and new weights. They stay paused, and "
            "the engine refuses to generate until a weight update succeeds; send the "
            "weights again."
        )
    else:
        outcome = "The servers still hold the old weights."
    try:
        run_sync(control.end_weight_update(timeout=CLEANUP_SECONDS))
    except SGLangError as secondary:
        torchrl_logger.debug(f"After a failed weight update: {secondary}")
    if not touched:
        try:
            run_sync(control.resume(timeout=CLEANUP_SECONDS))
        except SGLangError as secondary:
            update.in_doubt(f"{error} Generation could not be resumed: {secondary}")
            outcome = (
                f"The servers still hold the old weights, and generation could not be "
                f"resumed: {secondary} Send the weights again."
            )
    failure = WeightTransferError(f"{error} {outcome}")
    failure.untouched = not touched
    return failure
