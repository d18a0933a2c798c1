"""Progress of a run in a terminal, in a log file, and on other ranks."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading

import pytest
from helpers.forked_starts import trainer_python

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_auto
from torchrl_sglang.trainers.progress import StepProgress, choose_mode, tell

PROGRAM = """
import threading
from torchrl_sglang.trainers.progress import StepProgress, find_mode, tell
asked = threading.Semaphore(0)
def status():
    asked.release()
    return "9 groups are complete"
mode = find_mode("auto", is_first=True)
with StepProgress(mode, 3, 1, status, seconds=0.05) as progress:
    asked.acquire(); asked.acquire()
    progress.advance(2, "step 2/3: reward 0.5")
    asked.acquire()
    progress.advance(3, "step 3/3: reward 0.7")
tell("The model is in runs.")
"""


def test_a_log_file_has_lines_and_no_carriage_returns():
    done = subprocess.run(
        [trainer_python(), "-c", PROGRAM], capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stdout + done.stderr
    lines = done.stdout.decode().splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert steps == ["step 2/3: reward 0.5", "step 3/3: reward 0.7"]
    assert lines[0] == "9 groups are complete"
    assert lines[-1] == "The model is in runs."


def test_a_terminal_has_a_bar_below_whole_lines():
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [trainer_python(), "-c", PROGRAM],
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(child)
    found = b""
    try:
        while content := os.read(parent, 65536):
            found += content
    except OSError:
        # The other end was closed.
        pass
    assert process.wait(300) == 0, found
    os.close(parent)
    # Some releases of Triton print more when Python exits.
    text = found.decode().partition("nanobind: leaked")[0]
    # What a terminal shows of a line is what follows its last carriage return.
    lines = [line.rstrip("\r") for line in text.split("\n")]
    shown = [line.rpartition("\r")[2].rstrip() for line in lines]
    assert shown.count("step 2/3: reward 0.5") == 1
    assert shown.count("step 3/3: reward 0.7") == 1
    assert "3/3" in text
    assert "9 groups are complete" in text
    assert "100%" in shown[-3]
    assert shown[-2] == "The model is in runs."


@pytest.mark.parametrize(
    ("given", "is_first", "is_terminal", "in_notebook", "mode"),
    [
        ("auto", True, True, False, "bar"),
        ("auto", True, False, True, "bar"),
        ("auto", True, False, False, "lines"),
        (True, True, False, False, "bar"),
        (False, True, True, True, "off"),
        ("auto", False, True, False, "off"),
        (True, False, True, False, "off"),
    ],
)
def test_modes(given, is_first, is_terminal, in_notebook, mode):
    found = choose_mode(
        given, is_first=is_first, is_terminal=is_terminal, in_notebook=in_notebook
    )
    assert found == mode


def test_a_status_that_raises_or_hangs_ends_with_the_run(capsys):
    asked, released = threading.Event(), threading.Event()

    def status() -> str:
        asked.set()
        if not released.wait(60):
            raise AssertionError
        raise RuntimeError("The collector is gone.")

    with StepProgress("lines", None, 0, status, seconds=0.01) as progress:
        assert asked.wait(60)
        progress.advance(1, "step 1")
        released.set()
    tell("after")
    assert capsys.readouterr().out.splitlines() == ["step 1", "after"]


def test_nothing_is_shown_and_no_thread_runs_on_other_ranks(capsys):
    def status() -> str:
        raise AssertionError

    before = threading.active_count()
    with StepProgress("off", 3, 0, status, seconds=0.0):
        assert threading.active_count() == before
    assert capsys.readouterr() == ("", "")


def test_wrong_arguments():
    for wrong in ("yes", None, 2):
        with pytest.raises(ConfigurationError, match="progress must be"):
            check_auto("progress", wrong)
