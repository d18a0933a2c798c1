"""Messages of a weight update over HTTP, made small. Pure.

``torchrl_sglang_delta.py`` reads them in the server, and says what an update consists
of. A message has tensors, or the changed elements of some: the numbers of unchanged
elements between them, and the differences of their bit patterns. An optimiser's step
changes a bfloat16 mostly by one unit in the last place, so that zstd makes two bytes of
such differences 0.3, and two bytes of new values 1.4.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_sglang.backends.launch.loaders import torchrl_sglang_delta as loader
from torchrl_sglang.weight_update.weights import TensorSpec

LEVEL = 1
"""Of compression. Level 3 of zstd is three times slower, and no smaller."""

GAP_SIZES = (1, 2)
"""Bytes of a number of unchanged elements; the smaller of the results is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaState:
    """State of the loader in a server."""

    token: str
    """The update whose weights the server holds; empty: none that it knows."""
    update: str
    """The latest update that it took a message of."""
    next: int
    """Number of the message of this update that it waits for."""
    outcome: int
    """``loader.OK``, or why it takes no more messages."""
    intact: bool
    """The weights are those that the update has left, to the bit."""
    indivisible: tuple[int, ...]
    """Tensors, by number, that it can only load as a whole."""

    @classmethod
    def read(cls, numbers: Sequence[float] | None) -> DeltaState | None:
        """Reads a server's answer; None if its loader has not been called yet."""
        if numbers is None or len(numbers) < 7:
            return None
        high, low, update_high, update_low, following, outcome, intact, *indivisible = (
            map(int, numbers)
        )
        return cls(
            token=_token(high, low),
            update=_token(update_high, update_low),
            next=following,
            outcome=outcome,
            intact=bool(intact),
            indivisible=tuple(indivisible),
        )


def _token(high: int, low: int) -> str:
    number = (high << loader.TOKEN_BITS) | low
    return f"{number:0{loader.TOKEN_BITS // 2}x}" if number else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MessagePart:
    """Some elements of a tensor, as they are sent."""

    entry: dict[str, Any]
    """Description in the message's header."""
    pieces: tuple[torch.Tensor, ...]
    """The bytes, uint8 on any device."""

    @property
    def num_bytes(self) -> int:
        """Size before compression."""
        return sum(map(len, self.pieces))


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Returns the bit patterns of a flat tensor, as integers."""
    return values.view(loader.INTEGERS[values.element_size()])


def all_of(
    tensor: int, begin: int, bits: torch.Tensor, *, whole: bool = True
) -> MessagePart:
    """Makes the part with all elements of a range.

    The range of the tensor with this number starts at ``begin``. A ``whole`` tensor is
    loaded when all its ranges have come; otherwise these elements replace earlier ones.
    """
    entry = _entry(tensor, begin, bits, gap_bytes=0, gap_size=1, whole=whole)
    return MessagePart(entry=entry, pieces=(_planes(bits),))


def changes_of(
    tensor: int, begin: int, bits: torch.Tensor, old_bits: torch.Tensor
) -> tuple[MessagePart | None, torch.Tensor]:
    """Makes the part with the changed elements of a range.

    Returns:
        The part, or None if nothing has changed, and the places of what has.
    """
    indices = (bits != old_bits).nonzero().view(-1)
    if not len(indices):
        return None, indices
    gaps, size = _write_gaps(indices)
    difference = bits[indices] - old_bits[indices]
    # Zigzag-encoded: 0, -1, 1, -2, ... become 0, 1, 2, 3.
    small = (difference << 1) ^ (difference >> (8 * bits.element_size() - 1))
    if len(gaps) + small.nbytes >= bits.nbytes:
        return all_of(tensor, begin, bits, whole=False), indices
    entry = _entry(
        tensor, begin, small, gap_bytes=len(gaps), gap_size=size, whole=False
    )
    return MessagePart(entry=entry, pieces=(gaps, _planes(small))), indices


def _entry(
    tensor: int,
    begin: int,
    values: torch.Tensor,
    *,
    gap_bytes: int,
    gap_size: int,
    whole: bool,
) -> dict[str, Any]:
    return {
        "tensor": tensor,
        "begin": begin,
        "count": len(values),
        "item_bytes": values.element_size(),
        "gap_bytes": gap_bytes,
        "gap_size": gap_size,
        "whole": whole,
    }


def _planes(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of integers, grouped by significance."""
    size = values.element_size()
    return values.contiguous().view(torch.uint8).view(-1, size).t().reshape(-1)


def _write_gaps(indices: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the numbers of unchanged elements before each, and bytes of a number."""
    start = indices.new_tensor([-1])
    gaps = torch.diff(indices, prepend=start) - 1
    encodings: list[tuple[torch.Tensor, int]] = []
    for size in GAP_SIZES:
        limit = (1 << 8 * size) - 1
        # The greatest number is followed by no changed element.
        skips = gaps // limit
        places = (skips + 1).cumsum(0) - 1
        numbers = torch.full((int(places[-1]) + 1,), limit, device=gaps.device)
        numbers[places] = gaps - skips * limit
        narrow = numbers.to(torch.uint8 if size == 1 else loader.INTEGERS[size])
        encodings.append((narrow.view(torch.uint8), size))
        if not skips.any():
            break
    return min(encodings, key=lambda encoding: len(encoding[0]))


@dataclass(kw_only=True)
class DeltaWriter:
    """Makes the messages of one update, in order."""

    update: str
    """Token of the update."""
    base: str
    """Token of the update that the changes are against; empty: there are none."""
    specs: Sequence[TensorSpec]
    """All tensors, in the order of their numbers."""
    number: int = 0
    """Number of the next message."""
    num_bytes: int = 0
    """Size of the parts that wait, before compression."""
    parts: list[MessagePart] = field(default_factory=list)

    def add(self, part: MessagePart) -> None:
        """Adds a part to the next message."""
        self.parts.append(part)
        self.num_bytes += part.num_bytes

    def message(self, *, last: bool = False) -> bytes:
        """Returns the next message, with the parts that were added."""
        codec = "zstd" if importlib.util.find_spec("zstandard") else "zlib"
        pieces = [piece for part in self.parts for piece in part.pieces]
        flat = torch.cat(pieces).cpu() if pieces else torch.empty(0, dtype=torch.uint8)
        header = {
            "update": self.update,
            "number": self.number,
            "base": self.base,
            "last": last,
            "codec": codec,
            "entries": [part.entry for part in self.parts],
        }
        if self.number == 0:
            header["tensors"] = [
                [s.name, str(s.dtype).removeprefix("torch."), list(s.shape)]
                for s in self.specs
            ]
        self.number += 1
        self.num_bytes, self.parts = 0, []
        return _seal(header, _compress(flat, codec))


def _compress(flat: torch.Tensor, codec: str) -> bytes:
    data: Any = flat.numpy()
    if codec == "zlib":
        return zlib.compress(data, LEVEL)
    packed: bytes = (
        importlib.import_module("zstandard")
        .ZstdCompressor(level=LEVEL, threads=-1)
        .compress(data)
    )
    return packed


def _seal(header: dict[str, Any], body: bytes) -> bytes:
    """Returns a message with the digest that shows damage on the way."""
    text = json.dumps(header).encode()
    length = len(text).to_bytes(loader.LENGTH_BYTES, "little")
    content = b"".join((loader.MAGIC, length, text, body))
    return content + hashlib.sha256(content).digest()
