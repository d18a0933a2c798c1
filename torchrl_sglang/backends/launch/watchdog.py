"""Watchdog of a server's process tree: runs a command and leaves no process behind.

A script, run by the trainer by file name, with only the standard library::

    python watchdog.py <pid of the trainer> <command> [argument ...]

It is the server's parent, adopts orphans below it (PR_SET_CHILD_SUBREAPER), and ends
the whole tree on SIGTERM, when the server ends, and when the trainer has ended.

Exit status: the server's, or 128 + signal number.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

TERM_GRACE_SECONDS = 0.5
"""Time from SIGTERM to SIGKILL. SGLang waits longer, and then kills its processes."""

OPEN_FILES = 65_535
"""Open files of the tree, if the machine allows it: each connection takes a file, and a
trainer has more than the usual 1,024 in flight. SGLang itself needs this number."""

SHARED_MEMORY = "/dev/shm"
SHARED_FILES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
"""Name prefixes of files in this folder left by a killed SGLang."""

SHARED_POLL_SECONDS = 5.0
"""Interval between searches for the tree's files, which end without a signal."""

FOLDER_VARIABLE = "TORCHRL_SGLANG_SERVER_FOLDER"
"""Variable with the folder of the server's files, which a killed trainer leaves."""

CLEANUP_VARIABLE = "TORCHRL_SGLANG_CLEANUP"
"""Variable with a command, as JSON, to run before the tree is ended: it removes other
resources than processes, such as a container."""

CLEANUP_SECONDS = 30.0
"""Timeout of the cleanup command."""

_TRACKER = b"multiprocessing.resource_tracker"

_NUM_THREADS = 17
"""Index of a process's number of threads in the result of :func:`_stat`; proc(5)."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    # On Linux. Elsewhere the tree is still killed, by its parent links.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stat(pid: int | str) -> list[bytes]:
    """Returns state, parent, ... of a process; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name is in parentheses and may hold anything.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _lives(fields: list[bytes]) -> bool:
    """Returns whether a process has running threads.

    It is a zombie when its first thread has ended, and holds its ports and memory until
    the end of its last thread, which on a busy machine takes seconds.
    """
    return fields[0] not in (b"Z", b"X") or int(fields[_NUM_THREADS]) > 1


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and has not ended."""
    fields = _stat(pid)
    return bool(fields) and _lives(fields)


def processes_by_parent() -> dict[int, list[tuple[int, bool]]]:
    """Returns parent -> (process id, whether it lives) of all processes.

    Dead processes are included: they can still have children.
    """
    table: dict[int, list[tuple[int, bool]]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if fields := _stat(pid):
            table.setdefault(int(fields[1]), []).append((int(pid), _lives(fields)))
    return table


def descendants(pid: int) -> list[int]:
    """Returns the ids of all living processes below ``pid``, parents first."""
    table = processes_by_parent()
    living: list[int] = []
    frontier = [pid]
    while frontier:
        below = [child for parent in frontier for child in table.get(parent, [])]
        living += [child for child, lives in below if lives]
        frontier = [child for child, _ in below]
    return living


def shared_files(pids: list[int]) -> set[str]:
    """Returns SGLang's files in shared memory open in processes."""
    beginnings = tuple(f"{SHARED_MEMORY}/{name}" for name in SHARED_FILES)
    open_files: set[str] = set()
    for pid in pids:
        # Processes may end during the search.
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    path = os.readlink(entry.path)
                    if path.startswith(beginnings):
                        open_files.add(path)
    return open_files


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except OSError:
        return False


def _raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _end(pids: Callable[[], list[int]], number: int, seconds: float) -> None:
    """Sends a signal to processes and waits until they end, at most ``seconds``."""
    for pid in pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + seconds
    while pids() and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def end_tree(grace: float = TERM_GRACE_SECONDS) -> None:
    """Ends everything below this process: SIGTERM, and SIGKILL after ``grace``."""

    def left() -> list[int]:
        return descendants(os.getpid())

    def workers() -> list[int]:
        return [pid for pid in left() if not _is_tracker(pid)]

    _end(workers, signal.SIGTERM, grace)
    # Killed processes may have started others.
    while workers():
        _end(workers, signal.SIGKILL, 0.1)
    # Without this, shared memory and semaphores of the killed would outlive them.
    # Resource trackers ignore SIGTERM, and end after their last process.
    _end(left, 0, 1.0)
    while left():
        _end(left, signal.SIGKILL, 0.1)


def _clean_up(command: list[str]) -> None:
    """Runs a command to remove resources other than processes."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CLEANUP_SECONDS,
            check=False,
        )


def main(owner: int, command: list[str]) -> int:
    """Runs the command until it or the owner process ends; returns the exit status."""
    parent = os.getppid()
    if not is_alive(owner):
        # The owner ended while this script started, so ``parent`` is another process.
        return 1
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: stop.append(received))
    _raise_open_files()
    # Of this script, and not of the command's environment.
    folder = os.environ.pop(FOLDER_VARIABLE, None)
    cleanup = json.loads(os.environ.pop(CLEANUP_VARIABLE, "[]"))
    server = subprocess.Popen(
        command,
        # If the watchdog itself is killed, the server ends as well.
        preexec_fn=lambda: _prctl(  # noqa: PLW1509 - There is one thread here.
            _PR_SET_PDEATHSIG, signal.SIGKILL
        ),
    )
    shared: set[str] = set()
    next_look = time.monotonic() + SHARED_POLL_SECONDS
    while server.poll() is None and not stop and os.getppid() == parent:
        # A tree outlives its trainer by at most this long.
        time.sleep(0.1)
        if time.monotonic() > next_look:
            next_look += SHARED_POLL_SECONDS
            shared |= shared_files(descendants(os.getpid()))
    status = server.returncode
    shared |= shared_files(descendants(os.getpid()))
    if cleanup:
        _clean_up(cleanup)
    end_tree(grace=TERM_GRACE_SECONDS if os.getppid() == parent else 0.0)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if os.getppid() != parent and folder is not None:
        # The server's log may hold keys.
        shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        return 128 + stop[0] if stop else 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
