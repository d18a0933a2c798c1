"""Loads weights into a served model by copies traced once.

A module for ``--custom-weight-loader torchrl_sglang_loader.load``. It runs in the
schedulers of a server, whose Python does not have ``torchrl_sglang``, so the file
stands alone; its folder is on the server's ``PYTHONPATH``.

The model's own ``load_weights`` runs once on tensors without memory, while a dispatch
mode records its copies between tensor views and parameter views, and suppresses them.
So each rank finds its own shard. Later updates repeat only these copies. A loader with
computations cannot be traced, and still runs ``load_weights`` for every update.

A request holds an entry: a JSON text in the place of a name, and a tensor of bytes. An
exception here would end the server, so errors are stored, and reported by
``/get_weights_by_name`` under a name with the prefix :data:`QUESTION`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

QUESTION = "torchrl_sglang_loader"
"""Prefix of queries of this module, instead of parameters."""

LARGE_BYTES = 8 << 20
"""Smaller runs of memory are copied by a common kernel, at 0.63 of the speed of a copy,
whose start takes 6 µs."""

aten = torch.ops.aten

Spec = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor for ``load_weights``."""


class UntraceableError(Exception):
    """``load_weights`` does something else than copying."""


@dataclass(slots=True)
class Destination:
    """A parameter or buffer of the model, as it was when it was traced."""

    table: dict[str, Any]
    """The module's parameters or buffers."""
    name: str
    tensor: torch.Tensor
    address: int

    def is_valid(self) -> bool:
        """Returns whether the module still has it, at the same address."""
        is_current = self.table.get(self.name) is self.tensor
        return is_current and self.tensor.data_ptr() == self.address


@dataclass(slots=True)
class CopyStep:
    """A copy into a parameter, or a value for a part of it."""

    place: Destination
    target: torch.Tensor
    """View of the written part."""
    size: tuple[int, ...] = ()
    """Shape of the source part in the sent tensor."""
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Position of its first value."""
    fill: float | None = None
    """The value, for a constant fill."""

    @property
    def is_run(self) -> bool:
        """Whether it copies contiguous memory to contiguous memory."""
        return self.fill is None and self.target.dim() == 1 and self.stride == (1,)

    def moved(self, count: int) -> CopyStep:
        """Returns a step whose source begins ``count`` values later."""
        return replace(self, offset=self.offset + count)

    def longer(self, count: int) -> CopyStep:
        """Returns a step with ``count`` more values at its end."""
        size = (self.size[0] + count,)
        return replace(self, target=self.target.as_strided(size, (1,)), size=size)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the source part of a contiguous tensor."""
        offset = tensor.storage_offset() + self.offset
        return torch.as_strided(tensor, self.size, self.stride, offset)


