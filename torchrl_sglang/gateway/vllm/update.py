"""The phases of a weight update, as vLLM's trainers call them.

``init_weight_transfer_engine`` makes the servers join the trainer's process group. Then
each update is ``start_weight_update``, one or more ``update_weights`` whose tensors the
servers receive from the trainer, and ``finish_weight_update``. The order of the control
calls is :func:`.session.update_weights`'s, in a thread that waits for the next phase.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.fleet.weights_state import WeightUpdate, next_version
from torchrl_sglang.errors import (
    ConfigurationError,
    GatewayError,
    UnsupportedByServerError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import TRACED_LOADER
from torchrl_sglang.weight_update.transports.handles import pack
from torchrl_sglang.weight_update.transports.traced import TracedLoader

LOADER = "torchrl_sglang_vllm.load"
"""Function of the servers that receives a trainer's weights."""

LOADERS = (TRACED_LOADER, LOADER)
"""SGLang's ``custom_weight_loader`` of servers for vLLM's weight updates."""

BUFFER_BYTES = 1 << 30
"""vLLM's default of ``packed_buffer_size_bytes``."""

JOIN_SECONDS = 60.0
"""Timeout for the trainer and the servers to meet; a server's watchdog waits longer."""

_INIT_FIELDS = {"master_address", "master_port", "rank_offset", "world_size"}
_WIRE_FIELDS = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}

_ABANDON = object()

COLUMNS = ("names", "dtype_names", "shapes")
"""Lists of vLLM's ``update_info``."""

Spec = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


def num_bytes(spec: Spec) -> int:
    """Returns the size of a tensor."""
    dtype: torch.dtype = getattr(torch, spec[1])
    return math.prod(spec[2]) * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Form of the trainer's broadcasts."""

    packed: bool
    """Whether a broadcast has several tensors, as bytes."""
    buffer_bytes: int
    """A packed broadcast ends with the tensor that exceeds this size."""

    @classmethod
    def read(cls, init_info: Mapping[str, Any]) -> Self:
        """Returns the form that a trainer announces."""
        size = init_info.get("packed_buffer_size_bytes", BUFFER_BYTES)
        if type(size) is not int or size < 1:
            raise ConfigurationError(
                f"packed_buffer_size_bytes={size!r} must be a positive integer."
            )
        return cls(packed=bool(init_info.get("packed")), buffer_bytes=size)

    def changed(self, update_info: Mapping[str, Any]) -> Wire:
        """Returns the form with the values that an update announces."""
        values = {
            "packed": self.packed,
            "packed_buffer_size_bytes": self.buffer_bytes,
            **{n: v for n, v in update_info.items() if v is not None},
        }
        return self.read(values)

    def broadcasts(self, specs: Sequence[Spec]) -> Iterator[list[Spec]]:
        """Yields the tensors of each broadcast."""
        bucket: list[Spec] = []
        for spec in specs:
            bucket.append(spec)
            if not self.packed or sum(map(num_bytes, bucket)) > self.buffer_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def read_specs(update_info: Mapping[str, Any]) -> list[Spec]:
    """Returns the tensors in the ``update_info`` of a trainer."""
    if unknown := sorted(update_info.keys() - {*COLUMNS, *_WIRE_FIELDS}):
        raise ConfigurationError(
            f"update_info has {', '.join(unknown)}, which is not of the backend "
            f"'nccl', the only one here."
        )
    columns = {name: update_info.get(name) for name in COLUMNS}
    lists = {name: value for name, value in columns.items() if isinstance(value, list)}
    if len(lists) < len(columns):
        raise ConfigurationError(
            "update_info must have the lists `names`, `dtype_names` and `shapes`."
        )
    names, kinds, shapes = lists.values()
    for name, column in (("dtype_names", kinds), ("shapes", shapes)):
        if len(column) != len(names):
            raise ConfigurationError(
                f"`{name}` should be of the same size as `names`: got {len(column)} "
                f"and {len(names)}"
            )
    for kind in set(map(str, kinds)):
        if not isinstance(getattr(torch, kind, None), torch.dtype):
            raise ConfigurationError(f"dtype_names has {kind!r}, which is no dtype.")
    for shape in shapes:
        if not isinstance(shape, list) or any(type(size) is not int for size in shape):
            raise ConfigurationError(
                f"shapes has {shape!r:.80}, which is no list of integers."
            )
    return [
        (str(name), str(kind), tuple(shape))
        for name, kind, shape in zip(names, kinds, shapes, strict=True)
    ]


