"""A process tree leaves nothing behind, however it comes to an end.

The trees are small Python programs, as unwilling to end as a scheduler can be. What
becomes of SGLang's own tree is in ``test_server.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.waiting import wait_until, wait_until_gone

from torchrl_sglang.backends.launch import watchdog
from torchrl_sglang.backends.launch.ports import is_free_port
from torchrl_sglang.backends.launch.watchdog import (
    descendants,
    is_alive,
    processes_by_parent,
)

SECONDS = 60.0
"""For a tree to be gone: the grace that it is given, and a loaded machine."""

STUBBORN = """
import json, os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleep, start_new_session=True)
# An orphan: its parent has ended when this is printed.
code = f"import subprocess; print(subprocess.Popen({sleep!r}, stdout=-3).pid)"
orphan = int(subprocess.check_output([sys.executable, "-S", "-c", code]))
print(json.dumps([os.getpid(), child.pid, orphan]), flush=True)
time.sleep(1000)
"""

OWNER = f"""
import os, subprocess, sys
subprocess.Popen(
    [sys.executable, "-S", {watchdog.__file__!r}, str(os.getpid()), *sys.argv[1:]]
).wait()
"""

LAST_THREAD = """
import ctypes, json, os, platform, signal, socket, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(1000,)).start()
print(json.dumps([os.getpid()]), server.getsockname()[1], sep="\\n", flush=True)
exit_thread = 60 if platform.machine() == "x86_64" else 93
ctypes.CDLL(None).syscall(exit_thread, 0)
"""

TREE = [sys.executable, "-S", "-c", STUBBORN]


def watch(command: list[str], owner: int | None = None) -> list[str]:
    owner = os.getpid() if owner is None else owner
    return [sys.executable, "-S", watchdog.__file__, str(owner), *command]


@contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A running command, and the tree that it says it has become."""
    tree: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            tree += json.loads(process.stdout.readline())
            assert all(is_alive(pid) for pid in tree)
            yield process, tree
        finally:
            for pid in [process.pid, *tree]:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_tree(number):
    with started(watch(TREE)) as (process, tree):
        process.send_signal(number)
        assert process.wait(SECONDS) == 128 + number
        wait_until_gone(tree)


def test_it_ends_the_tree_when_the_server_ends():
    with started(watch(TREE)) as (process, tree):
        os.kill(tree[0], signal.SIGKILL)
        assert process.wait(SECONDS) == 128 + signal.SIGKILL
        wait_until_gone(tree)


def test_it_ends_the_tree_when_the_trainer_is_killed():
    owner = [sys.executable, "-S", "-c", OWNER, *TREE]
    with started(owner) as (process, tree):
        process.kill()
        process.wait()
        wait_until_gone(tree)


def test_the_server_ends_when_the_watchdog_is_killed():
    with started(watch(TREE)) as (process, (server, *_)):
        process.kill()
        process.wait()
        wait_until_gone([server])


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_the_server(status):
    command = [sys.executable, "-S", "-c", f"raise SystemExit({status})"]
    assert subprocess.run(watch(command), timeout=SECONDS).returncode == status


def test_nothing_is_started_for_a_trainer_that_is_gone(tmp_path):
    """It was killed between the start of the watchdog and that of the server."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        gone.wait()
    mark = tmp_path / "started"
    command = [sys.executable, "-S", "-c", f"open({str(mark)!r}, 'w')"]
    done = subprocess.run(watch(command, owner=gone.pid), timeout=SECONDS)
    assert done.returncode == 1
    assert not mark.exists()


@pytest.mark.parametrize("by_itself", [False, True])
def test_files_in_shared_memory_go_with_the_tree(by_itself, tmp_path):
    """A killed server cannot delete what it shares."""
    script = tmp_path / "watchdog.py"
    text = Path(watchdog.__file__).read_text()
    for old, new in (
        (watchdog.SHARED_MEMORY, str(tmp_path)),
        (f"SHARED_POLL_SECONDS = {watchdog.SHARED_POLL_SECONDS}", "X = 5"),
    ):
        assert old in text
        text = text.replace(old, new)
    script.write_text(text.replace("X = 5", "SHARED_POLL_SECONDS = 0.2"))
    mine, other = tmp_path / "sglang_loads_mine", tmp_path / "sglang_loads_other"
    other.touch()
    share = f"import os, time; kept = open({str(mine)!r}, 'w')"
    command = [sys.executable, "-S", "-c", f"{share}\n{STUBBORN}"]
    with started([sys.executable, "-S", str(script), str(os.getpid()), *command]) as (
        process,
        tree,
    ):
        assert mine.exists()
        if by_itself:
            time.sleep(1.0)
            os.kill(tree[0], signal.SIGKILL)
        else:
            process.terminate()
        process.wait(SECONDS)
    assert not mine.exists()
    assert other.exists()


def test_zombies_are_not_alive():
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    try:
        wait_until_gone([process.pid])
        assert process.pid not in descendants(os.getpid())
        assert os.path.exists(f"/proc/{process.pid}"), "Nobody has waited for it."
    finally:
        process.wait()
    assert not is_alive(process.pid)


def test_a_process_lives_until_its_last_thread_has_ended():
    """The first thread has ended, as happens to a killed server on a busy machine."""
    with started(watch([sys.executable, "-S", "-c", LAST_THREAD])) as (process, tree):
        (pid,), port = tree, int(process.stdout.readline())
        wait_until(lambda: b"Z (zombie)" in Path(f"/proc/{pid}/status").read_bytes())
        assert is_alive(pid)
        process.terminate()
        process.wait(SECONDS)
        assert is_free_port("127.0.0.1", port)
        assert not is_alive(pid)


def test_descendants_in_order():
    with started(watch(TREE)) as (process, (server, child, orphan)):
        below = descendants(process.pid)
        assert set(below) == {server, child, orphan}
        assert below.index(server) < below.index(child)
        # It has adopted the orphan.
        assert orphan in dict(processes_by_parent()[process.pid])
        assert descendants(child) == []
