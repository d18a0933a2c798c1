"""How far a run is: a bar where somebody looks, and a line now and then in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Self

from tqdm.auto import tqdm

from torchrl_sglang.errors import ConfigurationError

StepsShown = Literal["auto"] | bool
"""Whether a run shows how far it is; ``"auto"``: if a bar can be shown, as a bar."""

ProgressMode = Literal["bar", "lines", "off"]
"""A bar of tqdm, which is a widget in a notebook; lines, without carriage returns; or
nothing between the lines of steps."""

BAR_SECONDS = 1.0
"""Interval at which a bar says what the step does."""

LINE_SECONDS = 60.0
"""Time without a line after which a log gets one."""

END_SECONDS = 2.0
"""Wait for the thread that asks what a step does."""


def check_progress(given: Any) -> StepsShown:
    """Returns the argument ``progress``.

    Raises:
        ConfigurationError: if it is neither a bool nor ``"auto"``.
    """
    if isinstance(given, bool):
        return given
    if given == "auto":
        return "auto"
    raise ConfigurationError(f"progress must be True, False or 'auto', got {given!r}.")


def choose_mode(
    given: StepsShown, *, is_first: bool, is_terminal: bool, in_notebook: bool
) -> ProgressMode:
    """Returns how progress is shown. Pure.

    Args:
        given: the argument of the run; True shows a bar anywhere.
        is_first: whether this is the first rank.
        is_terminal: whether standard error is a terminal.
        in_notebook: whether this is a notebook's kernel.

    Examples:
        >>> choose_mode("auto", is_first=True, is_terminal=False, in_notebook=False)
        'lines'
    """
    if not is_first or given is False:
        return "off"
    return "bar" if given is True or is_terminal or in_notebook else "lines"


def find_mode(given: StepsShown, *, is_first: bool) -> ProgressMode:
    """Returns how progress is shown in this process."""
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
    """Shows the steps of a run, and what the present one does, until its block ends.

    Args:
        mode: how.
        total: steps of the run; ``None`` if that is not known.
        done: steps that were done before.
        status: says in a few words what the run does; called in a thread of its own.
        seconds: interval. Defaults to a second for a bar, and a minute for lines.
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
        default = BAR_SECONDS if mode == "bar" else LINE_SECONDS
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
            # What it asks may be a process that does not answer.
            self._thread.join(END_SECONDS)
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def advance(self, step: int, line: str) -> None:
        """Tells of a step that is done, in a line."""
        tell(line)
        with self._lock:
            self._told_at = time.monotonic()
            if self._bar is not None:
                self._bar.update(step - self._bar.n)

    def _run(self) -> None:
        while not self._ended.wait(self._left()):
            text = ""
            # The part that is asked may be shutting down.
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