def check_specs(specs: Sequence[Spec], engine: RLSGLangEngine) -> None:
    """Refuses tensors that do not fit the served model, before they are sent."""
    served, fused = engine.get_model_metadata(), engine.get_fused_parameters()
    for name, _, shape in specs:
        if name in fused:
            raise ConfigurationError(
                f"{name} is fused, and SGLang loads its parts under a checkpoint's "
                f"names."
            )
        if name in served and tuple(served[name][1]) != shape:
            raise ConfigurationError(
                f"{name} has the shape {list(shape)}, and the served model has "
                f"{list(served[name][1])}."
            )
    unknown = [name for name, _, _ in specs if name not in served]
    # Tied weights are served under one name.
    unknown = [name for name in unknown if not name.endswith("lm_head.weight")]
    if unknown:
        raise ConfigurationError(
            f"The served model has no parameter {unknown[0]!r}; its names are a "
            f"checkpoint's, such as {next(iter(served))!r}."
        )


@dataclass
class _ReceivedTensors:
    """Tensors that an update has received so far."""

    specs: list[Spec] = field(default_factory=list)
    num_bytes: int = 0


class WeightUpdates:
    """Weight updates of a trainer that speaks vLLM's protocol."""

    def __init__(self, engine: RLSGLangEngine, *, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._lock = threading.Lock()
        self._receiver: BroadcastReceiver | None = None
        self._update: _Update | None = None
        self.stays_paused = False
        """Whether a client has paused generation, so that updates do not resume it."""
        self.labels: dict[str, str] = {}
        """Weight version -> the trainer's name of it."""

    def join(self, init_info: Any) -> None:
        """Makes the servers join a trainer's process group."""
        _check_init(init_info, self._engine)
        with self._lock:
            if self._update is not None and self._update.is_open:
                # Its trainer is gone.
                self._update.abandon()
            self._receiver = None
            receiver = BroadcastReceiver(
                self._engine, Wire.read(init_info), self._timeout
            )
            with self._engine.weight_update():
                receiver.join(init_info)
            self._receiver = receiver

    def start(self) -> None:
        """Begins an update: nothing is computed until its end."""
        with self._lock:
            if self._update is not None and self._update.is_open:
                raise GatewayError(
                    "start_weight_update called while a weight update is already "
                    "active. Call finish_weight_update first, or "
                    "init_weight_transfer_engine to abandon it.",
                    status=500,
                )
            if self._receiver is None or not self._receiver.is_alive:
                raise GatewayError(
                    "NCCL weight transfer not initialized. Call "
                    "init_transfer_engine() first.",
                    status=500,
                )
            self._update = _Update(
                self._engine,
                self._receiver,
                self._timeout,
                resume=not self.stays_paused,
            )
            self._update.begin()

    def receive(self, update_info: Any) -> None:
        """Receives tensors of the current update."""
        if not isinstance(update_info, Mapping):
            raise ConfigurationError(
                "update_info must be an object: all ranks receive the same tensors."
            )
        specs = read_specs(update_info)
        update = self._open("start_weight_update must be called before update_weights.")
        check_specs(specs, self._engine)
        update.put((specs, update.wire.changed(update_info)))

    def finish(self, label: Any) -> None:
        """Ends the current update; the servers compute when they are resumed."""
        update = self._open(
            "finish_weight_update called without a matching start_weight_update."
        )
        update.put(None)
        if label is not None:
            self.labels[self._engine.weight_version] = str(label)

    def _open(self, problem: str) -> _Update:
        with self._lock:
            if self._update is None or not self._update.is_open:
                raise GatewayError(problem, status=500)
            return self._update


def _check_init(init_info: Any, engine: RLSGLangEngine) -> None:
    """Refuses a process group that the servers cannot join."""
    if not isinstance(init_info, Mapping):
        raise ConfigurationError("init_info must be an object.")
    if init_info.get("nccl_unique_id_b64"):
        raise ConfigurationError(
            "nccl_unique_id_b64 is not supported; give master_address and master_port."
        )
    names = {name for name, value in init_info.items() if value is not None}
    if missing := sorted(_INIT_FIELDS - names):
        raise ConfigurationError(f"init_info lacks {', '.join(missing)}.")
    if unknown := sorted(names - _INIT_FIELDS - _WIRE_FIELDS):
        raise ConfigurationError(
            f"init_info has {', '.join(unknown)}, which is not of the backend 'nccl', "
            f"the only one here."
        )
    for name in ("master_port", "rank_offset", "world_size"):
        if type(init_info[name]) is not int or init_info[name] < 0:
            raise ConfigurationError(
                f"init_info has {name}={init_info[name]!r}, which must be an integer."
            )
    size = init_info["rank_offset"] + engine.get_world_size()
    if init_info["world_size"] < size:
        raise ConfigurationError(
            f"world_size={init_info['world_size']} has no room for the "
            f"{engine.get_world_size()} rank(s) of the servers, which begin at "
            f"rank_offset={init_info['rank_offset']}; see /get_world_size."
        )
    capabilities = engine.capabilities
    missing = [name for name in LOADERS if name not in capabilities.weight_loaders]
    if missing or capabilities.pp_size > 1 or capabilities.dp_size > 1:
        raise UnsupportedByServerError(
            "Weight transfer not configured. Start the servers by `torchrl-sglang "
            f"serve --api vllm`, or with custom_weight_loader={list(LOADERS)}, "
            f"pp_size=1 and dp_size=1."
        )


class BroadcastReceiver:
    """Orders servers to receive a trainer's broadcasts."""

    def __init__(self, engine: RLSGLangEngine, wire: Wire, timeout: float) -> None:
        self._engine, self.wire, self._timeout = engine, wire, timeout
        self._loader = TracedLoader(engine, timeout)
        self._epoch = engine.control.membership_epoch

    @property
    def is_alive(self) -> bool:
        """Whether the servers of the group are the engine's."""
        return self._epoch == self._engine.control.membership_epoch

    def join(self, init_info: Mapping[str, Any]) -> None:
        """Makes the servers join the trainer's process group."""
        control = self._engine.control
        self._loader.begin()
        group = {name: init_info[name] for name in sorted(_INIT_FIELDS)}
        ((text, empty),) = self._loader.order("join", **group, timeout=JOIN_SECONDS)
        ranks = self._engine.capabilities.tp_size

        async def join_all() -> None:
            await control.begin_weight_update()
            try:
                calls = []
                for index, url in enumerate(control.urls):
                    order = json.loads(text)
                    order["rank_offset"] += index * ranks
                    calls.append(self._order(json.dumps(order), empty, [url]))
                await asyncio.gather(*calls)
                await self._loader.check()
            finally:
                await control.end_weight_update()

        run_sync(join_all())

    def begin(self) -> None:
        """Begins an update."""
        self._loader.begin()

    def receive(self, specs: Sequence[Spec], wire: Wire) -> int:
        """Makes the servers receive tensors; returns the number of broadcasts."""
        broadcasts = [
            {
                "tensors": bucket,
                "num_bytes": sum(map(num_bytes, bucket)),
                "packed": wire.packed,
            }
            for bucket in wire.broadcasts(specs)
        ]
        ((text, empty),) = self._loader.order(
            "take", broadcasts=broadcasts, timeout=self._timeout
        )

        async def receive_all() -> None:
            await self._order(text, empty, None)
            await self._loader.check()

        run_sync(receive_all())
        return len(broadcasts)

    async def _order(
        self, text: str, empty: torch.Tensor, urls: Sequence[str] | None
    ) -> None:
        entry, _ = pack([(text, empty)])
        await self._engine.control.update_weights_from(
            "tensor",
            load_format=LOADER,
            weight_version=None,
            timeout=self._timeout,
            urls=urls,
            serialized_named_tensors=[entry] * self._engine.capabilities.tp_size,
        )


class _Update(session.Transfer):
    """An update in a thread, which receives announced tensors."""

    name = "vllm"
    route = "tensor"
    in_session = True

    def __init__(
        self,
        engine: RLSGLangEngine,
        receiver: BroadcastReceiver,
        timeout: float,
        *,
        resume: bool,
    ) -> None:
        self._engine, self._receiver, self._timeout = engine, receiver, timeout
        self._resumes = resume
        self._content = _ReceivedTensors()
        self._orders: queue.Queue[tuple[Any, Future[None]]] = queue.Queue()
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._held: WeightUpdate | None = None

    @property
    def wire(self) -> Wire:
        """Form of the broadcasts that the trainer has announced at first."""
        return self._receiver.wire

    @property
    def is_open(self) -> bool:
        """Whether it takes further tensors."""
        return not self._ended.done()

    def begin(self) -> None:
        """Starts the thread, and returns when the servers wait for tensors."""
        threading.Thread(
            target=self._run, name="torchrl_sglang-vllm-update", daemon=True
        ).start()
        self._wait(self._started)

    def put(self, order: Any) -> None:
        """Executes an order: tensors to receive, or ``None`` for the end."""
        done: Future[None] = Future()
        self._orders.put((order, done))
        self._wait(done)
        if order is None:
            self._ended.result()

    def abandon(self) -> None:
        """Ends the update without its remaining tensors, and waits for its end."""
        self._orders.put((_ABANDON, Future()))
        wait([self._ended], timeout=self._timeout)

    def _wait(self, done: Future[None]) -> None:
        """Waits for a step; raises the error that ended the update."""
        wait([done, self._ended], return_when=FIRST_COMPLETED)
        if not done.done():
            self._ended.result()
            raise WeightSyncStateError("The weight update has ended.")

    def _run(self) -> None:
        try:
            with self._engine.weight_update() as held:
                self._held = held
                session.update_weights(
                    self._engine,
                    self,
                    self._content,
                    version=self._next_version(),
                    pause_mode="continue",
                    held=held,
                    resume=self._resumes,
                )
        except BaseException as error:  # noqa: BLE001 - The caller raises it.
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _next_version(self) -> str:
        engine = self._engine
        versions = run_sync(engine.control.weight_versions())
        return next_version([*versions, engine.weight_version, engine.newest_version])

    def send(self, weights: Any, *, version: str) -> int:
        """Receives tensors until the trainer's end of the update."""
        count = 0
        self._receiver.begin()
        self._started.set_result(None)
        while True:
            try:
                order, done = self._orders.get(timeout=self._timeout)
            except queue.Empty:
                raise WeightTransferError(
                    f"The trainer sent nothing for {self._timeout:g} s, between "
                    f"start_weight_update and finish_weight_update.",
                    untouched=not count,
                ) from None
            if order is _ABANDON:
                raise WeightTransferError(
                    "Another trainer has begun anew before finish_weight_update.",
                    untouched=not count,
                )
            count += self._finish(version) if order is None else self._take(*order)
            done.set_result(None)
            if order is None:
                return count

    def _take(self, specs: Sequence[Spec], wire: Wire) -> int:
        count = self._receiver.receive(specs, wire)
        self._content.specs += specs
        self._content.num_bytes += sum(map(num_bytes, specs))
        return count

    def _finish(self, version: str) -> int:
        """Checks that the weights are whole, and labels them."""
        names = {name for name, _, _ in self._content.specs}
        if not names:
            raise WeightTransferError(
                "finish_weight_update came before any update_weights, so that nothing "
                "was sent.",
                untouched=True,
            )
        missing = self._engine.get_model_metadata().keys() - names
        if missing and self._held is not None and self._held.was_inconsistent:
            raise WeightSyncStateError(
                f"An earlier update has failed, and this one lacks {min(missing)!r}: "
                f"send all weights."
            )
        control = self._engine.control
        run_sync(control.set_weight_version(version, timeout=self._timeout))
        return 0
