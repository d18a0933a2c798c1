"""The command line, ``torchrl-sglang COMMAND``.

Commands are ``demo``, ``serve``, ``gateway``, ``view``, ``plan``, ``doctor`` and
``bench``.

The top layer: it may use everything, and nothing uses it. Modules import at their top
only the requirements of parsing; torch and the engine are imported when a command runs,
so that ``--help`` and mistakes are answered at once. This module itself needs only the
standard library: ``cpu`` runs before anything is installed.

Results go to standard output, everything else to standard error. The exit status is 0,
1 for a failure, 2 for a wrong command line, or 128 plus a signal's number.

A command is a module with ``add_command``, and its name in ``parse``.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from torchrl_sglang.cli.interrupts import Interrupted, interruptible
from torchrl_sglang.errors import ConfigurationError, SGLangError


def program() -> str:
    """Returns the program's name as it was started."""
    script = "torchrl-sglang"
    started_by = os.path.basename(sys.argv[0])
    return script if started_by == script else "python -m torchrl_sglang"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line; exits with status 2 and a message if it is wrong."""
    from torchrl_sglang.cli import bench, demo, doctor, gateway, plan, serve, view
    from torchrl_sglang.cli.options import Parser, split

    parser = Parser(
        prog=program(),
        description="SGLang for TorchRL: serve a model, plan a run, check a machine.",
        epilog="`%(prog)s COMMAND --help` shows the options of a command.",
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="name", required=True
    )
    for command in (demo, serve, gateway, view, plan, doctor, bench):
        text = "on an error, show the traceback"
        command.add_command(commands).add_argument(
            "--traceback", action="store_true", help=text
        )
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    own_words, engine_words = list(words), list[str]()
    chosen: Parser = commands.choices.get(words[0], parser)
    if chosen.get_default("takes_engine_options"):
        own_words, engine_words = split(words, chosen.own_options())
    arguments: argparse.Namespace
    arguments, unknown = parser.parse_known_args(own_words)
    if unknown:
        chosen.error(f"unrecognized arguments: {unknown[0]}")
    arguments.engine_words, arguments.own_options = engine_words, chosen.own_options()
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        with interruptible():
            status: int = arguments.run(arguments)
            sys.stdout.flush()
            return status
    except Interrupted as interrupt:
        print(f"{program()}: interrupted.", file=sys.stderr)
        return 128 + interrupt.number
    except BrokenPipeError:
        # The reader of the output has closed it; the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SGLangError as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        _print_error(arguments, f"{error} {notes}".rstrip())
        return 2 if isinstance(error, ConfigurationError) else 1
    except OSError as error:
        if not _is_of_arguments(error, arguments):
            raise
        reason = f"{error.filename!s} cannot be used: {error.strerror}."
        _print_error(arguments, f"{reason} Give another path.")
        return 2


def _print_error(arguments: argparse.Namespace, text: str) -> None:
    """Prints an error as a sentence, or its traceback if requested."""
    if arguments.traceback:
        traceback.print_exc()
    else:
        print(f"{program()} {arguments.name}: {text}", file=sys.stderr)


def _is_of_arguments(error: OSError, arguments: argparse.Namespace) -> bool:
    """Returns whether an error concerns a path in or around the arguments."""
    if not isinstance(error.filename, str):
        return False
    failed = Path(error.filename).absolute()
    values = vars(arguments).values()
    lists = [value if isinstance(value, list) else [value] for value in values]
    paths = [
        Path(os.path.expanduser(value)).absolute()
        for value in chain.from_iterable(lists)
        if value and isinstance(value, (str, Path))
    ]
    return any(
        path == failed or path in failed.parents or failed in path.parents
        for path in paths
    )
