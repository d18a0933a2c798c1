"""Waits for other threads and processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.launch.watchdog import is_alive


def wait_until(
    holds: Callable[[], object],
    seconds: float = 300.0,
    *,
    report: Callable[[], object] = lambda: "",
) -> float:
    """Waits until a condition holds, and returns the seconds that it took.

    Args:
        holds: the condition.
        seconds: limit after which the test fails; no condition takes as long.
        report: returns what the failure shows.
    """
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() < begin + seconds, report()
        time.sleep(0.005)
    return time.monotonic() - begin


def wait_until_gone(pids: Iterable[int], seconds: float = 300.0) -> None:
    """Waits until processes have ended; there must be some."""
    pids = [*pids]
    assert pids
    wait_until(
        lambda: not any(map(is_alive, pids)),
        seconds,
        report=lambda: [pid for pid in pids if is_alive(pid)],
    )


def wait_for_text(log: Path, text: str, process: subprocess.Popen[Any]) -> None:
    """Waits until the log of a process has a text; the process must not end before."""
    wait_until(lambda: text in log.read_text() or process.poll() is not None)
    assert text in log.read_text(), log.read_text()[-3000:]
