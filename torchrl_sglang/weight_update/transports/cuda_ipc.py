"""Handles of GPU memory, for servers that share a GPU with the trainer.

Nothing travels but where the weights lie: the server opens the memory and copies from
it, at the speed of the GPU's own memory. Large tensors that are as they are served are
opened in place. The smallest, and those that are to be converted, are put together.

From the CPU, requests hold the values themselves. That is slow, and needs no GPU.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.support.event_loop import submit
from torchrl_sglang.errors import (
    RequestRefusedError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.weight_update.buckets import Bucket, TensorSpec, plan_buckets
from torchrl_sglang.weight_update.sources.weights import NamedTensors, Weights
from torchrl_sglang.weight_update.transports.base import (
    BUCKET_BYTES,
    SEND_TIMEOUT_SECONDS,
)
from torchrl_sglang.weight_update.transports.choose import reach_of
from torchrl_sglang.weight_update.transports.facts import find_facts
from torchrl_sglang.weight_update.transports.flat import flatten
from torchrl_sglang.weight_update.transports.handles import pack

__all__ = ["CudaIpcTransport"]

VALUE_BYTES = 1 << 26
"""Most bytes of values in one request: it is a text that is parsed as a whole."""

GRACE_SECONDS = 10.0
"""A request and its fence end with their budgets, or this much later."""

TOGETHER_BELOW_BYTES = 192 << 20
"""A tensor larger than that is copied in the time that it takes to open it."""

LoadFormat: TypeAlias = Literal["flattened_bucket"] | None

_NOTHING_LOADED = ("must run between",)
"""What a server's refusal says when it has not touched its weights."""


