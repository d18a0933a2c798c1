"""The thread that reads statistics of servers and collectors."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrl_sglang.recording.writer import Files, RecordWriter
from torchrl_sglang.support.log import torchrl_logger

Read = Callable[[], Mapping[str, Any] | None]
"""Returns figures; ``None``: their source is gone."""


ENGINE_FIGURES = (
    *("in_flight", "queued", "completed", "retries", "tokens_per_second"),
    *("prompt_tokens", "response_tokens", "cache_hit_rate"),
)
"""Recorded statistics of an engine."""


class ServerPoll:
    """Reads statistics at an interval, in seconds, and has them written."""

    def __init__(self, writer: RecordWriter, seconds: float) -> None:
        self._writer = writer
        self._seconds = seconds
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watched: list[tuple[str, Read]] = []
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch_engine(self, engine: Any) -> None:
        """Asks an engine for its statistics, which is not kept alive; once each."""
        if not callable(getattr(engine, "stats", None)) or engine in self._engines:
            return
        self._engines.add(engine)
        find = weakref.ref(engine)

        def read() -> Mapping[str, Any] | None:
            alive = find()
            return None if alive is None else _engine_figures(alive)

        self.watch("engine", read)

    def watch(self, kind: str, read: Read) -> None:
        """Calls a function at the interval, and has its figures written."""
        if os.getpid() != self._pid:
            # The thread is the parent's.
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._watched.append((kind, read))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="torchrl_sglang-recorder-poll", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Asks no more."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        thread = self._thread
        if thread in (None, threading.current_thread()):
            return
        assert thread is not None
        thread.join(5.0)

    def _run(self) -> None:
        while True:
            for watched in list(self._watched):
                self._ask(*watched)
            if self._ended.wait(self._seconds):
                return

    def _ask(self, kind: str, read: Read) -> None:
        try:
            figures = read()
        except Exception as error:  # noqa: BLE001 - Servers may be gone.
            torchrl_logger.debug(f"A recorder was not told of the {kind}: {error!r}")
            return
        if figures is None:
            with self._lock:
                self._watched = [
                    watched for watched in self._watched if watched[1] is not read
                ]
            return
        if self._ended.is_set():
            return
        record = {"kind": kind, "time": time.time(), **figures}

        def write(files: Files) -> None:
            files.append("events", record)

        self._writer.put(write)


def _engine_figures(engine: Any) -> Mapping[str, Any] | None:
    stats = engine.stats()
    return {
        **_memory(),
        **{name: getattr(stats, name) for name in ENGINE_FIGURES},
        "servers": [
            {
                "url": server.url,
                "state": server.state,
                "running": server.running,
                "queued": server.queued,
                "version": server.weight_version,
                "restarts": server.restarts,
                "kv": server.cache_usage,
            }
            for server in stats.servers
        ],
    }


def _memory() -> dict[str, int]:
    """Returns the bytes that this process holds of its GPU, if it uses one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {
        "gpu_allocated": torch.cuda.memory_allocated(),
        "gpu_reserved": torch.cuda.memory_reserved(),
    }
