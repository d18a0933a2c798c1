"""Batches the calls of several threads into one call of the engine.

There is no batching thread: each waiting caller can run the next batch. No lock is held
while the engine works, so several batches can be in flight.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    SGLangError,
)
from torchrl_sglang.support.checks import check_count, check_seconds

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Submission(Generic[Result]):
    """One call of :meth:`Batcher.submit`."""

    futures: list[Future[Result]]
    """One for each item."""
    deadline: float
    """Monotonic time at which the call waits no longer for others; in the past once
    some of its items were taken, so that the rest follow at once."""
    waiting: int = field(init=False)
    """Number of its queued items."""

    def __post_init__(self) -> None:
        self.waiting = len(self.futures)


class Batcher(Generic[Item, Result]):
    """Runs items of several callers together, in order of arrival.

    A call waits for ``min_size`` queued items, but at most ``timeout`` seconds. A batch
    holds at most ``max_size`` items; the rest of a larger call follows at once. ``run``
    returns a result or an error for each item, which only its caller gets; if ``run``
    raises, all callers in the batch get that error.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result | SGLangError]],
        *,
        min_size: int = 1,
        max_size: int | None = None,
        timeout: float,
    ) -> None:
        check_count("min_batch_size", min_size)
        if max_size is not None and check_count("max_batch_size", max_size) < min_size:
            raise ConfigurationError(
                f"min_batch_size ({min_size}) must be <= max_batch_size ({max_size})."
            )
        check_seconds("batching_timeout", timeout, zero=True)
        self._run = run
        self._min_size = min_size
        self._max_size = max_size
        self._timeout = timeout
        self._queue: deque[tuple[Item, Future[Result], _Submission[Result]]] = deque()
        self._running = 0
        self._arrival = threading.Condition()

    def __len__(self) -> int:
        """Returns the number of queued items."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of items in flight."""
        return self._running

    def submit(self, items: Sequence[Item]) -> list[Result]:
        """Runs items, batched with other callers', and raises their first error."""
        call = _Submission[Result](
            [Future() for _ in items], time.monotonic() + self._timeout
        )
        with self._arrival:
            for item, future in zip(items, call.futures, strict=True):
                self._queue.append((item, future, call))
            self._arrival.notify_all()
        while True:
            with self._arrival:
                batch = self._take(call)
            if not batch:
                break
            self._run_batch(batch)
        return [future.result() for future in call.futures]

    def _take(self, call: _Submission[Result]) -> list[tuple[Item, Future[Result]]]:
        """Waits for a batch to run; returns none once ``call`` has no queued items."""
        while call.waiting:
            wait = call.deadline - time.monotonic()
            if len(self._queue) >= self._min_size or wait <= 0:
                size = min(len(self._queue), self._max_size or len(self._queue))
                items = [self._queue.popleft() for _ in range(size)]
                for _, _, owner in items:
                    owner.waiting -= 1
                    owner.deadline = -math.inf
                self._running += size
                # Wakes the callers whose items were taken.
                self._arrival.notify_all()
                return [(item, future) for item, future, _ in items]
            self._arrival.wait(wait)
        return []

    def _run_batch(self, batch: Sequence[tuple[Item, Future[Result]]]) -> None:
        try:
            results = self._run([item for item, _ in batch])
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            with self._arrival:
                self._running -= len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if isinstance(result, SGLangError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def cancel(self) -> None:
        """Fails all queued items; items in flight complete as usual."""
        with self._arrival:
            waiting = list(self._queue)
            self._queue.clear()
            for _, _, owner in waiting:
                owner.waiting = 0
            self._arrival.notify_all()
        for _, future, _ in waiting:
            future.set_exception(
                GenerationAbortedError(
                    "The call was cancelled while it waited to be batched; it was not "
                    "sent. Call again."
                )
            )
