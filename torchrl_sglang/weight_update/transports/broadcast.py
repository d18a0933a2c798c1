"""Broadcasts weights over a process group that trainer and servers share.

NCCL from a GPU, gloo from the CPU. A collective waits for ever for a server that
refused, so the HTTP request runs beside it and is the one that is watched: when it
fails, the group is given up, and both sides are free.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import SGLangError, WeightTransferError
from torchrl_sglang.support.checks import check_port, check_seconds, some_of
from torchrl_sglang.support.event_loop import run_sync, submit
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import WeightRoute
from torchrl_sglang.weight_update.transports import process_group
from torchrl_sglang.weight_update.transports.base import (
    TransportOptions,
    WeightTransport,
    send_to_each,
)
from torchrl_sglang.weight_update.transports.process_group import (
    POLL_SECONDS,
    open_store,
)
from torchrl_sglang.weight_update.transports.traced import (
    TracedLoader,
    uses_traced_loader,
)
from torchrl_sglang.weight_update.weights import (
    Bucket,
    NamedTensors,
    Weights,
    flatten,
    plan_buckets,
    read_buckets,
)

SMALL_BELOW = {"nccl": 8 << 20, "gloo": 0}
"""Smaller tensors are put together, in bytes. Its own broadcast costs a tensor 40 µs
with NCCL, the time of 15 MB on a link of 370 GB/s; a copy in host memory costs about as
much as gloo."""

CHECK_SECONDS = 1.0
"""Interval between questions to servers while a broadcast does not end."""

GIVE_UP_SECONDS = 5.0
"""Timeout for servers to leave a group that failed."""

_NOTHING_RECEIVED = ("must run between", "Failed to receive weights")
"""Refusals of a server that has not touched its weights. Others can come when some of a
bucket is loaded."""


@dataclass(frozen=True, kw_only=True)
class BroadcastOptions(TransportOptions):
    """Options of ``transport="broadcast"``."""

    master_address: str | None = None
    """Address at which servers meet this process. By default loopback for servers that
    are reached by it, otherwise the address that faces the first one elsewhere."""
    master_port: int | None = None
    """Port for that; by default a free one."""
    connect_timeout: float = 60.0
    """Timeout for the servers to join, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = check_seconds("connect_timeout", self.connect_timeout)
        self._set("connect_timeout", seconds)
        if self.master_port is not None:
            self._set("master_port", check_port("master_port", self.master_port))


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A bucket whose broadcasts may not have ended."""

    parts: list[torch.Tensor]
    """The tensors that they read."""
    owned: bool
    """Whether these are the source's own, which take no further memory."""
    ready: Any
    """Event on the device that they wait for; ``None`` without one."""
    works: list[Any] = field(default_factory=list)
    """The broadcasts that have begun."""


