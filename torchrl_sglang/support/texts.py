"""Texts encodable by UTF-8, and so by every tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError


def half_character(value: Any) -> str:
    """Returns the first unpaired surrogate of a text, or of JSON with texts.

    The 20 characters before it are included; without any, it is an empty text. Texts
    cut within a character, or read with ``errors="surrogateescape"``, have them.
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
    """Raises :class:`.ConfigurationError` for an unpaired surrogate in a value."""
    if half := half_character(value):
        raise ConfigurationError(
            f"{name} has half of a character in {half!r}; a text was cut within one. "
            f"Cut it elsewhere, or give text.encode(errors='replace').decode()."
        )


def replace_halves(text: str) -> str:
    """Returns a text with ``?`` for each unpaired surrogate."""
    return text.encode(errors="replace").decode()
