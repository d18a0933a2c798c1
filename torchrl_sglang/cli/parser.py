"""A parser that answers a mistake with the nearest name that is right."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torchrl_sglang.backends.support.checks import nearest

__all__ = ["Parser", "positive_int"]


def positive_int(text: str) -> int:
    """Reads an integer above 0, for argparse."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and with suggestions.

    Args:
        engine_options: what is no option of the command's own is collected as one for
            the engine, in ``engine_words``; see :func:`.options.split`.
    """

    def __init__(self, *args: Any, engine_options: bool = False, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._engine_options = engine_options
        self._engine_words_given = False

    def own_options(self) -> dict[str, bool]:
        """Returns this parser's options, and whether each takes a value."""
        return {
            option: action.nargs != 0
            for action in self._actions
            for option in action.option_strings
        }

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses, and takes out what is meant for the engine first."""
        words = list(sys.argv[1:] if args is None else args)
        if not self._engine_options:
            found, unknown = super().parse_known_args(words, namespace)
            # A sub-parser's remainder comes back here; it is reported by the one that
            # knows what was meant.
            if unknown:
                self._refuse(unknown[0])
            return found, []
        from torchrl_sglang.cli.options import split

        own, engine_words = split(words, self.own_options())
        self._engine_words_given = bool(engine_words)
        found, unknown = super().parse_known_args(own, namespace)
        if unknown:
            self._refuse(unknown[0])
        found.engine_words = engine_words
        return found, []

    def error(self, message: str) -> NoReturn:
        """Prints the mistake and ends the program."""
        if self._engine_words_given and "required: " in message:
            message += (
                ". Write it before the server's own options: what follows one of "
                "these is its value"
            )
        super().error(message + ".")

    def _refuse(self, word: str) -> NoReturn:
        meant = nearest(word.partition("=")[0], self.own_options())
        hint = f"; did you mean {meant}?" if meant else ""
        self.error(f"{word!r} is not understood{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            meant = nearest(str(value), map(str, choices))
            hint = f"; did you mean {meant!r}?" if meant else ""
            name = action.metavar or "/".join(action.option_strings)
            self.error(
                f"{value!r} is not a {str(name or action.dest).lower()}; choose from "
                f"{', '.join(map(str, choices))}{hint}"
            )
