"""Handles of GPU memory, for servers that share a GPU with the trainer.

Nothing travels but where the weights lie: the server opens the memory and copies from
it, at the speed of the GPU's own memory. Tensors that are as they are served are opened
in place. Others are converted a bucket at a time.

From the CPU, requests hold the values themselves. That is slow, and needs no GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.event_loop import run_sync
from torchrl_sglang.errors import (
    RequestRefusedError,
    UnsupportedByServerError,
    WeightTransferError,
)
from torchrl_sglang.weight_update.buckets import Bucket
from torchrl_sglang.weight_update.transports.choose import reach_of
from torchrl_sglang.weight_update.transports.facts import find_facts
from torchrl_sglang.weight_update.transports.handles import pack
from torchrl_sglang.weight_update.weights import NamedTensors, Weights

__all__ = ["CudaIpcTransport", "Peers"]

BUCKET_BYTES = 1 << 30
"""Default for the memory that tensors are converted in."""

VALUE_BYTES = 1 << 26
"""Most bytes of values in one request: it is a text that is parsed as a whole."""

SEND_TIMEOUT_SECONDS = 300.0
"""Budget for one request."""

_ALIGNMENT = 64
"""Bytes between the starts of converted tensors are a multiple of this."""

_NOTHING_LOADED = ("must run between", "weight updates are not supported")
"""What a server's refusal says when it has not touched its weights."""


class Peers(Protocol):
    """The processes of a trainer that has one on each GPU of the servers."""

    def gather(self, entry: str) -> list[str] | None:
        """Hands in what this process packed for the server's rank on its GPU.

        Returns:
            In the process that talks to the servers, all of them, in the order of
            servers and their ranks; ``None`` in the others.
        """

    def settle(self, failure: WeightTransferError | None) -> None:
        """Waits until all processes are here, so that memory can be reused.

        Args:
            failure: what went wrong, in the process that talks to the servers.

        Raises:
            WeightTransferError: in every other process, if something did.
        """


