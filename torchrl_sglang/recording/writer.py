"""The thread that writes a recording, and its bounded queue."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchrl_sglang.recording.format import SHARES
from torchrl_sglang.recording.streams import LineStream, StreamPlace
from torchrl_sglang.support.log import torchrl_logger

MOST_QUEUED = 5_000_000
"""Tokens and lines that wait to be written; what would be more is lost."""

MANY_QUEUED = 250_000
"""Tokens and lines that are written before the interval ends."""

FLUSH_SECONDS = 0.25
"""Interval at which what is queued is written and handed to the system: a process that
is killed loses so much, and what is being written."""


def to_line(record: Mapping[str, Any]) -> bytes:
    """Returns a record as a line of JSON: bytes as base64, other objects as a text."""
    try:
        return msgspec.json.encode(record, enc_hook=str) + b"\n"
    except (TypeError, ValueError):
        # Other keys than texts, half of a character, a number of more than 64 bits.
        text = json.dumps(record, default=_to_text)
        # As msgspec, which writes null for NaN.
        finite = json.loads(text, parse_constant=lambda _: None)
        text = json.dumps(finite, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace") + b"\n"


def _to_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


class Files:
    """The streams of a recording, in the writer's thread."""

    def __init__(self, folder: Path, writer: str, max_bytes: int) -> None:
        self._streams = {
            name: LineStream(
                folder=folder,
                name=name,
                writer=writer,
                most_bytes=int(share * max_bytes),
            )
            for name, share in SHARES.items()
        }

    def append(self, stream: str, record: Mapping[str, Any]) -> StreamPlace:
        """Writes a record as a line of a stream."""
        lines = self._streams[stream]
        place = lines.append(to_line(record))
        if lines.removed:
            names, lines.removed = lines.removed, []
            event = {"kind": "dropped", "time": time.time(), "files": names}
            self._streams["events"].append(to_line(event))
        return place

    def take_unwritten(self) -> int:
        """Returns how many lines did not reach the disk, after they were appended."""
        count = 0
        for stream in self._streams.values():
            count, stream.unwritten = count + stream.unwritten, 0
        return count

    def flush(self) -> None:
        """Hands everything to the system."""
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        """Closes all files."""
        for stream in self._streams.values():
            stream.close()


Job = Callable[[Files], None]
"""Writes something."""


class _Waiting(msgspec.Struct, frozen=True, gc=False):
    """A job in the queue, which the garbage collector does not count."""

    job: Job
    cost: int


class RecordWriter:
    """Runs jobs in a thread; nothing that a job does reaches its caller.

    It refers to nothing of its owner, which may be dropped while this runs. ``lost``
    counts the jobs that were not written.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.lost = 0
        self._files = files
        self._name = name
        self._pid = os.getpid()
        self._queue: deque[_Waiting] = deque()
        self._queued = 0
        self._changed = threading.Condition()
        self._closing = False
        self._warned: set[str] = set()
        self._not_before = 0.0
        self._told = 0
        self._thread: threading.Thread | None = None

    def put(self, job: Job, cost: int = 1) -> None:
        """Has a job run soon; ``cost``: tokens that it holds until then."""
        if os.getpid() != self._pid:
            # The thread is the parent's.
            return
        with self._changed:
            closed = self._closing
            full = closed or self._queued + cost > MOST_QUEUED
            if not full:
                self._queue.append(_Waiting(job, cost))
                self._queued += cost
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="torchrl_sglang-recorder", daemon=True
                    )
                    self._thread.start()
                elif self._queued >= MANY_QUEUED > self._queued - cost:
                    self._changed.notify()
        if closed:
            self.lose("closed", "it was closed before the run had ended")
        elif full:
            self.lose("queue", "it cannot be written as fast as the run goes on")

    def lose(self, kind: str, reason: str) -> None:
        """Counts a lost record; logs the reason once of each kind."""
        self.lost += 1
        self._warn(kind, reason)

    def close(self, timeout: float = 10.0) -> bool:
        """Writes the queue, and ends the thread; returns whether it ended."""
        if os.getpid() != self._pid:
            # In a forked process, where the thread's lock may be held for ever.
            return True
        with self._changed:
            self._closing = True
            self._changed.notify()
        thread = self._thread
        if thread is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        # All that came in an interval at once: each switch between threads has a cost,
        # and what a thread does after it is slow at first.
        while not self._closing or self._queue:
            with self._changed:
                if not self._closing and self._queued < MANY_QUEUED:
                    self._changed.wait(FLUSH_SECONDS)
            flush_at = time.monotonic() + FLUSH_SECONDS
            while self._queue and time.monotonic() < flush_at:
                with self._changed:
                    waiting = self._queue.popleft()
                    self._queued -= waiting.cost
                self._attempt(waiting.job)
            self._attempt(self._flush, counts=False)
        self._files.close()
        self.lost += self._files.take_unwritten()

    def _flush(self, files: Files) -> None:
        if self.lost > self._told:
            # Until the disk takes it.
            event = {"kind": "lost", "time": time.time(), "records": self.lost}
            files.append("events", event)
            self._told = self.lost
        files.flush()

    def _attempt(self, job: Job, *, counts: bool = True) -> None:
        """Runs a job; a disk that fails is tried again after a while."""
        if time.monotonic() < self._not_before:
            self.lost += counts
            return
        try:
            job(self._files)
        except OSError as error:
            self.lost += counts + self._files.take_unwritten()
            self._not_before = time.monotonic() + 30.0
            self._warn("disk", f"{error}")
        except Exception as error:  # noqa: BLE001 - A run never fails for its record.
            self.lost += counts
            self._warn("record", f"{type(error).__name__}: {error}")

    def _warn(self, kind: str, reason: str) -> None:
        """Says once of each kind of failure that something is not recorded."""
        if kind not in self._warned:
            self._warned.add(kind)
            torchrl_logger.warning(
                f"The recording in {self._name} is not complete: {reason}. The run "
                f"goes on; this is said once."
            )
