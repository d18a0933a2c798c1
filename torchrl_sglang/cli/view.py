"""``view``: shows a recorded run, in a browser or as an HTML file."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torchrl_sglang.cli.interrupts import Interrupted
from torchrl_sglang.cli.options import Parser
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.private_files import for_owner

DESCRIPTION = """\
Shows a run: a timeline of servers and trainer and the run's limit, curves, and all
groups with their responses, token by token. FOLDER is the output of a run, or the
folder of a RunRecorder; of two, curves are in one picture.

It serves the page on this machine and follows a run that goes on, until SIGINT
(Ctrl-C) or SIGTERM. With --output it writes one file instead, which needs no network:
to keep, or to send to a colleague."""

EPILOG = """\
examples:
  %(prog)s runs/grpo
  %(prog)s runs/grpo --output run.html
  %(prog)s runs/before runs/after"""

MOST_RUNS = 2
"""Most runs on a page."""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "view",
        help="show what a run recorded",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    text = "folder of a run; two to compare them"
    add("folders", metavar="FOLDER", nargs="+", type=Path, help=text)
    add("--output", type=Path, metavar="FILE", help="write one HTML file instead")
    add("--port", type=int, default=0, help="port to serve on (default: a free one)")
    text = "only print the address, instead of opening a browser, too"
    add("--no-browser", action="store_true", help=text)
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Serves the page, or writes it."""
    folders = arguments.folders
    if len(folders) > MOST_RUNS:
        raise ConfigurationError(
            f"{len(folders)} folders were given; give one, or two to compare."
        )
    if not 0 <= arguments.port < 2**16:
        raise ConfigurationError(f"--port {arguments.port} is not a port.")
    from torchrl_sglang.recording.reading import find_all

    recordings = find_all(folders)
    if arguments.output is not None:
        from torchrl_sglang.viewer.page import self_contained

        for recording in recordings:
            recording.refresh()
        write(
            arguments.output.expanduser(), self_contained(recordings, now=time.time())
        )
        return 0
    from torchrl_sglang.viewer.library import library
    from torchrl_sglang.viewer.serve import Viewer, serve

    # A missing library is reported now, not in the browser.
    library()

    def ready(url: str) -> None:
        print(url, flush=True)
        print("Serving. Stop it with Ctrl-C.", file=sys.stderr, flush=True)
        if not arguments.no_browser:
            # A browser in this terminal returns when it is closed.
            threading.Thread(target=_open, args=(url,), daemon=True).start()

    try:
        serve(Viewer(recordings), arguments.port, ready=ready)
    except OSError as error:
        raise ConfigurationError(
            f"Port {arguments.port} cannot be used: {error}."
        ) from error
    except Interrupted:
        print("Stopping.", file=sys.stderr, flush=True)
    return 0


def _open(url: str) -> None:
    import webbrowser

    webbrowser.open(url)


def write(path: Path, text: str) -> None:
    """Writes the page, for its owner alone."""
    try:
        with open(path, "w", encoding="utf-8", opener=for_owner) as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be written: {error}."
        ) from error
    name = os.fsencode(path).decode("utf-8", "replace")
    print(f"{name} ({len(text.encode()) / 1e6:.1f} MB)")