class CudaIpcTransport:
    """Has every server open the trainer's memory and copy from it.

    Args:
        engine: the servers. Each must be on this machine and see the GPU of the
            weights.
        device: where the weights are, or are converted.
        bucket_bytes: most memory that conversions take, in bytes.
        send_timeout: budget for one request, in seconds.
        peers: the trainer's other processes, where each has a GPU of its own.
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
        peers: Peers | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        if device.type == "cuda" and device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._bucket_bytes = bucket_bytes
        if device.type == "cpu":
            self._bucket_bytes = min(bucket_bytes, VALUE_BYTES)
        self._send_timeout = send_timeout
        self._peers = peers
        self._membership = -1
        self._in_place = False
        self._held: list[torch.Tensor] = []

    @property
    def connected(self) -> bool:
        """Whether all servers are known to reach the weights."""
        return self._membership == self._engine.control.membership

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
            self._in_place = self._peers is not None or (
                capabilities.tp_size == 1
                and all(reach.shares or reach.opens is None for reach in reaches)
            )
        self._membership = self._engine.control.membership

    def send(self, weights: Weights, *, version: str) -> int:
        """Has the servers copy all weights; see :class:`.WeightTransport`.

        Returns:
            How many requests it took.
        """
        self._held.clear()
        parts: list[tuple[str, torch.Tensor]] = []
        count, seen = 0, 0
        try:
            for bucket, tensors in weights.buckets(self._bucket_bytes):
                seen += bucket.num_bytes
                converted = self._prepare(bucket, tensors, parts)
                del tensors
                last = seen == weights.num_bytes
                if last or converted or not (self._in_place and weights.stable):
                    self._request(parts, version if last else None, begun=count > 0)
                    count += 1
                    parts.clear()
        except WeightTransferError:
            self._let_go()
            raise
        except Exception as error:
            self._let_go()
            failure = WeightTransferError(f"The weights did not arrive: {error}")
            failure.untouched = count == 0
            raise failure from error
        return count

    def close(self) -> None:
        """Lets go of what a server that failed might still have read."""
        self._membership = -1
        self._held.clear()

    def _prepare(
        self,
        bucket: Bucket,
        tensors: NamedTensors,
        parts: list[tuple[str, torch.Tensor]],
    ) -> bool:
        """Adds tensors as they are served; returns whether any had to be converted."""
        on_gpu = self._device.type == "cuda"
        converted = [
            spec
            for spec in bucket.specs
            if not (
                on_gpu
                and tensors[spec.name].dtype == spec.dtype
                and tensors[spec.name].device == self._device
                and tensors[spec.name].is_contiguous()
            )
        ]
        sizes = [
            math.ceil(spec.num_bytes / _ALIGNMENT) * _ALIGNMENT for spec in converted
        ]
        place: dict[str, torch.Tensor] = {}
        if on_gpu and converted:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            starts = itertools.accumulate(sizes, initial=0)
            for spec, start in zip(converted, starts, strict=False):
                piece = flat[start : start + spec.num_bytes]
                place[spec.name] = piece.view(spec.dtype).view(spec.shape)
        elif converted:
            # One storage for each: with a tensor, its whole storage is written.
            for spec in converted:
                place[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
        for name, value in place.items():
            value.copy_(tensors[name].detach(), non_blocking=on_gpu)
        for spec in bucket.specs:
            ready = place.get(spec.name, tensors[spec.name].detach())
            parts.append((spec.name, ready))
        return bool(converted)

    def _request(
        self,
        parts: list[tuple[str, torch.Tensor]],
        version: str | None,
        *,
        begun: bool,
    ) -> None:
        if self._device.type == "cuda":
            # A server reads as soon as it is told where.
            torch.cuda.current_stream(self._device).synchronize()
        # What a server that does not answer may still read stays until the next time.
        self._held = [tensor for _, tensor in parts]
        failure: WeightTransferError | None = None
        try:
            entries = self._pack(parts)
            if entries is not None:
                self._post(entries, version, begun=begun)
                if self._engine.capabilities.tp_size > 1 and len(parts) > 0:
                    # The first rank answers for all, and another may still be copying.
                    # None can have taken a further request before it is done.
                    self._post(self._pack_nothing(), None, begun=True)
        except WeightTransferError as error:
            failure = error
            raise
        finally:
            if self._peers is not None:
                self._peers.settle(failure)
        self._held = []

    def _pack(self, parts: Sequence[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Returns an entry for every rank of every server; each is opened once."""
        if self._peers is not None:
            entry, kept = pack(parts)
            self._held += kept
            return self._peers.gather(entry)
        entries: list[str] = []
        for _ in range(self._engine.get_world_size()):
            if self._device.type == "cuda" or not entries:
                entry, kept = pack(parts)
                self._held += kept
            entries.append(entry)
        return entries

    def _pack_nothing(self) -> list[str]:
        return [pack([])[0]] * self._engine.get_world_size()

    def _post(
        self, entries: Sequence[str], version: str | None, *, begun: bool
    ) -> None:
        control = self._engine.control
        ranks = self._engine.capabilities.tp_size

        async def post() -> list[BaseException | None]:
            return await asyncio.gather(
                *(
                    control.update_weights_from_tensor(
                        entries[index * ranks : (index + 1) * ranks],
                        weight_version=version,
                        timeout=self._send_timeout,
                        urls=[url],
                    )
                    for index, url in enumerate(control.urls)
                ),
                return_exceptions=True,
            )

        outcomes = run_sync(post())
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                failure = WeightTransferError(
                    f"A server did not take the weights: {outcome}"
                )
                failure.untouched = not begun and all(map(_nothing_loaded, outcomes))
                raise failure from outcome

    def _let_go(self) -> None:
        """Frees what no receiver counts any more."""
        self._membership = -1
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _nothing_loaded(outcome: BaseException | None) -> bool:
    return isinstance(outcome, RequestRefusedError) and any(
        words in str(outcome) for words in _NOTHING_LOADED
    )
