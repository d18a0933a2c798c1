"""Loads weight updates over plain HTTP, inside an SGLang server.

The Python of the server imports it; ``torchrl_sglang`` is not installed there, so the
file stands alone. It has to be on the server's ``PYTHONPATH``::

    python -m sglang.launch_server --custom-weight-loader torchrl_sglang_delta.load ...

SGLang calls :func:`load` on every rank, with a message per request. The messages of an
update are numbered from 0, and the last is marked. A full update brings whole tensors,
which go through the model's own ``load_weights``; the destinations of its copies are
recorded. A later update can bring only changed elements, which go straight to these
destinations, as differences of the bit patterns, with an exact result.

SGLang ends when a loader raises, and answers "Success" otherwise. So nothing is raised
here, and the sender queries ``/get_weights_by_name`` for the name :data:`STATE`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOADER = "torchrl_sglang_delta.load"
"""Value of ``--custom-weight-loader``, and of ``load_format`` in requests."""

STATE = "torchrl_sglang_delta.state"
"""Name under which a server reports the state of updates."""

PAYLOAD = "torchrl_sglang_delta"
"""Name of the tensor with a message: a byte per element."""

MAGIC = b"TSDELTA1"
DIGEST_BYTES = 32

LENGTH_BYTES = 8
"""Bytes of the length of the JSON header, in front of it."""

TOKEN_BITS = 48
"""Bits of a token's half; a JSON number is exact up to 53 bits."""

OK, CORRUPT, REFUSED, FAILED = 0, 1, 2, 3
"""Outcome of an update: success, a damaged message, a base other than the loaded
weights, a failed load of its tensors."""

INTEGERS: Mapping[int, torch.dtype] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""Item size -> type of bit patterns."""

_logger = logging.getLogger(__name__)


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Receives a message of an update; raises nothing."""
    state_of(model).receive(dict(named_tensors).get(PAYLOAD))


def state_of(model: Any) -> UpdateState:
    """Returns the state of a model's updates, and makes the model report it."""
    state: UpdateState | None = model.__dict__.get(PAYLOAD)
    if state is None:
        state = UpdateState(model)
        model.__dict__[PAYLOAD] = state
        report_weights = getattr(model, "get_weights_by_name", None)

        def tell(name: str, *args: Any, **options: Any) -> Any:
            if name == STATE:
                return state.tell()
            if report_weights is None:
                raise AttributeError(f"{type(model).__name__} reports no weights.")
            return report_weights(name, *args, **options)

        model.__dict__["get_weights_by_name"] = tell
    return state


