"""THE table of encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.support.checks import nearest
from torchrl_sglang.weight_update.encodings.base import Identity, WeightEncoding
from torchrl_sglang.weight_update.encodings.block_fp8 import BlockFP8

_ROWS: tuple[WeightEncoding, ...] = (Identity(), BlockFP8())

ENCODINGS: Mapping[str, WeightEncoding] = {row.name: row for row in _ROWS}
"""Name -> encoding."""


def encoding_for(
    encoding: WeightEncoding | str, quantized: str | None
) -> WeightEncoding:
    """Chooses the encoding for servers.

    Args:
        encoding: the scheme's; ``"auto"`` takes the row that these servers need.
        quantized: ``ServerCapabilities.quantized``.

    Raises:
        UnsupportedByServerError: if the encoding is for servers with other weights.
            Servers that no encoding is for are refused by the engine.
    """
    if not isinstance(encoding, WeightEncoding):
        rows = (row for row in _ROWS if row.quantized is not None)
        fitting = (row for row in rows if row.quantized == quantized)
        return next(fitting, ENCODINGS[Identity.name])
    if encoding.quantized not in (None, quantized):
        raise UnsupportedByServerError(
            f"encoding={encoding.name!r} makes weights for servers that hold them as "
            f"{encoding.quantized!r}, and these hold them as "
            f"{quantized or 'the checkpoint has them'!r}. Nothing was sent; leave "
            f"encoding out, and it is chosen by what the servers hold."
        )
    return encoding


def find_encoding(encoding: Any) -> WeightEncoding | str:
    """Returns the encoding of a name, or ``"auto"``, which :func:`encoding_for` takes.

    Raises:
        ConfigurationError: if there is none of this name.
    """
    if isinstance(encoding, WeightEncoding):
        return encoding
    names = ["auto", *ENCODINGS]
    if isinstance(encoding, str) and encoding in names:
        return ENCODINGS.get(encoding, "auto")
    name = nearest(encoding, names) if isinstance(encoding, str) else None
    raise ConfigurationError(
        f"encoding={encoding!r} is neither a WeightEncoding nor one of "
        f"{', '.join(map(repr, names))}." + (f" Did you mean {name!r}?" if name else "")
    )
