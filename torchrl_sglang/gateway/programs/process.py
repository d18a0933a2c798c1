"""Process trees with a time limit and bounded output.

A tree hangs below the watchdog of servers, which leaves no process behind: not after
the program's end, not after a time-out, and not if the owner is killed. A thread
supervises it to its end, independently of the event loop.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from torchrl_sglang.backends.launch import watchdog
from torchrl_sglang.support.blocking import BlockingCalls

T = TypeVar("T")

END_SECONDS = 15.0 + watchdog.CLEANUP_SECONDS
"""Timeout for a tree to end; its watchdog needs at most 2 s, plus its cleanup."""

READ_BYTES = 2**16

ENDLESS = float(2**31)
"""Timeout of a thread with an inner timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessTree:
    """A command to run."""

    command: Sequence[str]
    """Program and arguments."""
    environment: Mapping[str, str] = field(repr=False)
    """All its variables."""
    folder: Path
    """Working folder."""
    stdin: str | None = field(default=None, repr=False)
    """Its input; ``None``: nothing."""
    temporary: Path | None = None
    """Folder to remove if the owner is killed."""
    cleanup: Sequence[str] = ()
    """Command to run before the tree is ended, also if the owner was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Limits of a command."""

    seconds: float
    """Timeout."""
    most_bytes: int
    """Most bytes kept of the output, and of the errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """Outcome of a program."""

    status: int
    """Exit status; from 128 on, a signal ended it, as after a time-out."""
    timed_out: bool
    """Whether it was ended because it exceeded ``timeout``."""
    stdout: str
    """Its output: the last ``max_output`` bytes, as text."""
    stderr: str
    """The same for errors."""
    dropped_bytes: int
    """Number of dropped earlier bytes; 0: the output is complete."""
    folder: Path
    """Its working folder, which exists until the reward function returns."""
    seconds: float
    """Its running time."""


class ProgramEndedError(Exception):
    """Nobody waits for the program any more."""


class TreeRunner:
    """Runs trees in sequence, in the calling thread.

    Attributes:
        has_begun (bool): whether a thread runs them.
        done (threading.Event): whether the thread has ended, with all trees removed.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_wanted = True
        self.has_begun = False

    def run(self, tree: ProcessTree, limits: ProgramLimits) -> ProgramResult:
        """Runs a command to its end or timeout; none of its processes remain."""
        begun = time.monotonic()
        with self._lock:
            self._check_wanted()
            process = self._process = start_tree(tree)
        with process:
            try:
                talk = _Talk(process, tree.stdin, limits.most_bytes)
                timed_out = not talk.until_ended(begun + limits.seconds)
            finally:
                # The block waits for its end, however long it takes.
                end_tree(process)
            talk.until_ended(time.monotonic() + END_SECONDS)
            talk.close()
        self._check_wanted()
        status = process.returncode
        return ProgramResult(
            status=status if status >= 0 else 128 - status,
            timed_out=timed_out,
            stdout=talk.text_of(process.stdout),
            stderr=talk.text_of(process.stderr),
            dropped_bytes=talk.dropped,
            folder=tree.folder,
            seconds=time.monotonic() - begun,
        )

    def end(self) -> None:
        """Begins to end the running tree; no other tree is started."""
        with self._lock:
            self._is_wanted = False
            if self._process is not None:
                # Its thread waits for the end.
                self._process.terminate()

    def _check_wanted(self) -> None:
        if not self._is_wanted:
            raise ProgramEndedError("Nobody waits for this program any more.")


async def in_thread(runner: TreeRunner, work: Callable[[TreeRunner], T]) -> T:
    """Runs a blocking function in a dedicated thread and returns its result.

    If the caller is cancelled, the trees are ended, and the thread ends with them.
    """
    blocking = BlockingCalls("torchrl_sglang-program", 1)

    def run() -> T:
        runner.has_begun = True
        try:
            return work(runner)
        finally:
            runner.done.set()

    try:
        return await blocking.run(run, seconds=ENDLESS)
    except BaseException:
        runner.end()
        raise
    finally:
        blocking.close()


class _Talk:
    """Writes the input of a process, and keeps the end of its output."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdin: str | None, most: int
    ) -> None:
        self._process = process
        self._most = most
        self._left = memoryview((stdin or "").encode(errors="surrogateescape"))
        self._kept: dict[IO[bytes] | None, bytearray] = {}
        self.dropped = 0
        self._selector = selectors.DefaultSelector()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            self._kept[pipe] = bytearray()
            self._register(pipe, selectors.EVENT_READ)
        if process.stdin is not None:
            self._register(process.stdin, selectors.EVENT_WRITE)

    def _register(self, pipe: IO[bytes], event: int) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, event)

    def until_ended(self, deadline: float) -> bool:
        """Returns whether the process ended, with all output read, by the deadline."""
        while self._selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            for key, event in self._selector.select(remaining):
                pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
                (self._write if event == selectors.EVENT_WRITE else self._read)(pipe)
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self, pipe: IO[bytes]) -> None:
        chunk = os.read(pipe.fileno(), READ_BYTES)
        if not chunk:
            self._selector.unregister(pipe)
            return
        tail = self._kept[pipe]
        tail += chunk
        if (over := len(tail) - self._most) > 0:
            del tail[:over]
            self.dropped += over

    def _write(self, pipe: IO[bytes]) -> None:
        try:
            self._left = self._left[os.write(pipe.fileno(), self._left[:READ_BYTES]) :]
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            self._selector.unregister(pipe)
            pipe.close()

    def text_of(self, pipe: IO[bytes] | None) -> str:
        """Returns the kept end of an output."""
        return self._kept[pipe].decode(errors="replace")

    def close(self) -> None:
        self._selector.close()


def start_tree(tree: ProcessTree) -> subprocess.Popen[bytes]:
    """Starts a tree below its watchdog, with pipes that are not buffered."""
    variables: dict[str, str] = {}
    if tree.temporary is not None:
        variables[watchdog.FOLDER_VARIABLE] = str(tree.temporary)
    if tree.cleanup:
        variables[watchdog.CLEANUP_VARIABLE] = json.dumps(list(tree.cleanup))
    return subprocess.Popen(
        [
            # -P: the script's folder must not shadow the standard library.
            *(sys.executable, "-SP", watchdog.__file__, str(os.getpid())),
            *tree.command,
        ],
        stdin=subprocess.DEVNULL if tree.stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=tree.folder,
        env={**tree.environment, **variables},
        start_new_session=True,
    )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends a running tree, and waits for its end."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        # The watchdog has its own session, so the group is the tree's.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_SECONDS)
