"""THE table of encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import nearest
from torchrl_sglang.weight_update.encodings.base import Identity, WeightEncoding
from torchrl_sglang.weight_update.encodings.block_fp8 import BlockFP8

IDENTITY = Identity.name
AUTO = "auto"

_ROWS: tuple[WeightEncoding, ...] = (Identity(), BlockFP8())

ENCODINGS: Mapping[str, WeightEncoding] = {row.name: row for row in _ROWS}
"""Name -> encoding."""


def encoding_for(given: WeightEncoding | None, quantized: str | None) -> WeightEncoding:
    """Returns what was given, or the encoding that is for such servers.

    Args:
        given: ``None`` for ``"auto"``.
        quantized: ``ServerCapabilities.quantized``.
    """
    if given is not None:
        return given
    fits = (row for row in _ROWS if row.quantized is not None)
    found = (row for row in fits if row.quantized == quantized)
    return next(found, ENCODINGS[IDENTITY])


def find_encoding(given: Any) -> WeightEncoding | None:
    """Returns the encoding that is given by name, or as an object.

    ``None`` for ``"auto"``: the servers decide (:func:`encoding_for`).

    Raises:
        ConfigurationError: if there is none of this name.
    """
    if isinstance(given, WeightEncoding):
        return given
    if given == AUTO:
        return None
    if isinstance(given, str) and given in ENCODINGS:
        return ENCODINGS[given]
    near = nearest(given, [AUTO, *ENCODINGS]) if isinstance(given, str) else None
    known = ", ".join(map(repr, [AUTO, *ENCODINGS]))
    raise ConfigurationError(
        f"encoding={given!r} is neither a WeightEncoding nor one of {known}."
        + (f" Did you mean {near!r}?" if near else "")
    )
