"""The command line: ``python -m torchrl_sglang serve | doctor | bench``.

The top of the package: everything may be used here, and nothing uses it. The modules
import at their top what parsing takes; torch and the engine come in when a command
runs, so that ``--help`` and a mistake are answered at once.

Results go to standard output, everything else to standard error. The exit status is 0,
1 if it failed, 2 if what was asked for is wrong, or 128 and the number of the signal
that interrupted it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from torchrl_sglang.cli import bench, doctor, serve
from torchrl_sglang.cli.interrupts import Interrupted, interruptible
from torchrl_sglang.cli.parser import Parser
from torchrl_sglang.errors import ConfigurationError, SGLangError

__all__ = ["main", "make_parser"]

PROGRAM = "python -m torchrl_sglang"


def make_parser() -> Parser:
    """Returns the parser of the whole command line."""
    parser = Parser(
        prog=PROGRAM,
        description="SGLang for TorchRL: serve a model, check a machine, measure it.",
        epilog=f"`{PROGRAM} COMMAND --help` tells what a command takes.",
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="name", required=True
    )
    for command in (serve, doctor, bench):
        command.add_command(commands).add_argument(
            "--traceback",
            action="store_true",
            help="on an error, show where in the program it arose",
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    Args:
        argv: the command line; by default this process's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    arguments = parser.parse_args(words)
    try:
        with interruptible():
            status: int = arguments.run(arguments)
            sys.stdout.flush()
            return status
    except Interrupted as interrupt:
        print(f"{PROGRAM}: interrupted.", file=sys.stderr)
        return 128 + interrupt.number
    except BrokenPipeError:
        # Whoever read the output has enough; the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SGLangError as error:
        if arguments.traceback:
            traceback.print_exc()
        else:
            notes = " ".join(getattr(error, "__notes__", ()))
            print(
                f"{PROGRAM} {arguments.name}: {error} {notes}".rstrip(), file=sys.stderr
            )
        return 2 if isinstance(error, ConfigurationError) else 1
