"""The collectors of a sender: they count its updates, and hear of one in flight."""

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
        self._known: list[Callable[[], Any]] = []
        self._this_call = threading.local()
        """``told``: the version that this thread's update has announced last."""

    def register(self, collector: Any) -> None:
        """Adds a collector."""
        try:
            self._known.append(weakref.ref(collector))
        except TypeError:
            # Of a class with slots.
            self._known.append(lambda: collector)

    def unregister(self, collector: Any) -> None:
        """Forgets a collector. Safe to call twice."""
        known = [each for each in self._known if each() is not None]
        self._known = [each for each in known if each() is not collector]
        if self._scheme.context is collector:
            self._scheme.context = None

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Tells collectors what becomes of what was announced if the update fails."""
        self._this_call.told = None
        try:
            yield
        except BaseException:
            told = self._this_call.told
            # One that was refused has announced nothing: another may be under way.
            if told is not None:
                # Its commit comes before servers generate with it.
                generated = told == self._scheme.engine.weight_version
                self._tell("_update_failed", generated)
            raise

    def announce(self, version: str) -> None:
        """Tells collectors what servers are about to call the next update's weights.

        They generate with them before the update is counted.
        """
        self._this_call.told = version
        self._tell("_served_next", version)

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
        return [self._count_of(each) for each in self._all()]

    def withdraw(self) -> None:
        """Tells them that what was announced is no version of this update's."""
        self._tell("_update_failed", False)

    def announce_again(self, version: str) -> None:
        """Tells them another name that servers are to have for the current weights."""
        self._tell("_served_again", version)

    def check_idle(self) -> None:
        """Refuses collectors whose servers another rank updates, it is unknown when.

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

    def _tell(self, method: str, value: Any) -> None:
        for collector in self._all():
            tell = getattr(collector, method, None)
            if tell is not None:
                try:
                    tell(value)
                except Exception as error:  # noqa: BLE001 - count() deals with it.
                    torchrl_logger.debug(f"A collector was not told: {error}")

    def _all(self) -> list[Any]:
        known = [*(each() for each in self._known), self._scheme.context]
        return list({id(each): each for each in known if each is not None}.values())

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
