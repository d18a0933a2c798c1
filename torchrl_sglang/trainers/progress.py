"""Progress of a run: a bar in a terminal, and lines in a log file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Self

from tqdm.auto import tqdm

StepsShown = Literal["auto"] | bool
"""Whether a run shows its progress; ``"auto"``: as a bar, where that is possible."""

ProgressMode = Literal["bar", "lines", "off"]
"""A bar of tqdm, which is a widget in a notebook; lines, without carriage returns; or
nothing between the lines of steps."""


def choose_mode(
    given: StepsShown, *, is_first: bool, is_terminal: bool, in_notebook: bool
) -> ProgressMode:
    """Returns the mode of showing progress; True shows a bar anywhere. Pure."""
    if not is_first or given is False:
        return "off"
    return "bar" if given is True or is_terminal or in_notebook else "lines"


def find_mode(given: StepsShown, *, is_first: bool) -> ProgressMode:
    """Returns the mode of showing progress in this process."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return choose_mode(
        given,
        is_first=is_first,
        is_terminal=sys.stderr is not None and sys.stderr.isatty(),
        in_notebook=type(shell).__name__ == "ZMQInteractiveShell",
    )


def tell(text: str) -> None:
    """Prints a line at once, also into a pipe, and above a bar."""
    tqdm.write(text)
    sys.stdout.flush()


class StepProgress:
    """Shows the steps of a run and the status of the present step in a block.

    ``status`` returns the status in a few words, in another thread, once in
    ``seconds``: by default a second for a bar, and a minute for lines.
    """

    def __init__(
        self,
        mode: ProgressMode,
        total: int | None,
        done: int,
        status: Callable[[], str],
        *,
        seconds: float | None = None,
    ) -> None:
        self._mode, self._total, self._done = mode, total, done
        self._status = status
        # A log file gets few lines.
        default = 1.0 if mode == "bar" else 60.0
        self._seconds = default if seconds is None else seconds
        self._bar: Any = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._told_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._mode == "off":
            return self
        if self._mode == "bar":
            self._bar = tqdm(
                total=self._total, initial=self._done, unit="step", dynamic_ncols=True
            )
        self._thread = threading.Thread(
            target=self._run, name="torchrl_sglang-progress", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            # The status may wait for a process that does not respond.
            self._thread.join(2.0)
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def advance(self, step: int, line: str) -> None:
        """Prints the line of a complete step."""
        tell(line)
        with self._lock:
            self._told_at = time.monotonic()
            if self._bar is not None:
                self._bar.update(step - self._bar.n)

    def _run(self) -> None:
        while not self._ended.wait(self._left()):
            text = ""
            # A part with the status may be shutting down.
            with suppress(Exception):
                text = self._status()
            with self._lock:
                if self._ended.is_set():
                    return
                if self._bar is not None:
                    self._bar.set_postfix_str(text)
                elif text and self._left() <= 0:
                    tell(text)
                self._told_at = time.monotonic()

    def _left(self) -> float:
        return max(self._told_at + self._seconds - time.monotonic(), 0.0)
