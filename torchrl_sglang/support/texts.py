"""Texts that UTF-8, and with it every tokenizer, can encode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError


def half_character(value: Any) -> str:
    """Returns the 20 characters before the first half of a surrogate pair, and it.

    Texts that were cut within a character, or read with ``errors="surrogateescape"``,
    have such halves.

    Args:
        value: a text, or JSON with texts.

    Returns:
        An empty text if there is no such half.
    """
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return value[max(error.start - 20, 0) : error.end]
    return ""


def check_text(name: str, value: Any) -> None:
    """Raises :class:`.ConfigurationError` if a text or JSON has half of a character."""
    if half := half_character(value):
        raise ConfigurationError(
            f"{name} has half of a character in {half!r}; a text was cut within one. "
            f"Cut it elsewhere, or give text.encode(errors='replace').decode()."
        )


def replace_halves(text: str) -> str:
    """Returns a text with ``?`` for each half of a character."""
    return text.encode(errors="replace").decode()