class UpdateState:
    """Update state of a model, on a rank."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.token = ""
        """Id of the update whose weights the model holds; empty: unknown."""
        self.update = ""
        self.next = 0
        """Number of the next message of this update."""
        self.outcome = OK
        self.tensors: list[tuple[str, str, list[int]]] = []
        """Name, type and shape of every tensor, in the sender's order."""
        self.routes: dict[int, list[CopyRoute]] = {}
        """Copy routes of each tensor; tensors without an entry are unknown."""
        self.unclear: set[int] = set()
        """Tensors of computations in loading, besides copies."""
        self.parts: dict[int, tuple[torch.Tensor, int]] = {}
        """Partial tensors, and the number of received elements."""
        self.fingerprint: list[int] = []
        self.group = _find_group()

    def tell(self) -> list[float]:
        """Returns the state as numbers: :class:`.LoaderState` reads them."""
        ranks = self._gather((self._is_intact(), self.unclear, set(self.routes)))
        unclear = set[int]().union(*(rank[1] for rank in ranks))
        placed = set[int]().union(*(rank[2] for rank in ranks))
        # A tensor without a destination may still be needed.
        incomplete = [
            i for i in range(len(self.tensors)) if i in unclear or i not in placed
        ]
        numbers = [
            *_halves(self.token),
            *_halves(self.update),
            self.next,
            self.outcome,
            all(rank[0] for rank in ranks),
            *incomplete,
        ]
        return [float(number) for number in numbers]

    def _is_intact(self) -> bool:
        """Whether the model's weights still equal the last update's, bit for bit."""
        try:
            return bool(self.token) and self.fingerprint == fingerprint(self.model)
        except Exception:
            # The other ranks wait for this rank's value.
            _logger.exception("The weights could not be read.")
            return False

    def receive(self, payload: torch.Tensor | None) -> None:
        """Receives a message and broadcasts it: only the first rank got it."""
        data = b"" if payload is None else payload.cpu().numpy().tobytes()
        if self.group is not None:
            data = self.group.broadcast_object(data, src=0)
        outcome = FAILED
        try:
            outcome = self._take(data)
        except Exception:
            _logger.exception("A message of a weight update could not be loaded.")
        outcome = max(self._gather(outcome))
        if outcome != OK:
            self.outcome, self.token = outcome, ""
            self.parts.clear()

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        return list(self.group.all_gather_object(value))

    def _take(self, data: bytes) -> int:
        message = read_message(data)
        if message is None:
            return CORRUPT
        header, body = message
        if header["number"] == 0:
            base = header["base"]
            if base and (base != self.token or header["tensors"] != self.tensors):
                return REFUSED
            self._begin(header, keep=bool(base))
        elif header["update"] != self.update or header["number"] != self.next:
            return REFUSED
        if self.outcome != OK:
            return self.outcome
        self.next += 1
        for tensors in self._whole(self._entries(header, body)):
            self._load(tensors)
        if header["last"]:
            if self.parts:
                return REFUSED
            self.fingerprint = fingerprint(self.model)
            self.token = self.update
        return OK

    def _begin(self, header: Mapping[str, Any], *, keep: bool) -> None:
        self.token, self.update = "", header["update"]
        self.next, self.outcome = 0, OK
        self.parts.clear()
        if not keep:
            self.tensors = header["tensors"]
            self.routes.clear()
            self.unclear.clear()

    def _entries(
        self, header: Mapping[str, Any], body: bytes
    ) -> Iterator[tuple[Mapping[str, Any], torch.Tensor]]:
        """Applies changes, and yields the parts of whole tensors."""
        device = next(self.model.parameters()).device
        # A writable copy, for torch.
        flat = torch.frombuffer(bytearray(body or b"\0"), dtype=torch.uint8).to(device)
        start = 0
        for entry in header["entries"]:
            gaps = flat[start : start + entry["gap_bytes"]]
            start += entry["gap_bytes"]
            size = entry["item_bytes"]
            end = start + entry["count"] * size
            # Bytes of equal significance are together.
            planes = flat[start:end].view(size, entry["count"]).t()
            values = planes.clone(memory_format=torch.contiguous_format)
            values = values.view(-1).view(INTEGERS[size])
            start = end
            if not entry["gap_bytes"] and entry["whole"]:
                yield entry, values
                continue
            begin = entry["begin"]
            if entry["gap_bytes"]:
                indices = read_gaps(gaps, entry["gap_size"]) + begin
                values = _signed(values)
            else:
                indices = torch.arange(entry["count"], device=device) + begin
            for route in self.routes[entry["tensor"]]:
                route.write(self.model, indices, values, add=bool(entry["gap_bytes"]))

    def _whole(
        self, entries: Iterator[tuple[Mapping[str, Any], torch.Tensor]]
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Yields the tensors completed by a message."""
        ready: list[tuple[int, torch.Tensor]] = []
        for entry, values in entries:
            number, begin = entry["tensor"], entry["begin"]
            _, dtype, shape = self.tensors[number]
            size = torch.Size(shape).numel()
            flat, count = self.parts.pop(number, (values, 0))
            if len(values) < size:
                if not count:
                    flat = torch.empty(size, dtype=values.dtype, device=values.device)
                flat[begin : begin + len(values)] = values
                count += len(values)
                if count < size:
                    self.parts[number] = flat, count
                    continue
            ready.append((number, flat.view(getattr(torch, dtype)).view(shape)))
        if ready:
            yield ready

    def _load(self, ready: list[tuple[int, torch.Tensor]]) -> None:
        """Loads whole tensors, and records the destinations of their elements."""
        with PlaceRecorder(self.model, ready) as recorder:
            self.model.load_weights(
                [(self.tensors[number][0], value) for number, value in ready]
            )
        for number, value in ready:
            routes = recorder.routes.get(number, [])
            unclear = number in recorder.unclear
            if unclear or not all(route.holds(self.model, value) for route in routes):
                self.unclear.add(number)
            elif routes:
                self.routes[number] = routes


class CopyRoute(NamedTuple):
    """Maps a block of a sent tensor to its strided position in a model parameter."""

    target: str
    """Name of the model's tensor, which begins at ``offset`` of its memory."""
    layout: tuple[Any, ...]
    """Its type, shape, strides and offset at the time of recording."""
    source: int
    """Position of the first element in the sent tensor."""
    offset: int
    """Position of the first element in the parameter's memory."""
    size: tuple[int, ...]
    """Shape of the block, greatest stride in the sent tensor first."""
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]

    def _memory(self, model: Any) -> torch.Tensor:
        """Returns the memory of the parameter, as bit patterns."""
        target = _tensors_of(model)[self.target]
        if _layout(target) != self.layout:
            raise ValueError(f"{self.target} has changed its layout: {_layout(target)}")
        bits = INTEGERS[target.element_size()]
        made = torch.empty(0, dtype=bits, device=target.device)
        return made.set_(target.untyped_storage())

    def write(
        self, model: Any, indices: torch.Tensor, values: torch.Tensor, *, add: bool
    ) -> None:
        """Writes elements in this block, or adds to them."""
        memory = self._memory(model)
        remainder = indices - self.source
        inside = remainder >= 0
        places = torch.full_like(remainder, self.offset)
        for size, source, target in zip(
            self.size, self.source_stride, self.target_stride, strict=True
        ):
            coordinate = remainder // source
            inside &= coordinate < size
            remainder -= coordinate * source
            places += coordinate * target
        inside &= remainder == 0
        places, values = places[inside], values[inside]
        memory[places] = memory[places] + values if add else values

    def holds(self, model: Any, value: torch.Tensor) -> bool:
        """Returns whether the parameter's block equals the tensor's, bit for bit."""
        bits = value.view(INTEGERS[value.element_size()])
        target = self._memory(model).as_strided(
            self.size, self.target_stride, self.offset
        )
        source = bits.as_strided(
            self.size, self.source_stride, bits.storage_offset() + self.source
        )
        return torch.equal(target, source)