Plan = list[CopyStep]


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies from probes, tensors without memory, and makes none."""

    def __init__(self, places: dict[int, Destination]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self._probes: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        self._current = ""
        self._written: set[tuple[Any, ...]] = set()
        self.plans: dict[str, Plan] = {}

    def probe(self, spec: Spec) -> torch.Tensor:
        """Returns the probe in the place of a tensor."""
        name, dtype, shape = spec
        probe = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        self._kept.append(probe)
        self._probes[probe.untyped_storage()._cdata] = name
        self._current = name
        self.plans[name] = []
        return probe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            return self._copy(args[0], args[1])
        if func is aten.zero_.default:
            return self._fill(args[0], 0.0)
        if func is aten.fill_.Scalar:
            return self._fill(args[0], float(args[1]))
        if func in (aten.clone.default, aten._to_copy.default):
            # It has the probe's values, on another device or in another memory order.
            keeps_dtype = kwargs.get("dtype") in (None, args[0].dtype)
            if keeps_dtype and self._name_of(args[0]) is not None:
                return args[0]
        inputs = [*args, *kwargs.values()]
        nested = [x for v in inputs if isinstance(v, (list, tuple)) for x in v]
        reads = any(isinstance(value, torch.Tensor) for value in (*inputs, *nested))
        if reads and not _is_view(func):
            raise UntraceableError(f"it calls {func} while it loads {self._current}")
        return func(*args, **kwargs)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        if tensor.device.type != "meta":
            return None
        return self._probes.get(tensor.untyped_storage()._cdata)

    def _place_of(self, tensor: torch.Tensor) -> Destination:
        if tensor.device.type != "meta":
            place = self._places.get(tensor.untyped_storage().data_ptr())
            if place is not None:
                return place
        raise UntraceableError(
            f"it writes to a tensor that is no parameter while it loads {self._current}"
        )

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if target.numel() == 0:
            return target
        place, name = self._place_of(target), self._name_of(source)
        if name is None:
            raise UntraceableError(
                f"it copies computed values while it loads {self._current}"
            )
        # As copy_ does with a source of another shape.
        source = source.expand(target.shape)
        self._add(
            name,
            CopyStep(
                place=place,
                target=target,
                size=tuple(source.shape),
                stride=source.stride(),
                offset=int(source.storage_offset()),
            ),
        )
        return target

    def _fill(self, target: torch.Tensor, value: float) -> torch.Tensor:
        if target.numel():
            step = CopyStep(place=self._place_of(target), target=target, fill=value)
            self._add(self._current, step)
        return target

    def _add(self, name: str, step: CopyStep) -> None:
        target = step.target
        key = (target.data_ptr(), target.shape, target.stride())
        if key in self._written:
            raise UntraceableError(f"it writes twice to the destination of {name}")
        self._written.add(key)
        if step.fill is None and target.is_contiguous():
            # A contiguous copy is fastest.
            packed = torch.empty(step.size, device="meta").stride()
            if step.stride == packed:
                step.target = target.view(-1)
                step.size, step.stride = (target.numel(),), (1,)
        self.plans[name].append(step)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    aliases = [value.alias_info for value in returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def find_places(model: torch.nn.Module) -> dict[int, Destination]:
    """Returns a model's parameters and buffers, by the addresses of their memory."""
    places: dict[int, Destination] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                key = tensor.untyped_storage().data_ptr()
                if key and key not in places:
                    places[key] = Destination(table, name, tensor, tensor.data_ptr())
    return places


def trace(model: Any, specs: Sequence[Spec]) -> dict[str, Plan]:
    """Traces ``load_weights`` without a change; returns the copies of each tensor."""
    places = find_places(model)
    recorder = CopyRecorder(places)
    held = [(place, place.tensor.data) for place in places.values()]
    with torch.no_grad(), recorder:
        model.load_weights((spec[0], recorder.probe(spec)) for spec in specs)
    for place, data in held:
        if not place.is_valid():
            place.tensor.data = data
            place.table[place.name] = place.tensor
            raise UntraceableError(f"it replaces the parameter {place.name}")
    return recorder.plans


@dataclass(slots=True)
class OpenMemory:
    """Open memory of a sender."""

    number: int
    """Sender-assigned id of this memory."""
    pid: int
    copies: Copies


@dataclass(slots=True, eq=False)
class LoaderState:
    """Loader state of a model."""

    plans: dict[Spec, Plan] = field(default_factory=dict)
    """Copies of the traced tensors."""
    layouts: dict[tuple[Spec, ...], list[tuple[torch.dtype, CopyStep]]] = field(
        default_factory=dict
    )
    """Copies from runs of bytes, by the tensors in these."""
    places: dict[int, Destination] = field(default_factory=dict)
    """Target parameters, by identity."""
    untraced: str = ""
    """Reason why ``load_weights`` cannot be traced; empty while it can."""
    update: int = 0
    """Number of the latest update."""
    requests: int = 0
    """Number of its finished requests."""
    error: str = ""
    kept: OpenMemory | None = None

    def answer(self, question: str) -> list[float]:
        """Returns numbers: of the update, of its requests, whether it has failed,
        whether the model is traced, whether memory is kept; then a text, as numbers.
        """
        verb, _, name = question.partition("/")
        if verb == "forget" and self.kept is not None and name == str(self.kept.number):
            self.kept = None
        elif verb == "abandon":
            _abandon(name)
        text = self.error or self.untraced
        flags = (bool(self.error), not self.untraced, self.kept is not None)
        return [
            *map(float, (self.update, self.requests, *flags)),
            *(float(ord(letter)) for letter in text),
        ]