class CudaIpcTransport:
    """Has every server open the trainer's memory and copy from it.

    Args:
        engine: the servers. Each must be on this machine and see the GPU of the
            weights.
        device: where the weights are, or are converted.
        bucket_bytes: most memory that conversions take, in bytes.
        send_timeout: budget for one request, in seconds.
    """

    name: ClassVar[str] = "cuda_ipc"
    in_session: ClassVar[bool] = True

    def __init__(
        self,
        engine: RLSGLangEngine,
        *,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
        send_timeout: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        self._engine = engine
        self._device = device
        if device.type == "cuda" and device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._bucket_bytes = bucket_bytes
        if device.type == "cpu":
            self._bucket_bytes = min(bucket_bytes, VALUE_BYTES)
        self._send_timeout = send_timeout
        self._membership = -1
        self._in_place = False
        self._held: deque[_Content] = deque()

    @property
    def connected(self) -> bool:
        """Whether all servers are known to reach the weights."""
        return self._membership == self._engine.control.membership_epoch

    def connect(self) -> None:
        """Finds out where the servers are; see :class:`.WeightTransport`."""
        capabilities = self._engine.capabilities
        if capabilities.pp_size > 1 or capabilities.dp_size > 1:
            raise UnsupportedByServerError(
                f"SGLang takes tensors of another process with one pipeline stage and "
                f"one data-parallel rank only, and the server has pp_size="
                f"{capabilities.pp_size}, dp_size={capabilities.dp_size}; use "
                f"transport='disk'."
            )
        self._in_place = False
        if self._device.type == "cuda":
            facts = find_facts(self._engine, self._device)
            reaches = [reach_of(server, facts) for server in facts.servers]
            for reach in reaches:
                if reach.opens is False:
                    raise UnsupportedByServerError(
                        f"The server at {reach.url} cannot open the memory of the "
                        f"weights on {self._device}: {reach.why} Use "
                        f"transport='broadcast', or transport='disk'."
                    )
            # A rank on another GPU makes a copy of all that it opens at once.
            self._in_place = capabilities.tp_size == 1 and all(
                reach.shares for reach in reaches
            )
        self._membership = self._engine.control.membership_epoch

    def send(self, weights: Weights, *, version: str) -> int:
        """Has the servers copy all weights; see :class:`.WeightTransport`.

        While servers copy what one request names, the next one is made.

        Returns:
            How many requests it took.
        """
        self._held.clear()
        under_way: deque[Future[None]] = deque()
        count, seen = 0, 0
        try:
            for content in self._contents(weights):
                seen += content.num_tensors
                last = seen == len(weights.specs)
                under_way.append(self._request(content, version if last else None))
                count += 1
                del content
                # What is made next takes the place of all but the latest.
                self._settle(under_way, keep=1)
            self._settle(under_way, keep=0)
        except BaseException as error:
            failure = self._give_up(error, under_way, count)
            if not isinstance(error, Exception):
                raise
            raise failure from error
        self._held.clear()
        return count

    def close(self) -> None:
        """Lets go of what a server that failed might still have read."""
        self._membership = -1
        self._held.clear()

    def _contents(self, weights: Weights) -> Iterator[_Content]:
        """Yields what each request names; no more than a bucket is alive in new memory.

        A server takes a tenth of a millisecond to open what lies by itself, and as long
        to copy a hundred megabytes. So the smallest tensors are put together.
        """
        if not (self._in_place and weights.stable):
            half = max(self._bucket_bytes // 2, 1)
            for bucket, tensors in weights.buckets(half):
                yield self._content(bucket, tensors)
            return
        found: NamedTensors = {}
        for _, some in weights.buckets(self._bucket_bytes):
            found.update(some)
        together, apart = divide(
            weights.specs,
            {s.name for s in weights.specs if self._is_ready(s, found[s.name])},
            self._bucket_bytes,
        )
        num_bytes = sum(spec.num_bytes for spec in together)
        one = num_bytes <= self._bucket_bytes
        size = self._bucket_bytes if one else max(self._bucket_bytes // 2, 1)
        for bucket in plan_buckets(together, size):
            yield _Flat(bucket, flatten(bucket, found, self._device))
        if apart:
            yield _Named(apart, found)

    def _content(self, bucket: Bucket, tensors: NamedTensors) -> _Content:
        if all(self._is_ready(spec, tensors[spec.name]) for spec in bucket.specs):
            return _Named(bucket.specs, tensors)
        return _Flat(bucket, flatten(bucket, tensors, self._device))

    def _is_ready(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        """Whether a server can copy from the tensor itself."""
        return (
            self._device.type == "cuda"
            and tensor.dtype == spec.dtype
            and tensor.device == self._device
            and tensor.is_contiguous()
        )

    def _request(self, content: _Content, version: str | None) -> Future[None]:
        if self._device.type == "cuda":
            # A server reads as soon as it is told where.
            torch.cuda.current_stream(self._device).synchronize()
        # What a server that does not answer may still read stays until the next time.
        self._held.append(content)
        entries = self._pack(content)
        return submit(self._post(entries, content.load_format, version))

    def _settle(self, under_way: deque[Future[None]], *, keep: int) -> None:
        while len(under_way) > keep:
            under_way.popleft().result()
            self._held.popleft()

    def _give_up(
        self, error: BaseException, under_way: deque[Future[None]], count: int
    ) -> WeightTransferError:
        """Returns the error that tells, when nothing is under way any more.

        A request that was left could be served in the middle of the next update.
        """
        outcomes: list[BaseException | None] = [
            each.exception(2 * self._send_timeout + GRACE_SECONDS) for each in under_way
        ]
        if isinstance(error, WeightTransferError):
            outcomes.append(error)
        answered = count - len(outcomes)
        untouched = answered <= 0 and all(
            isinstance(each, WeightTransferError) and each.untouched
            for each in outcomes
        )
        failure = WeightTransferError(
            str(error)
            if isinstance(error, WeightTransferError)
            else f"The weights did not arrive: {error}",
            untouched=untouched,
        )
        self._membership = -1
        if self._device.type == "cuda":
            # Frees what no receiver counts any more.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return failure

    def _pack(self, content: _Content) -> list[str]:
        """Returns an entry for every rank of every server; each is opened once."""
        entries: list[str] = []
        for _ in range(self._engine.get_world_size()):
            if self._device.type == "cuda" or not entries:
                entry, kept = pack(content.value)
                content.kept += kept
            entries.append(entry)
        return entries

    async def _post(
        self, entries: Sequence[str], load_format: LoadFormat, version: str | None
    ) -> None:
        await self._post_once(entries, load_format, version)
        if self._engine.capabilities.tp_size > 1:
            # The first rank answers for all, and another may still be copying. None
            # can have taken a further request before it is done.
            nothing = [pack([])[0]] * self._engine.get_world_size()
            try:
                await self._post_once(nothing, None, None)
            except WeightTransferError as error:
                raise error.replace(untouched=False) from error.__cause__

    async def _post_once(
        self, entries: Sequence[str], load_format: LoadFormat, version: str | None
    ) -> None:
        control = self._engine.control
        ranks = self._engine.capabilities.tp_size
        outcomes = await asyncio.gather(
            *(
                control.update_weights_from_tensor(
                    entries[index * ranks : (index + 1) * ranks],
                    load_format=load_format,
                    weight_version=version,
                    timeout=self._send_timeout,
                    urls=[url],
                )
                for index, url in enumerate(control.urls)
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise WeightTransferError(
                    f"A server did not take the weights: {outcome}",
                    untouched=all(map(_nothing_loaded, outcomes)),
                ) from outcome


class _Content:
    """What one request names, and what must live until servers have read it."""

    load_format: LoadFormat = None

    def __init__(self, value: Any, num_tensors: int) -> None:
        self.value = value
        self.num_tensors = num_tensors
        self.kept: list[torch.Tensor] = []


class _Named(_Content):
    """Tensors where they lie."""

    def __init__(self, specs: Sequence[TensorSpec], tensors: NamedTensors) -> None:
        super().__init__(
            [(spec.name, tensors[spec.name].detach()) for spec in specs], len(specs)
        )


class _Flat(_Content):
    """Tensors in one run of bytes.

    SGLang reads these attributes of each (``FlattenedTensorMetadata`` in
    ``sglang/srt/weight_sync/tensor_bucket.py``), of an object of any kind.
    """

    load_format: LoadFormat = "flattened_bucket"

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        metadata = [
            SimpleNamespace(
                name=spec.name,
                shape=tuple(spec.shape),
                dtype=spec.dtype,
                start_idx=offset,
                end_idx=offset + spec.num_bytes,
                numel=spec.num_bytes,
            )
            for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
        ]
        super().__init__(
            {"flattened_tensor": flat, "metadata": metadata}, len(metadata)
        )


def divide(
    specs: Sequence[TensorSpec], ready: Collection[str], room: int
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Returns the tensors that are put together, and those opened where they lie.

    Args:
        specs: all tensors.
        ready: names of those that a server can copy from.
        room: bytes that may be put together beyond what has to be.

    Examples:
        >>> sizes = {"a": 100, "b": 10, "c": 20}
        >>> specs = [
        ...     TensorSpec(name=name, dtype=torch.uint8, shape=torch.Size([size]))
        ...     for name, size in sizes.items()
        ... ]
        >>> together, apart = divide(specs, ready={"a", "b", "c"}, room=35)
        >>> [spec.name for spec in together], [spec.name for spec in apart]
        (['b', 'c'], ['a'])
    """
    chosen = {spec.name for spec in specs if spec.name not in ready}
    left = room - sum(spec.num_bytes for spec in specs if spec.name in chosen)
    for spec in sorted(specs, key=lambda spec: spec.num_bytes):
        if spec.name in chosen:
            continue
        left -= spec.num_bytes
        if left < 0 or spec.num_bytes > TOGETHER_BELOW_BYTES:
            break
        chosen.add(spec.name)
    return (
        [spec for spec in specs if spec.name in chosen],
        [spec for spec in specs if spec.name not in chosen],
    )


def _nothing_loaded(outcome: BaseException | None) -> bool:
    return isinstance(outcome, RequestRefusedError) and any(
        words in str(outcome) for words in _NOTHING_LOADED
    )