class BroadcastTransport(WeightTransport):
    """Broadcasts buckets from rank 0, this process, to the ranks of all servers."""

    name = "broadcast"
    traceable = True
    route = "distributed"
    in_session = True
    options_type = BroadcastOptions
    _options: BroadcastOptions

    def __init__(
        self, engine: RLSGLangEngine, options: Any = None, *, device: torch.device
    ) -> None:
        super().__init__(engine, options, device=device)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._in_flight: deque[_Flight] = deque()
        self._loader: TracedLoader | None = None
        self.group: Any = None
        """The process group with all servers; ``None`` where there is none."""
        self.group_name = ""
        self._epoch = -1

    @property
    def connected(self) -> bool:
        """Whether the group of all servers is alive."""
        # A trainer that tears torch.distributed down takes this group with it.
        alive = process_group.is_alive(self.group)
        return alive and self._epoch == self._engine.control.membership_epoch

    def connect(self) -> None:
        """Forms a process group with all servers; see :class:`.WeightTransport`."""
        if self.connected:
            return
        if self.group is not None:
            self._give_up()
        self._refuse_stages()
        traced = uses_traced_loader(self._engine, self._options.weight_loader)
        self._loader = (
            TracedLoader(self._engine, self._options.send_timeout) if traced else None
        )
        if self._backend == "nccl":
            process_group.share_nccl_settings(
                self._engine.capabilities.args, refuse=True
            )
        control, options = self._engine.control, self._options
        self._epoch = control.membership_epoch
        self.group_name = f"torchrl_sglang_{uuid.uuid4().hex[:8]}"
        world_size = 1 + self._engine.get_world_size()
        address = options.master_address or self._engine.get_master_address()
        port = options.master_port or 0
        timeout = datetime.timedelta(seconds=options.connect_timeout)
        try:
            store = open_store(address, port, world_size, timeout)
        except (OSError, RuntimeError) as error:
            raise WeightTransferError(
                f"No store for the process group can be opened at {address}:{port}: "
                f"{error}. Give another master_address or master_port.",
                untouched=True,
            ) from error
        request = submit(
            control.init_weights_update_group(
                master_address=address,
                master_port=store.port,
                world_size=world_size,
                group_name=self.group_name,
                backend=self._backend,
                timeout=options.connect_timeout,
            )
        )
        joining = process_group.in_thread(
            process_group.join,
            store,
            address,
            self._backend,
            world_size,
            self.group_name,
            options.connect_timeout,
            options.send_timeout,
        )
        try:
            concurrent.futures.wait(
                [request, joining],
                options.connect_timeout,
                concurrent.futures.FIRST_EXCEPTION,
            )
            for part in (request, joining):
                if part.done():
                    part.result()
            if not (request.done() and joining.done()):
                raise WeightTransferError(
                    f"The servers {self._servers} did not join a process group at "
                    f"{address}:{store.port} within {options.connect_timeout:g} s. Can "
                    f"they reach that address?"
                )
            self.group = joining.result()
        except BaseException as error:  # noqa: BLE001 - _fail raises it again.
            joining.add_done_callback(_destroy_late)
            self._fail(
                error,
                "The servers did not join the process group",
                untouched=True,
                advice=" Nothing was sent; the update can be tried again.",
            )

    def send(self, weights: Weights, *, version: str) -> int:
        """Broadcasts bucket after bucket; see :class:`.WeightTransport`.

        Over NCCL a server answers when it has queued what it receives on its device, so
        the link does not wait for the requests' answers. A traced loader puts most
        tensors where they belong, without memory for buckets, so one request is for all
        of them where the source holds them, too.
        """
        self._in_flight.clear()
        size, small_below = self._options.bucket_bytes, SMALL_BELOW[self._backend]
        buckets = plan_buckets(weights.specs, size, small_below)
        traced, stable = self._loader is not None, weights.stable
        groups = [buckets] if traced and stable else [[bucket] for bucket in buckets]
        read = read_buckets(weights, size, small_below)
        count = 0
        if self._loader is not None:
            self._loader.begin()
        try:
            for group in groups:
                count += len(group)
                self._send_buckets(
                    group,
                    read,
                    stable=stable,
                    version=version if count == len(buckets) else None,
                    begun=count > len(group),
                )
            if not stable:
                self._settle(keep=0)
            deque(read, maxlen=0)
            if self._loader is not None:
                # While the link is busy with the last bucket.
                run_sync(self._loader.check())
            self._settle(keep=0)
        except BaseException as error:
            if self.group is None:
                # Given up already, where the failure was noticed.
                raise
            self._fail(
                error, f"The weights did not arrive at {self._servers}", untouched=False
            )
        return len(buckets)

    def _send_buckets(
        self,
        buckets: list[Bucket],
        read: Iterator[tuple[Bucket, NamedTensors]],
        *,
        stable: bool,
        version: str | None,
        begun: bool,
    ) -> None:
        """Broadcasts the next buckets, which servers receive by one request."""
        request: concurrent.futures.Future[None] | None = None
        try:
            for bucket in buckets:
                if self._in_flight and not (stable and self._in_flight[-1].owned):
                    self._settle(keep=1 if stable else 0, request=request)
                _, tensors = next(read)
                flight = self._make_flight(bucket, tensors, stable)
                del tensors
                self._in_flight.append(flight)
                if request is None:
                    request = submit(self._receive(buckets, version))
                self._start(flight, self._is_grouped(bucket), request)
            if request is not None:
                self._finish(request)
        except BaseException as error:  # noqa: BLE001 - _fail raises it again.
            # A lost answer is not a refusal, and servers may have loaded garbage where
            # nothing was sent.
            refused = isinstance(error, WeightTransferError) and error.untouched
            if request is not None:
                request.cancel()
            self._fail(
                error,
                f"The weights did not arrive at {self._servers}",
                untouched=(request is None or refused) and not begun,
            )

    def _make_flight(
        self, bucket: Bucket, tensors: NamedTensors, stable: bool
    ) -> _Flight:
        """Prepares the broadcasts of a bucket."""
        if bucket.small:
            parts = [flatten(bucket, tensors, self._device)]
        else:
            # The tensors themselves where they are as they are served.
            parts = [
                tensors[spec.name].detach().to(self._device, spec.dtype).contiguous()
                for spec in bucket.specs
            ]
        addresses = {tensor.data_ptr() for tensor in tensors.values()}
        ready = None
        if self._backend == "nccl":
            ready = torch.cuda.current_stream(self._device).record_event()
        owned = stable and addresses >= {part.data_ptr() for part in parts}
        return _Flight(parts=parts, owned=owned, ready=ready)

    def _start(
        self,
        flight: _Flight,
        together: bool,
        request: concurrent.futures.Future[None],
    ) -> None:
        """Starts the broadcasts of a bucket, and waits until they have begun.

        Even that can block: NCCL's first call waits for every rank.
        """
        timeout = self._options.send_timeout
        deadline = time.monotonic() + timeout
        starting = process_group.in_thread(
            process_group.start_broadcasts,
            flight.parts,
            self.group,
            flight.ready,
            flight.works,
            together,
        )
        while not starting.done():
            concurrent.futures.wait([starting], POLL_SECONDS)
            if request.done():
                request.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"A broadcast did not begin within {timeout:g} s.")
        starting.result()

    def _finish(self, request: concurrent.futures.Future[None]) -> None:
        """Waits for the answer to a request while its broadcasts run."""
        while not request.done():
            concurrent.futures.wait([request], POLL_SECONDS)
            for flight in self._in_flight:
                for work in flight.works:
                    if work.is_completed():
                        work.wait()  # Raises if the broadcast has failed.
        request.result()

    async def _receive(self, buckets: list[Bucket], version: str | None) -> None:
        """Makes every server receive buckets."""
        route, fields = self._order(buckets)

        async def receive(_: int, url: str) -> None:
            await self._engine.control.update_weights_from(
                route,
                **fields,
                weight_version=version,
                timeout=self._options.send_timeout * len(buckets),
                draft=self.draft,
                urls=[url],
            )

        await send_to_each(
            list(self._engine.control.urls),
            receive,
            refusals=_NOTHING_RECEIVED,
            # Refusals come at once; the other servers wait in the broadcast for ever.
            grace_seconds=1.0,
        )

    def _order(self, buckets: list[Bucket]) -> tuple[WeightRoute, dict[str, Any]]:
        """Returns how buckets are received: the route, and its fields."""
        if self._loader is not None:
            together = self._backend == "nccl"
            return "tensor", self._loader.receive(buckets, self.group_name, together)
        (bucket,) = buckets
        return "distributed", {
            "names": [spec.name for spec in bucket.specs],
            "dtypes": [str(s.dtype).removeprefix("torch.") for s in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "group_name": self.group_name,
            "load_format": "flattened_bucket" if bucket.small else None,
        }

    def _is_grouped(self, bucket: Bucket) -> bool:
        """Returns whether both sides start the broadcasts as one operation."""
        traced = self._loader is not None
        return traced and self._backend == "nccl" and not bucket.small

    def _settle(
        self, *, keep: int, request: concurrent.futures.Future[None] | None = None
    ) -> None:
        """Waits until at most ``keep`` buckets are in flight.

        ``request`` is the one that they are received by, if it may not be answered yet.
        """
        timeout = self._options.send_timeout
        while len(self._in_flight) > keep:
            deadline = time.monotonic() + timeout
            next_check = time.monotonic() + CHECK_SECONDS
            for work in self._in_flight[0].works:
                # NCCL's wait() only makes the current stream wait.
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"A broadcast did not end within {timeout:g} s."
                        )
                    if request is not None and request.done():
                        request.result()
                        request = None
                    late = time.monotonic() > next_check
                    # A question to a server that receives waits for the end of that.
                    if late and request is None and self._loader is not None:
                        # A traced loader that fails answers as if it had not.
                        run_sync(self._loader.check())
                        next_check = time.monotonic() + CHECK_SECONDS
                    time.sleep(0.0002)
                work.wait()  # Raises if the broadcast has failed.
            self._in_flight.popleft()

    @property
    def _servers(self) -> str:
        return ", ".join(some_of(self._engine.control.urls))

    def _fail(
        self, error: BaseException, problem: str, *, untouched: bool, advice: str = ""
    ) -> NoReturn:
        self._give_up()
        if not isinstance(error, Exception):
            raise error
        hint = process_group.advice_for(str(error))
        raise WeightTransferError(
            f"{problem}: {error}{hint}{advice}", untouched=untouched
        ) from error

    def _give_up(self) -> None:
        """Frees both sides of a group that failed, without waiting for them."""
        group, self.group = self.group, None
        in_flight, self._in_flight = self._in_flight, deque()
        self._leave(given_up=True)
        if group is not None:
            works = [work for flight in in_flight for work in flight.works]
            parts = [part for flight in in_flight for part in flight.parts]
            for flight in in_flight:
                # An error's frames may hold these, and a work its connections.
                flight.works, flight.parts = [], []
            process_group.abandon(group, works, parts, self._backend)

    def _leave(self, *, given_up: bool) -> concurrent.futures.Future[Any]:
        """Makes the servers leave the group, ending broadcasts that they wait for."""
        loader, name = self._loader, self.group_name
        control = self._engine.control

        async def leave() -> Any:
            if given_up and loader is not None and self._backend == "nccl":
                try:
                    await loader.abandon(name, GIVE_UP_SECONDS)
                except SGLangError as error:
                    torchrl_logger.debug(f"Servers may still receive: {error}")
            return await control.destroy_weights_update_group(
                name, timeout=GIVE_UP_SECONDS
            )

        leaving = submit(leave())
        leaving.add_done_callback(
            lambda future: torchrl_logger.debug(f"Servers left a group: {future}")
        )
        return leaving

    def close(self) -> None:
        """Leaves the group."""
        if self.group is None:
            return
        group, self.group = self.group, None
        concurrent.futures.wait([self._leave(given_up=False)], GIVE_UP_SECONDS)
        process_group.destroy(group)


def _destroy_late(joining: concurrent.futures.Future[Any]) -> None:
    # A group that came up after it was given up; nothing was sent in it.
    if joining.exception() is None:
        process_group.destroy(joining.result())