STATES: weakref.WeakKeyDictionary[Any, LoaderState] = weakref.WeakKeyDictionary()


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Executes a request; SGLang calls it in each rank."""
    state = STATES.get(model)
    if state is None:
        state = STATES[model] = LoaderState()
        take_questions(model, state)
    try:
        ((text, content),) = named_tensors
        order = json.loads(text)
        number = int(order["update"])
    except (ValueError, KeyError, TypeError) as error:
        # All ranks see the same.
        state.update, state.error = 0, f"this is no order: {error}"
        return
    if number != state.update:
        state.update, state.requests, state.error = number, 0, ""
    if not state.error:
        try:
            with torch.no_grad():
                ACTIONS[order["do"]](model, state, order, content)
            if content.device.type == "cuda" and order["do"] != "receive":
                # The sender may write to its memory again.
                torch.cuda.current_stream(content.device).synchronize()
        except Exception as error:
            logger.exception("A weight update failed.")
            state.error = f"{type(error).__name__}: {error}"[:1000]
    if not _all_ranks(not state.error):
        state.error = state.error or "another rank of the server failed; see its log"
    state.requests += 1


def _all_ranks(fine: bool) -> bool:
    """Returns whether all ranks of the server are, when all have come here."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return fine
    worst = torch.tensor([not fine], dtype=torch.int32)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group.cpu_group)
    return not worst.item()


def take_questions(model: Any, state: LoaderState) -> None:
    """Makes the model answer queries of this module beside those for parameters."""
    get_parameter: Callable[..., Any] | None = getattr(
        model, "get_weights_by_name", None
    )

    def get_weights_by_name(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(QUESTION):
            return state.answer(name.removeprefix(QUESTION).strip("/"))
        if get_parameter is None:
            raise AttributeError("This model does not return its parameters by name.")
        return get_parameter(name, *args, **kwargs)

    model.get_weights_by_name = get_weights_by_name


def prepare(model: Any, state: LoaderState, specs: Sequence[Spec]) -> bool:
    """Traces new tensors; returns whether all have a plan."""
    if state.untraced:
        return False
    plans = state.plans
    if not all(place.is_valid() for place in state.places.values()):
        plans.clear()
        state.layouts.clear()
        state.places.clear()
        state.kept = None
    missing = [spec for spec in specs if spec not in plans]
    if missing:
        try:
            traced = trace(model, missing)
        except Exception as error:  # noqa: BLE001 - Loaders raise anything.
            state.untraced = f"{type(error).__name__}: {error}"[:1000]
            logger.warning(
                "load_weights of %s cannot be traced, so it loads every update: %s",
                type(model).__name__,
                state.untraced,
            )
            plans.clear()
            return False
        plans.update((spec, traced[spec[0]]) for spec in missing)
        places = (step.place for plan in traced.values() for step in plan)
        state.places.update((id(place.tensor), place) for place in places)
    return True


def pair_tensors(
    state: LoaderState, specs: Sequence[Spec], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, CopyStep]]:
    """Yields the steps of traced tensors, each with its tensor."""
    for spec, tensor in zip(specs, tensors, strict=True):
        for step in state.plans[spec]:
            yield tensor, step