class PlaceRecorder(TorchDispatchMode):
    """Records which elements of given tensors are copied where in a model."""

    def __init__(self, model: Any, given: list[tuple[int, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routes: dict[int, list[CopyRoute]] = {}
        self.unclear: set[int] = set()
        self._given = {
            value.untyped_storage().data_ptr(): (number, value)
            for number, value in given
        }
        self._targets = {
            value.untyped_storage().data_ptr(): (name, value)
            for name, value in _tensors_of(model).items()
        }

    def _number_of(self, value: Any) -> tuple[int, torch.Tensor] | None:
        """Returns the base of a view among given tensors."""
        if not isinstance(value, torch.Tensor):
            return None
        return self._given.get(value.untyped_storage().data_ptr())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator, and records its copies."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            if (match := self._number_of(args[1])) is not None:
                self._copied(*match, args[1], args[0])
            return result
        flat = [item for argument in args for item in _items(argument)]
        for match in filter(None, map(self._number_of, flat)):
            outputs = [o for o in _items(result) if isinstance(o, torch.Tensor)]
            in_place = all(self._number_of(output) for output in outputs)
            if func._schema.is_mutable or not outputs or not in_place:
                self.unclear.add(match[0])
        return result

    def _copied(
        self, number: int, given: torch.Tensor, part: torch.Tensor, target: torch.Tensor
    ) -> None:
        parameter = self._targets.get(target.untyped_storage().data_ptr())
        fits = part.shape == target.shape and part.dtype == target.dtype
        # Greatest stride first, without sides of a single element.
        sides = sorted(
            (-source, size, target_stride)
            for source, size, target_stride in zip(
                part.stride(), part.shape, target.stride(), strict=False
            )
            if size > 1
        )
        sides = [(-source, s, target_stride) for source, s, target_stride in sides]
        if parameter is None or not fits or not _nested(sides):
            self.unclear.add(number)
            return
        name, tensor = parameter
        route = CopyRoute(
            target=name,
            layout=_layout(tensor),
            source=(part.data_ptr() - given.data_ptr()) // given.element_size(),
            offset=int(target.storage_offset()),
            size=tuple(size for _, size, _ in sides),
            source_stride=tuple(source for source, _, _ in sides),
            target_stride=tuple(target_stride for _, _, target_stride in sides),
        )
        self.routes.setdefault(number, []).append(route)


def _nested(sides: list[tuple[int, int, int]]) -> bool:
    """Returns whether an element's position determines its coordinates."""
    inner = 0
    for source, size, _ in reversed(sides):
        if source <= inner:
            return False
        inner += source * (size - 1)
    return True


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.data
        for named in (model.named_buffers(), model.named_parameters())
        for name, value in named
    }


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.storage_offset()


def _halves(token: str) -> list[int]:
    """Returns a token of hexadecimal digits as two numbers; empty: zeros."""
    number = int(token or "0", 16)
    return [number >> TOKEN_BITS, number & ((1 << TOKEN_BITS) - 1)]


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Decodes zigzag-encoded integers."""
    shifted = (values >> 1) & torch.iinfo(values.dtype).max
    return shifted ^ -(values & 1)


def fingerprint(model: Any) -> list[int]:
    """Returns a bit sum of each parameter, which detects changes."""
    sums = []
    for parameter in model.parameters():
        value = parameter.data
        flat = value.contiguous().view(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        end = len(flat) // 8 * 8
        sums.append(flat[:end].view(torch.int64).sum() + flat[end:].sum())
    return [int(total) for total in torch.stack(sums).tolist()]


def read_gaps(gaps: torch.Tensor, size: int) -> torch.Tensor:
    """Returns indices from the numbers of unchanged elements before each.

    The greatest number stands for as many unchanged elements with none after them.
    """
    # A view of two bytes begins at an even place.
    numbers = gaps.clone().view(INTEGERS[size]).to(torch.int64) & ((1 << 8 * size) - 1)
    changed = numbers != (1 << 8 * size) - 1
    places: torch.Tensor = (numbers + changed).cumsum(0)[changed] - 1
    return places


def read_message(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Returns the header and the body of a message; None if it was damaged."""
    content, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if not content.startswith(MAGIC) or hashlib.sha256(content).digest() != digest:
        return None
    start = len(MAGIC) + LENGTH_BYTES
    end = start + int.from_bytes(content[len(MAGIC) : start], "little")
    header: dict[str, Any] = json.loads(content[start:end])
    return header, _decompress(content[end:], header["codec"])


def _decompress(body: bytes, codec: str) -> bytes:
    if codec == "zstd":
        unpacked: bytes = (
            importlib.import_module("zstandard").ZstdDecompressor().decompress(body)
        )
        return unpacked
    return zlib.decompress(body) if codec == "zlib" else body


def _find_group() -> Any:
    """Returns the group of the model's ranks; None for a single rank."""
    try:
        group = importlib.import_module("sglang.srt.distributed").get_tp_group()
    except (ImportError, AssertionError):
        return None
    return group if group.world_size > 1 else None
