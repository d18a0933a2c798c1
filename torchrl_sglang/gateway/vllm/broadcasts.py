"""A trainer's broadcasts, as vLLM's requests announce them and SGLang receives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    ConfigurationError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.support.checks import check_count, check_flag
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.types import TRACED_LOADER
from torchrl_sglang.weight_update.transports.handles import pack
from torchrl_sglang.weight_update.transports.process_group import NCCL_CUMEM
from torchrl_sglang.weight_update.transports.traced import TracedLoader, Value
from torchrl_sglang.weight_update.weights import TensorSpec

LOADER = "torchrl_sglang_vllm.load"
"""Function of the servers that receives a trainer's weights."""

LOADERS = (TRACED_LOADER, LOADER)
"""SGLang's ``custom_weight_loader`` of servers for vLLM's weight updates."""

NCCL_DEFAULTS = {NCCL_CUMEM: "-2"}
"""Environment of servers for trainers that leave NCCL as it is, as vLLM's do. SGLang
sets 0 otherwise; where the two sides differ, they cannot join."""

BUFFER_BYTES = 1 << 30
"""vLLM's default of ``packed_buffer_size_bytes``."""

JOIN_SECONDS = 60.0
"""Timeout for the trainer and the servers to meet."""

_GROUP_FIELDS = {"master_address", "master_port", "rank_offset", "world_size"}
_WIRE_FIELDS = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}

COLUMNS = ("names", "dtype_names", "shapes")
"""Lists of vLLM's ``update_info``."""


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
        form = cls(packed=False, buffer_bytes=BUFFER_BYTES)
        return form.changed(init_info)

    def changed(self, announced: Mapping[str, Any]) -> Self:
        """Returns the form with the values that a trainer announces."""
        packed, size = map(announced.get, ("packed", "packed_buffer_size_bytes"))
        packed = self.packed if packed is None else check_flag("packed", packed)
        size = self.buffer_bytes if size is None else size
        size = check_count("packed_buffer_size_bytes", size)
        return replace(self, packed=packed, buffer_bytes=size)


def read_specs(update_info: Any) -> list[TensorSpec]:
    """Returns the tensors in the ``update_info`` of a trainer."""
    if not isinstance(update_info, Mapping):
        raise ConfigurationError(
            "update_info must be an object: all ranks receive the same tensors."
        )
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
        if not isinstance(shape, list) or not all(map(_is_count, shape)):
            raise ConfigurationError(
                f"shapes has {shape!r:.80}, which is no list of sizes."
            )
    return [
        TensorSpec(
            name=str(name), dtype=getattr(torch, str(kind)), shape=torch.Size(shape)
        )
        for name, kind, shape in zip(names, kinds, shapes, strict=True)
    ]


def check_specs(specs: Sequence[TensorSpec], engine: RLSGLangEngine) -> None:
    """Refuses tensors that do not fit the served model, before they are sent."""
    served, fused = engine.get_model_metadata(), engine.get_fused_parameters()
    for name, shape in ((spec.name, spec.shape) for spec in specs):
        if name in fused:
            raise ConfigurationError(
                f"{name} is fused, and SGLang loads its parts under a checkpoint's "
                f"names."
            )
        if name in served and tuple(served[name][1]) != tuple(shape):
            raise ConfigurationError(
                f"{name} has the shape {list(shape)}, and the served model has "
                f"{list(served[name][1])}."
            )
    unknown = [spec.name for spec in specs if spec.name not in served]
    # Tied weights are served under one name.
    unknown = [name for name in unknown if not name.endswith("lm_head.weight")]
    if unknown:
        raise ConfigurationError(
            f"The served model has no parameter {unknown[0]!r}; its names are a "
            f"checkpoint's, such as {next(iter(served))!r}."
        )


