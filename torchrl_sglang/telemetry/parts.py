"""Reads the statistics of the parts of a run, each within a timeout.

A part may be dead, shut down, or on another machine. No reader waits longer than a
timeout, and a hanging part costs a single thread, instead of a thread per read.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.telemetry.rows import ROWS, Stats

T = TypeVar("T")

STATS_SECONDS = 8.0
"""Timeout of the statistics of all parts. Prometheus waits ten seconds by default, and
a server gets five to answer."""


class PartReader:
    """Reads the statistics of a part, without keeping it alive."""

    def __init__(self, name: str, part: Any) -> None:
        self.name = name
        self._find = _reference(part)
        self._lock = threading.Lock()
        self._running: Future[Stats] | None = None
        self._last_error = ""

    @property
    def part(self) -> Any:
        """The part; ``None`` if it is gone."""
        return self._find()

    def begin(self) -> Future[Stats]:
        """Begins to read in a thread, unless an earlier read is in progress."""
        with self._lock:
            if self._running is not None and not self._running.done():
                return self._running
            future = self._running = Future[Stats]()
        threading.Thread(
            target=self._run,
            args=(future,),
            name=f"torchrl_sglang-stats-{self.name}",
            daemon=True,
        ).start()
        return future

    def _run(self, future: Future[Stats]) -> None:
        try:
            part = self.part
            if part is None:
                raise ConfigurationError(f"The {self.name} is gone.")
            future.set_result(part.stats())
        except BaseException as error:  # noqa: BLE001 - Passed on to the reader.
            future.set_exception(error)

    def end(self, future: Future[Stats], seconds: float) -> Stats | None:
        """Returns the statistics; ``None`` on an error or a timeout."""
        return self.attempt(lambda: future.result(timeout=max(seconds, 0.0)))

    def attempt(self, read: Callable[[], T]) -> T | None:
        """Returns the result of ``read``; ``None`` if it fails, which is logged."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - Metrics never end a run.
            text = f"{type(error).__name__}: {error}"
            if text != self._last_error:
                torchrl_logger.debug(f"No statistics of the {self.name}: {text}")
            self._last_error = text
            return None


def _reference(part: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(part)
    except TypeError:
        # Of a class with slots.
        return lambda: part


def make_readers(**parts: Any) -> dict[str, PartReader]:
    """Returns a reader for each part other than ``None``, which are checked."""
    readers = {
        name: PartReader(name, _with_stats(name, part))
        for name, part in parts.items()
        if part is not None
    }
    if not readers:
        raise ConfigurationError(
            "There is nothing to read; give an engine, a collector, a gateway or a "
            "scheme."
        )
    return readers


def _with_stats(name: str, part: Any) -> Any:
    if name == "weights" and hasattr(part, "create_sender"):
        # A scheme keeps its sender.
        part = part.create_sender()
    if not callable(getattr(part, "stats", None)) or isinstance(part, type):
        raise ConfigurationError(
            f"{_ARGUMENT[name]}={part!r} has no statistics to read; {_REMEDY[name]}."
        )
    return part


_ARGUMENT = {name: name for name in ROWS} | {"weights": "scheme"}

_REMEDY = {
    "engine": "give an AsyncSGLang",
    "collector": "give an AsyncLLMCollector; TorchRL's own collectors have none",
    "gateway": "give a Gateway",
    "weights": "give an SGLangWeightSyncScheme or its sender",
}


def read_all(readers: Iterable[PartReader], seconds: float) -> dict[str, Stats | None]:
    """Returns the statistics of all parts, read side by side; ``None``: it failed."""
    deadline = time.monotonic() + seconds
    begun = [(reader, reader.begin()) for reader in readers]
    return {
        reader.name: reader.end(future, deadline - time.monotonic())
        for reader, future in begun
    }