def apply_weights(
    model: Any,
    state: LoaderState,
    specs: Sequence[Spec],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Loads tensors, by their plans if they have any."""
    if prepare(model, state, specs):
        make_copies(pair_tensors(state, specs, tensors)).run()
    else:
        names = (name for name, _, _ in specs)
        model.load_weights(list(zip(names, tensors, strict=True)))


@dataclass(slots=True)
class Copies:
    """Prepared copies, which can run repeatedly."""

    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    """Parts of parameters, and their fill values."""
    grouped: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    """Targets and sources of contiguous copies for a common kernel, by type."""
    single: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Other targets and sources."""

    def run(self) -> None:
        """Copies all."""
        for target, value in self.fills:
            target.fill_(value)
        for target, source in self.single:
            target.copy_(source, non_blocking=True)
        for targets, sources in self.grouped.values():
            torch._foreach_copy_(targets, sources)


def make_copies(pairs: Iterable[tuple[torch.Tensor, CopyStep]]) -> Copies:
    """Prepares the copies of steps, each with its source tensor."""
    copies = Copies()
    for tensor, step in pairs:
        target = step.target
        if step.fill is not None:
            copies.fills.append((target, step.fill))
            continue
        source = step.source(tensor)
        small = target.numel() * target.itemsize < LARGE_BYTES
        if small and step.is_run and source.device == target.device:
            key = (target.dtype, source.dtype)
            targets, sources = copies.grouped.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            copies.single.append((target, source))
    return copies


def join_steps(
    pairs: Iterable[tuple[torch.Tensor, CopyStep]],
) -> list[tuple[torch.Tensor, CopyStep]]:
    """Merges steps adjacent in memory."""
    scattered: list[tuple[torch.Tensor, CopyStep]] = []
    runs: list[tuple[torch.Tensor, torch.Tensor, CopyStep]] = []
    for tensor, step in pairs:
        if step.is_run:
            runs.append((step.source(tensor), tensor, step))
        else:
            scattered.append((tensor, step))
    runs.sort(key=lambda run: run[0].data_ptr())
    joined: list[tuple[torch.Tensor, CopyStep]] = []
    end = None
    for source, tensor, step in runs:
        if (
            end is not None
            and _follows(source, end)
            and _follows(step.target, joined[-1][1].target)
        ):
            begin, previous = joined[-1]
            joined[-1] = begin, previous.longer(len(source))
        else:
            joined.append((tensor, step))
        end = source
    return scattered + joined


def _follows(tensor: torch.Tensor, previous: torch.Tensor) -> bool:
    """Returns whether a flat tensor begins at the end of the previous tensor."""
    return (
        tensor.dtype == previous.dtype
        and tensor.untyped_storage()._cdata == previous.untyped_storage()._cdata
        and tensor.storage_offset() == previous.storage_offset() + len(previous)
    )


def read_specs(order: Any) -> list[Spec]:
    """Returns the tensors of a request, or of a part of it."""
    return [(name, dtype, tuple(shape)) for name, dtype, shape in order["tensors"]]


def _views(flat: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Returns views of consecutive tensors in a flat byte tensor."""
    views, start = [], 0
    for _, name, shape in specs:
        dtype = getattr(torch, name)
        count = 1
        for size in shape:
            count *= size
        end = start + count * dtype.itemsize
        views.append(flat[start:end].view(dtype).view(shape))
        start = end
    return views


def load_flat(
    model: Any, state: LoaderState, specs: Sequence[Spec], flat: torch.Tensor
) -> None:
    """Loads consecutive tensors in a flat byte tensor."""
    if not prepare(model, state, specs):
        apply_weights(model, state, specs, _views(flat, specs))
        return
    key = tuple(specs)
    layout = state.layouts.get(key)
    if layout is None:
        base = int(flat.storage_offset())
        layout = state.layouts[key] = [
            (view.dtype, step.moved(int(view.storage_offset()) - base // view.itemsize))
            for view, step in join_steps(
                pair_tensors(state, specs, _views(flat, specs))
            )
        ]
    typed = {
        dtype: flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
        for dtype in {dtype for dtype, _ in layout}
    }
    make_copies((typed[dtype], step) for dtype, step in layout).run()


def _bucket(model: Any, state: LoaderState, order: Any, content: torch.Tensor) -> None:
    """Loads tensors whose bytes came with the request."""
    load_flat(model, state, read_specs(order), content)


def _open(model: Any, state: LoaderState, order: Any, content: torch.Tensor) -> None:
    """Opens memory of the sender, loads from it, and keeps it open if possible."""
    specs = read_specs(order)
    # Another memory may have its handles by now.
    state.kept = None
    tensors = [_rebuild(*handle) for handle in order["handles"]]
    if order["apart"]:
        prepare(model, state, specs)
        for spec, tensor in zip(specs, tensors, strict=True):
            apply_weights(model, state, [spec], [tensor.to(content.device)])
        return
    apply_weights(model, state, specs, tensors)
    if not state.untraced and watch_sender(order["pid"], order["began"]):
        copies = make_copies(join_steps(pair_tensors(state, specs, tensors)))
        state.kept = OpenMemory(order["memory"], order["pid"], copies)


def copy_again(
    model: Any, state: LoaderState, order: Any, content: torch.Tensor
) -> None:
    """Loads from open memory."""
    memory = state.kept
    valid = all(place.is_valid() for place in state.places.values())
    if memory is None or memory.number != order["memory"] or not valid:
        raise LookupError("the sender's memory is not open here any more")
    memory.copies.run()


def _rebuild(
    device: str,
    dtype: str,
    shape: list[int],
    stride: list[int],
    offset: int,
    handle: str,
    num_bytes: int,
    offset_bytes: int,
    counter: str,
    counter_offset: int,
    event: str,
) -> torch.Tensor:
    """Opens a tensor in the sender's memory."""
    count = torch.cuda.device_count()
    devices = (
        index
        for index in range(count)
        if str(torch.cuda.get_device_properties(index).uuid) == device
    )
    rebuilt: torch.Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        tuple(shape),
        tuple(stride),
        offset,
        torch.UntypedStorage,
        getattr(torch, dtype),
        next(devices),
        bytes.fromhex(handle),
        num_bytes,
        offset_bytes,
        False,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        False,
    )
    return rebuilt


def process_start(pid: int) -> str | None:
    """Returns the start time of a process on this machine, in the kernel's clock.

    ``None``: there is none, or it has ended and its parent has not noticed yet.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *facts = file.read().rpartition(")")[2].split()
        return None if state in ("Z", "X") else facts[18]
    except (OSError, IndexError, ValueError):
        return None


_WATCHED: set[int] = set()
"""Senders with a watch for their end."""


def watch_sender(pid: int, began: str | None) -> bool:
    """Closes a sender's memory when its process ends; returns whether it can.

    Memory open here is not freed when the sender ends.
    """
    if began is None or process_start(pid) != began:
        # A process of another container, which numbers its own.
        return False
    if pid in _WATCHED:
        return True
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    _WATCHED.add(pid)

    def wait() -> None:
        select.select([descriptor], [], [])
        os.close(descriptor)
        _WATCHED.discard(pid)
        for state in list(STATES.values()):
            if state.kept is not None and state.kept.pid == pid:
                state.kept = None

    threading.Thread(target=wait, name="torchrl_sglang-sender", daemon=True).start()
    return True


def _receive(model: Any, state: LoaderState, order: Any, content: torch.Tensor) -> None:
    """Receives buckets of tensors by broadcasts.

    NCCL broadcasts are only queued on the device at the return.
    """
    group, device = _find_group(order["group"]), content.device
    prepare(
        model,
        state,
        [spec for bucket in order["buckets"] for spec in read_specs(bucket)],
    )
    latest = None
    try:
        for bucket in order["buckets"]:
            latest = _receive_bucket(model, state, bucket, group, device)
    finally:
        if device.type == "cuda" and latest is not None:
            # Works end in order, and keep their buffers alive.
            guard_broadcast(order["group"], latest, order)


def _receive_bucket(
    model: Any, state: LoaderState, bucket: Any, group: Any, device: torch.device
) -> Any:
    """Receives tensors, into parameters if whole; returns the last broadcast."""
    specs = read_specs(bucket)
    if bucket["flat"]:
        flat = torch.empty(bucket["num_bytes"], dtype=torch.uint8, device=device)
        work = dist.broadcast(flat, src=0, group=group, async_op=True)
        work.wait()
        load_flat(model, state, specs, flat)
        return work
    direct: list[torch.Tensor | None] = [
        None if state.untraced else whole_place(spec, state.plans[spec])
        for spec in specs
    ]
    received = [
        torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if into is None
        else into
        for (_, dtype, shape), into in zip(specs, direct, strict=True)
    ]
    together = bucket["together"]
    with _GroupedBroadcasts(group, device) if together else nullcontext([]) as works:
        started = [
            dist.broadcast(tensor, src=0, group=group, async_op=True)
            for tensor in received
        ]
    pending = works if together else started
    for work in pending:
        work.wait()
    indirect = [index for index, into in enumerate(direct) if into is None]
    if indirect:
        some = [specs[index] for index in indirect]
        apply_weights(model, state, some, [received[index] for index in indirect])
    return pending[-1]


def guard_broadcast(name: str, last: Any, order: Any, interval: float = 0.5) -> None:
    """Ends broadcasts after the end of their sender, or a timeout.

    Otherwise they keep the device busy forever.
    """
    deadline = time.monotonic() + order["timeout"]
    start = order["began"]
    # A sender in another container, or on another machine, has other process ids.
    is_local = start is not None and process_start(order["pid"]) == start

    def wait() -> None:
        while not last.is_completed():
            has_ended = is_local and process_start(order["pid"]) != start
            if has_ended or time.monotonic() > deadline:
                reason = "its sender has ended" if has_ended else "it takes too long"
                logger.error("A weight update is abandoned: %s.", reason)
                _abandon(name)
                return
            time.sleep(interval)

    threading.Thread(target=wait, name="torchrl_sglang-guard", daemon=True).start()


def _abandon(name: str) -> None:
    """Ends the broadcasts of an NCCL group, which wait on the device."""
    try:
        backend = _find_group(name)._get_backend(torch.device("cuda"))
    except (LookupError, RuntimeError):
        # The server has left the group, or it has none for GPUs.
        return
    backend.abort()


def whole_place(spec: Spec, plan: Plan) -> torch.Tensor | None:
    """Returns a parameter's part for a whole unchanged tensor, if any."""
    if len(plan) != 1 or plan[0].fill is not None:
        return None
    step = plan[0]
    count = 1
    for size in spec[2]:
        count *= size
    is_whole = step.size == (count,) and step.stride == (1,) and step.offset == 0
    return step.target if is_whole and str(step.target.dtype)[6:] == spec[1] else None


class _GroupedBroadcasts:
    """Starts all broadcasts of a block as an NCCL group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._works: list[Any] = []

    def __enter__(self) -> list[Any]:
        self._group._start_coalescing(self._device)
        return self._works

    def __exit__(self, *error: object) -> None:
        self._works.append(self._group._end_coalescing(self._device))


def _find_group(name: str) -> Any:
    """Returns the server's process group with a name."""
    for group, group_name in dist.distributed_c10d._world.pg_names.items():
        if group_name == name:
            return group
    raise LookupError(f"the server has not joined the process group {name}")


ACTIONS: dict[str, Callable[[Any, LoaderState, Any, torch.Tensor], None]] = {
    "bucket": _bucket,
    "open": _open,
    "again": copy_again,
    "receive": _receive,
}
"""Actions of requests."""
