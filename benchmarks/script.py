"""What every script here needs: options, rows of a table, and its memory."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchrl_sglang import __version__


def read_options(about: str | None, /, **defaults: Any) -> argparse.Namespace:
    """Reads the options of a script's command line, and says what it runs on.

    Args:
        about: the script's docstring; its first line is the help.
        **defaults: the options, and ``measurement`` and ``model``, which are arguments
            as they are for ``bench``. An option's type is that of its default: a string
            ``"a|b"`` allows these words, of which the first is the default; a tuple
            takes several values; ``False`` is a switch; a type has no default.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    for name, default in defaults.items():
        options: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            options = {"action": "store_true"}
        elif isinstance(default, tuple):
            options |= {"type": type(default[0]), "nargs": "+"}
        elif isinstance(default, type):
            options = {"type": default}
        elif isinstance(default, str) and "|" in default:
            words = default.split("|")
            options = {"choices": words, "default": words[0]}
        flag = "--" + name.replace("_", "-")
        if name in {"measurement", "model"}:
            flag, options["nargs"] = name, "?"
        parser.add_argument(flag, **options)
    found = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    about = f"torchrl_sglang {__version__}, torch {version('torch')}, {cores} cores"
    print(about, file=sys.stderr, flush=True)
    return found


def print_row(name: str, *values: object, width: int = 10) -> None:
    """Prints a row of a table; numbers have three decimals.

    Examples:
        >>> print_row("text", "0.1", 0.25, 3, width=6)
        text                     0.1  0.250      3
    """
    cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)
    print(f"{name:20}", *(f"{cell:>{width}}" for cell in cells), flush=True)


def memory() -> float:
    """Returns this process's resident memory in megabytes."""
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
