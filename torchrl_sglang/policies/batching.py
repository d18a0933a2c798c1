"""Calls of several threads to batches for the engine.

Whoever waits in the queue can become the one who runs the next batch, so there is no
thread of its own, and no lock is held while the engine works: the next batch can be on
its way before the last one is back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    SGLangError,
)

__all__ = ["Batcher"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Gathers items of several callers and runs them together.

    An item waits until ``min_size`` items are there, or until it has waited for
    ``timeout`` seconds. A batch holds at most ``max_size`` items, in order of arrival.
    An error that belongs to one item reaches that item's caller only; if running a
    batch fails as a whole, it reaches the callers in that batch.

    Args:
        run: takes items and returns, for each, its result or its error.
        min_size: items to wait for.
        max_size: most items of a batch; ``None`` for no limit.
        timeout: longest wait of an item, in seconds.

    Raises:
        ConfigurationError: if the sizes or the timeout make no sense.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result | SGLangError]],
        *,
        min_size: int = 1,
        max_size: int | None = None,
        timeout: float,
    ) -> None:
        if min_size < 1 or (max_size is not None and max_size < min_size):
            raise ConfigurationError(
                f"min_batch_size ({min_size}) must be <= max_batch_size ({max_size}) "
                f"and at least 1."
            )
        if timeout < 0:
            raise ConfigurationError(
                f"batching_timeout={timeout} is not a time; give seconds, at least 0."
            )
        self._run = run
        self._min_size = min_size
        self._max_size = max_size
        self._timeout = timeout
        self._queue: deque[tuple[Item, Future[Result]]] = deque()
        self._arrival = threading.Condition()

    def __len__(self) -> int:
        """Returns the number of items that wait."""
        return len(self._queue)

    def submit(self, items: Sequence[Item]) -> list[Result]:
        """Runs items in batches with those of other callers, and waits for them.

        Raises:
            SGLangError: the first error among these items.
        """
        futures: list[Future[Result]] = [Future() for _ in items]
        deadline = time.monotonic() + self._timeout
        with self._arrival:
            self._queue.extend(zip(items, futures, strict=True))
            self._arrival.notify_all()
        while True:
            with self._arrival:
                batch = self._take(set(futures), deadline)
            if not batch:
                break
            self._run_batch(batch)
        return [future.result() for future in futures]

    def _take(
        self, own: set[Future[Result]], deadline: float
    ) -> list[tuple[Item, Future[Result]]]:
        """Waits for a batch to run; returns none when nothing of ``own`` is queued."""
        while any(future in own for _, future in self._queue):
            wait = deadline - time.monotonic()
            if len(self._queue) >= self._min_size or wait <= 0:
                size = min(len(self._queue), self._max_size or len(self._queue))
                batch = [self._queue.popleft() for _ in range(size)]
                # Callers whose items went along have nothing left to wait for here.
                self._arrival.notify_all()
                return batch
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
        for (_, future), result in zip(batch, results, strict=True):
            if isinstance(result, SGLangError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def cancel(self) -> None:
        """Fails all items that wait; those that run come back as usual."""
        with self._arrival:
            waiting = list(self._queue)
            self._queue.clear()
            self._arrival.notify_all()
        for _, future in waiting:
            future.set_exception(
                GenerationAbortedError(
                    "The call was cancelled while it waited to be batched; it was not "
                    "sent. Call again."
                )
            )