def check_group(init_info: Any, engine: RLSGLangEngine) -> None:
    """Refuses a process group that the servers cannot join."""
    if not isinstance(init_info, Mapping):
        raise ConfigurationError("init_info must be an object.")
    if init_info.get("nccl_unique_id_b64"):
        raise ConfigurationError(
            "nccl_unique_id_b64 is not supported; give master_address and master_port."
        )
    names = {name for name, value in init_info.items() if value is not None}
    if missing := sorted(_GROUP_FIELDS - names):
        raise ConfigurationError(f"init_info lacks {', '.join(missing)}.")
    if unknown := sorted(names - _GROUP_FIELDS - _WIRE_FIELDS):
        raise ConfigurationError(
            f"init_info has {', '.join(unknown)}, which is not of the backend 'nccl', "
            f"the only one here."
        )
    for name in ("master_port", "rank_offset", "world_size"):
        if not _is_count(init_info[name]):
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


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


class BroadcastReceiver:
    """Orders servers to receive a trainer's broadcasts.

    Raises:
        ConfigurationError: if the servers cannot join the process group.
        UnsupportedByServerError: if they receive no broadcasts.
    """

    def __init__(
        self, engine: RLSGLangEngine, init_info: Mapping[str, Any], timeout: float
    ) -> None:
        check_group(init_info, engine)
        self.wire = Wire.read(init_info)
        """Form of the broadcasts that the trainer has announced at first."""
        self._group = {name: init_info[name] for name in sorted(_GROUP_FIELDS)}
        self._engine, self._timeout = engine, timeout
        self._loader = TracedLoader(engine, timeout)
        self._epoch: int | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the engine's servers are in the process group."""
        return self._epoch == self._engine.control.membership_epoch

    def join(self) -> None:
        """Makes the servers join the trainer's process group."""
        control, seconds = self._engine.control, min(JOIN_SECONDS, self._timeout)
        epoch = control.membership_epoch
        self._loader.begin()
        ((text, empty),) = self._loader.order("join", **self._group, timeout=seconds)
        ranks = self._engine.capabilities.tp_size

        async def join_all() -> None:
            await control.begin_weight_update()
            try:
                calls = []
                for index, url in enumerate(control.urls):
                    order = json.loads(text)
                    order["rank_offset"] += index * ranks
                    value = [(json.dumps(order), empty)]
                    calls.append(self._execute(value, seconds, [url]))
                await asyncio.gather(*calls)
                await self._loader.check()
            finally:
                await control.end_weight_update()

        try:
            run_sync(join_all())
        except WeightTransferError as error:
            if "NCCL error" not in str(error):
                raise
            raise WeightTransferError(
                f"{error} Both sides need the same NCCL_CUMEM_ENABLE: start the "
                f"servers by `torchrl-sglang serve --api vllm`, which leaves it at "
                f"NCCL's default, or set it to 0 in the trainer's environment."
            ) from error
        self._epoch = epoch

    def begin(self) -> None:
        """Begins an update."""
        self._loader.begin()

    def receive(self, specs: Sequence[TensorSpec], wire: Wire) -> None:
        """Makes the servers receive tensors; after a failure they have to join again.

        Otherwise servers and trainer may be at different broadcasts.
        """
        order = self._loader.order("take", specs, **asdict(wire), timeout=self._timeout)
        epoch, self._epoch = self._epoch, None

        async def receive_all() -> None:
            await self._execute(order, self._timeout, None)
            await self._loader.check()

        run_sync(receive_all())
        self._epoch = epoch

    async def _execute(
        self, order: Value, seconds: float, urls: Sequence[str] | None
    ) -> None:
        """Executes an order on servers, which end it after a timeout themselves."""
        entry, _ = pack(order)
        await self._engine.control.update_weights_from(
            "tensor",
            load_format=LOADER,
            weight_version=None,
            timeout=seconds + CONTROL_TIMEOUT_SECONDS,
            urls=urls,
            serialized_named_tensors=[entry] * self._engine.capabilities.tp_size,
        )
