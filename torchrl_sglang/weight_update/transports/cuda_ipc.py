"""Servers that share a GPU with the trainer open its memory and copy from it.

Only memory handles travel. Large tensors in their served type are opened in place; the
smallest, and those that have to be converted, are put together first. Where ranks of a
trainer hold the weights together, each server opens the memory of the rank on its GPU.

From the CPU, requests hold the values themselves, which is slow and needs no GPU:
handles of shared host memory need a helper process and leave files behind, and kill a
server that cannot open one.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import UnsupportedByServerError, WeightTransferError
from torchrl_sglang.support.event_loop import submit
from torchrl_sglang.types import TRACED_LOADER
from torchrl_sglang.weight_update.transports.base import WeightTransport, send_to_each
from torchrl_sglang.weight_update.transports.handle_ranks import (
    HandlePlan,
    assign,
    lead,
)
from torchrl_sglang.weight_update.transports.handles import (
    Content,
    LoadFormat,
    content_of,
    flat_content,
    is_ready,
    named,
    pack,
)
from torchrl_sglang.weight_update.transports.placement import find_facts, reach_of
from torchrl_sglang.weight_update.transports.traced import (
    TracedLoader,
    uses_traced_loader,
)
from torchrl_sglang.weight_update.weights import (
    TensorSpec,
    Weights,
    flatten,
    plan_buckets,
    read_all,
    read_buckets,
)

VALUE_BYTES = 1 << 26
"""Most bytes of values in one request, whose text is parsed as a whole."""

TOGETHER_BELOW_BYTES = 192 << 20
"""Larger tensors take longer to copy than to open, so they are never put together."""

CLOSE_SECONDS = 5.0
"""Timeout for servers to close memory that they keep open."""

_NOTHING_LOADED = ("must run between",)
"""Refusals of a server that has not touched its weights."""


class CudaIpcTransport(WeightTransport):
    """Makes every server open the trainer's memory; each must see the weights' GPU."""

    name = "cuda_ipc"
    traceable = True
    route = "tensor"
    in_session = True

    def __init__(
        self, engine: RLSGLangEngine, options: Any = None, *, device: torch.device
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(engine, options, device=device)
        self._bucket_bytes = self._options.bucket_bytes
        if device.type == "cpu":
            self._bucket_bytes = min(self._bucket_bytes, VALUE_BYTES)
        self._epoch = -1
        self._in_place = False
        self._apart = False
        self.owners: tuple[int, ...] | None = None
        """The trainer's rank that makes each handle; ``None``: this process alone."""
        self._held: deque[Content] = deque()
        self._traced = False
        self._loader = TracedLoader(engine, self._options.send_timeout)

    @property
    def connected(self) -> bool:
        """Whether all servers are known to reach the weights."""
        return self._epoch == self._engine.control.membership_epoch

    def connect(self) -> None:
        """Checks that all servers reach the weights; see :class:`.WeightTransport`."""
        self._refuse_stages()
        self._traced = uses_traced_loader(self._engine, self._options.weight_loader)
        # A server that was restarted has nothing open.
        self._loader.release()
        self._in_place, self.owners = False, None
        if self._device.type == "cuda":
            ranks = self.trainer_gpus
            facts = find_facts(self._engine, self._device, ranks=ranks)
            reaches = [reach_of(server, facts) for server in facts.servers]
            for reach in reaches:
                if reach.opens is False:
                    raise UnsupportedByServerError(
                        f"The server at {reach.url} cannot open the memory of the "
                        f"weights on {self._device}: {reach.reason} Use "
                        f"transport='broadcast', or transport='disk'."
                    )
            # A rank on another GPU copies everything that it opens at once.
            capabilities = self._engine.capabilities
            alone = capabilities.tp_size == 1
            same_gpu = all(reach.shares for reach in reaches)
            self._in_place = alone and same_gpu and not ranks
            # Another GPU cannot write to memory that can be released. SGLang moves
            # tensors to the GPU of the rank first, and a flat run of them not.
            sleeps = capabilities.args.enable_memory_saver
            self._apart = sleeps and not self._in_place
            if ranks:
                self.owners, same_gpu = assign(
                    facts.servers, capabilities.tp_size, ranks
                )
                self._apart = sleeps and not same_gpu
        self._epoch = self._engine.control.membership_epoch

    def send(self, weights: Weights, *, version: str) -> int:
        """Makes the servers copy all weights; returns the number of requests.

        While servers copy the tensors of one request, the next one is made.
        """
        self._held.clear()
        in_flight: deque[Future[None]] = deque()
        count, seen = 0, 0
        early: Future[None] | None = None
        self._loader.begin()
        try:
            for content in self._contents(weights):
                seen += content.num_tensors
                ends = seen == len(weights.specs)
                in_flight.append(self._request(content, version if ends else None))
                count += 1
                del content
                # The next content takes the memory of all but the latest.
                while len(in_flight) > 1:
                    in_flight.popleft().result()
                    self._held.popleft()
            if self._traced and (self.owners is None or weights.ranks is None):
                early = self._loader.check_early()
            while in_flight:
                in_flight.popleft().result()
                self._held.popleft()
            if early is not None:
                self._loader.confirm(early)
        except BaseException as error:
            failure = self._give_up(error, in_flight, count)
            if not isinstance(error, Exception):
                raise
            raise failure from error
        finally:
            if early is not None:
                early.cancel()
        self._held.clear()
        return count

    def close(self) -> None:
        """Releases memory that a server that failed might still have read."""
        if self.connected and self._loader.shares_memory:
            closing = submit(self._loader.forget(CLOSE_SECONDS))
            concurrent.futures.wait([closing], CLOSE_SECONDS)
        self._loader.release()
        self._epoch = -1
        self._held.clear()

    def _contents(self, weights: Weights) -> Iterator[Content]:
        """Yields the content of each request, with at most a bucket in new memory.

        A server opens a tensor in a tenth of a millisecond, the time of copying a
        hundred megabytes, so the smallest tensors are put together where it can copy
        from the whole.
        """
        if self.owners is not None and weights.ranks is not None:
            plan = HandlePlan(
                bucket_bytes=max(self._bucket_bytes // 2, 1),
                apart=self._apart,
                owners=self.owners,
            )
            yield from lead(weights, plan, self._device)
            return
        if self._traced:
            yield from self._traced_contents(weights)
            return
        if not (self._in_place and weights.stable):
            half = max(self._bucket_bytes // 2, 1)
            for bucket, tensors in read_buckets(weights, half):
                yield content_of(bucket, tensors, self._device, apart=self._apart)
            return
        tensors = read_all(weights)
        ready = {
            s.name for s in weights.specs if is_ready(s, tensors[s.name], self._device)
        }
        together, apart = divide(weights.specs, ready, self._bucket_bytes)
        num_bytes = sum(spec.num_bytes for spec in together)
        one = num_bytes <= self._bucket_bytes
        size = self._bucket_bytes if one else max(self._bucket_bytes // 2, 1)
        for bucket in plan_buckets(together, size):
            yield flat_content(bucket, flatten(bucket, tensors, self._device))
        if apart:
            yield named(apart, tensors)

    def _traced_contents(self, weights: Weights) -> Iterator[Content]:
        """Yields the content of each request to the traced loader."""
        device, half = self._device, max(self._bucket_bytes // 2, 1)
        if not (device.type == "cuda" and weights.stable):
            for bucket, tensors in read_buckets(weights, half):
                flat = flatten(bucket, tensors, device)
                yield self._loader.flat(bucket.specs, flat)
                del flat
            return
        if self._loader.has_open(weights.memory):
            yield self._loader.again(len(weights.specs))
            return
        tensors = read_all(weights)
        ready = [s for s in weights.specs if is_ready(s, tensors[s.name], device)]
        names = {spec.name for spec in ready}
        unready = [spec for spec in weights.specs if spec.name not in names]
        if ready:
            yield self._loader.memory(
                ready,
                tensors,
                apart=self._apart,
                whole=None if unready else weights.memory,
            )
        for bucket in plan_buckets(unready, half):
            yield self._loader.flat(bucket.specs, flatten(bucket, tensors, device))

    def _request(self, content: Content, version: str | None) -> Future[None]:
        if self._device.type == "cuda":
            # A server reads as soon as it has the handle.
            torch.cuda.current_stream(self._device).synchronize()
        # A server that does not answer may still read this, so it stays until the next
        # update.
        self._held.append(content)
        entries: list[str] = content.entries or []
        for _ in range(0 if entries else self._engine.get_world_size()):
            # A handle is opened by one rank of one server; values are the same for all.
            if self._device.type == "cuda" or not entries:
                entry, aliases = pack(content.value)
                content.aliases += aliases
            entries.append(entry)
        return submit(self._post(entries, content.load_format, version))

    def _give_up(
        self, error: BaseException, in_flight: deque[Future[None]], count: int
    ) -> WeightTransferError:
        """Waits until nothing is in flight, and returns the error to raise.

        A server could serve an abandoned request in the middle of the next update.
        """
        timeout = 2 * self._options.send_timeout + 10.0
        outcomes = [request.exception(timeout) for request in in_flight]
        transfer = isinstance(error, WeightTransferError)
        if transfer:
            outcomes.append(error)
        answered = count - len(outcomes)
        untouched = answered <= 0 and all(
            isinstance(failure, WeightTransferError) and failure.untouched
            for failure in outcomes
        )
        self._epoch = -1
        self._loader.release()
        if self._device.type == "cuda":
            # Frees memory that no receiver counts any more.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        message = str(error) if transfer else f"The weights did not arrive: {error}"
        return WeightTransferError(message, untouched=untouched)

    async def _post(
        self, entries: Sequence[str], load_format: LoadFormat, version: str | None
    ) -> None:
        await self._post_once(entries, load_format, version)
        if self._engine.capabilities.tp_size > 1 and load_format != TRACED_LOADER:
            # The first rank answers for all, and another may still be copying. It takes
            # no further request before it is done, so an empty one is a fence.
            fence = [pack([])[0]] * self._engine.get_world_size()
            try:
                await self._post_once(fence, None, None)
            except WeightTransferError as error:
                raise error.replace(untouched=False) from error.__cause__

    async def _post_once(
        self, entries: Sequence[str], load_format: LoadFormat, version: str | None
    ) -> None:
        ranks = self._engine.capabilities.tp_size

        async def post(index: int, url: str) -> None:
            await self._engine.control.update_weights_from(
                "tensor",
                serialized_named_tensors=entries[index * ranks : (index + 1) * ranks],
                load_format=load_format,
                weight_version=version,
                timeout=self._options.send_timeout,
                draft=self.draft,
                urls=[url],
            )

        await send_to_each(
            self._engine.control.urls,
            post,
            refusals=_NOTHING_LOADED,
            message="A server did not take the weights.",
        )


def divide(
    specs: Sequence[TensorSpec], ready: Collection[str], num_bytes: int
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Returns the tensors that are put together, and those that are opened in place.

    ``ready`` names the tensors that a server can copy from; the smallest of them fill
    up ``num_bytes``.
    """
    chosen = {spec.name for spec in specs if spec.name not in ready}
    room = num_bytes - sum(spec.num_bytes for spec in specs if spec.name in chosen)
    candidates = [spec for spec in specs if spec.name in ready]
    for spec in sorted(candidates, key=lambda spec: spec.num_bytes):
        room -= spec.num_bytes
        if room < 0 or spec.num_bytes > TOGETHER_BELOW_BYTES:
            break
        chosen.add(spec.name)
    return (
        [spec for spec in specs if spec.name in chosen],
        [spec for spec in specs if spec.name not in chosen],
    )
