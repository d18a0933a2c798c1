"""The collectors of a sender, which count its updates and follow one in flight."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torchrl.weight_update import WeightSyncScheme

from torchrl_sglang.errors import (
    CollectionError,
    CollectionTimeoutError,
    WeightSyncStateError,
)
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import SyncReport


class RegisteredCollectors:
    """Collectors whose policy versions count the updates of a sender.

    None is kept alive, and one that has ended is forgotten. The collector that a
    scheme was given to by TorchRL, its ``context``, is one of them.

    Args:
        scheme: of the sender.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._references: list[Callable[[], Any]] = []
        self._this_call = threading.local()
        """``announced``: the last version that this thread's update has announced."""

    def register(self, collector: Any) -> None:
        """Adds a collector."""
        try:
            self._references.append(weakref.ref(collector))
        except TypeError:
            # Of a class with slots.
            self._references.append(lambda: collector)

    def unregister(self, collector: Any) -> None:
        """Forgets a collector. Safe to call twice."""
        self._references = [
            reference
            for reference in self._references
            if reference() not in (None, collector)
        ]
        if self._scheme.context is collector:
            self._scheme.context = None

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Reports to collectors that an announced update has failed."""
        self._this_call.announced = None
        try:
            yield
        except BaseException:
            version = self._this_call.announced
            # A refused update has announced nothing: another may be in flight.
            if version is not None:
                # Its commit comes before servers generate with it.
                generated = version == self._scheme.engine.weight_version
                self._notify("_update_failed", generated)
            raise

    def announce(self, version: str) -> None:
        """Announces the version of the next update's weights.

        Servers generate with them before the update is counted.
        """
        self._this_call.announced = version
        self._notify("_served_next", version)

    def count(self, report: SyncReport, counts_itself: Any = None) -> None:
        """Counts one policy version on each, and gives it the update's report.

        Args:
            report: of the update.
            counts_itself: the collector that increments its version by itself.

        Raises:
            WeightSyncStateError: if some could not count it.
        """
        uncounted = []
        for collector in self._all():
            try:
                with suppress(AttributeError):
                    # A class with slots has no place for it.
                    collector.last_sync_report = report
                if collector is not counts_itself:
                    collector.increment_version()
            except Exception as error:  # noqa: BLE001 - A remote one raises anything.
                if not self._forget_ended(collector, error):
                    uncounted.append(f"{type(collector).__name__}: {error}")
        if uncounted:
            raise WeightSyncStateError(
                f"Weights of version {report.version} are on the servers, and "
                f"collectors could not count them: {'; '.join(uncounted)}"
            )

    def counts(self) -> list[int]:
        """Returns the policy version of each."""
        return [self._count_of(collector) for collector in self._all()]

    def withdraw(self) -> None:
        """Withdraws the announced version, which is not this update's."""
        self._notify("_update_failed", False)

    def announce_again(self, version: str) -> None:
        """Announces another version of the current weights."""
        self._notify("_served_again", version)

    def check_idle(self) -> None:
        """Refuses collectors whose servers another rank updates at an unknown time.

        They would count that update before it happens, or after.
        """
        for collector in self._all():
            if hasattr(collector, "_served_next"):
                raise WeightSyncStateError(
                    f"Rank 0 of DistributedDataParallel sends the weights, and this "
                    f"rank's {type(collector).__name__} does not learn their versions. "
                    f"Collect on rank 0 and share its batches with SharedCollector, or "
                    f"give update_weights(ddp.module) where each rank has servers of "
                    f"its own."
                )

    def _notify(self, method: str, value: Any) -> None:
        for collector in self._all():
            notify = getattr(collector, method, None)
            if notify is not None:
                try:
                    notify(value)
                except Exception as error:  # noqa: BLE001 - count() deals with it.
                    torchrl_logger.debug(f"A collector was not notified: {error}")

    def _all(self) -> list[Any]:
        collectors = [*(get() for get in self._references), self._scheme.context]
        return list({id(c): c for c in collectors if c is not None}.values())

    def _count_of(self, collector: Any) -> int:
        """Returns a collector's policy version; 0 if it is no number, or has ended."""
        try:
            version = getattr(collector, "policy_version", None)
        except Exception as error:
            if self._forget_ended(collector, error):
                return 0
            raise WeightSyncStateError(
                f"The registered {type(collector).__name__} does not tell its policy "
                f"version ({type(error).__name__}: {error}); nothing was sent. If it "
                f"has ended, call sender.unregister_collector(collector)."
            ) from error
        return version if isinstance(version, int) else 0

    def _forget_ended(self, collector: Any, error: Exception) -> bool:
        """Forgets a collector if its error says that it has ended; returns whether."""
        if not _has_ended(error):
            return False
        self.unregister(collector)
        torchrl_logger.warning(
            f"A {type(collector).__name__} has ended and counts no more weight "
            f"updates: {error}"
        )
        return True


def _has_ended(error: Exception) -> bool:
    """Returns whether an error of a collector says that it will not go on."""
    if isinstance(error, CollectionError):
        return not isinstance(error, CollectionTimeoutError)
    # It has been imported if an actor could raise it.
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(error, ray.exceptions.ActorDiedError)
