"""THE table of encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import nearest
from torchrl_sglang.weight_update.encodings.base import Identity, WeightEncoding

IDENTITY = Identity.name

_ROWS: tuple[WeightEncoding, ...] = (Identity(),)

ENCODINGS: Mapping[str, WeightEncoding] = {row.name: row for row in _ROWS}
"""Name -> encoding."""


def find_encoding(given: Any) -> WeightEncoding:
    """Returns the encoding that is given by name, or as an object.

    Raises:
        ConfigurationError: if there is none of this name.
    """
    if isinstance(given, WeightEncoding):
        return given
    if isinstance(given, str) and given in ENCODINGS:
        return ENCODINGS[given]
    near = nearest(given, ENCODINGS) if isinstance(given, str) else None
    known = ", ".join(map(repr, ENCODINGS))
    raise ConfigurationError(
        f"encoding={given!r} is neither a WeightEncoding nor one of {known}."
        + (f" Did you mean {near!r}?" if near else "")
    )
