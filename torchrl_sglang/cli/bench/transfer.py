"""Bandwidth of a weight update, and of the link beside it.

On CPU the limit is a plain gloo broadcast of as many bytes between two processes; on
GPUs it is a copy from one to another, or within the one that trainer and server share.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme
from torchrl_sglang.weight_update.transports.base import BUCKET_BYTES
from torchrl_sglang.weight_update.transports.choose import TransportName
from torchrl_sglang.weight_update.transports.rendezvous import (
    gloo_listens_on,
    open_store,
)

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

__all__ = ["Transfer", "measure_weights", "peer_copy", "plain_gloo", "same_copy"]

STD = 0.02
"""Of the random weights: such as a model begins with."""

SAMPLE_SECONDS = 0.001
"""How often free memory is looked at."""

GLOO_SECONDS = 60.0
"""Budget for the two processes of the limit to meet, and for each broadcast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Durations of whole weight updates, in seconds: medians."""

    transport: str = "broadcast"
    """How they were sent."""
    num_bytes: int
    """Size of the weights."""
    num_tensors: int
    """Number of tensors; tied ones count once."""
    num_buckets: int
    """Number of transfers."""
    limit: float
    """As many bytes over the link, and nothing else."""
    send: float
    """From the first bucket to the last answer."""
    update: float
    """With pause, flush and resume."""

    extra_bytes: int | None = None
    """Most memory that the first update took on a GPU, of trainer and server together;
    ``None`` without a GPU."""

    @property
    def ratio(self) -> float:
        """What a whole update reaches of the link."""
        return self.limit / self.update

    def gb_per_second(self, seconds: float) -> float:
        """Returns the rate that a duration means, in 1e9 bytes per second."""
        return self.num_bytes / seconds / 1e9


def measure_weights(
    engine: AsyncSGLang,
    *,
    repeats: int = 5,
    bucket_bytes: int = BUCKET_BYTES,
    transport: TransportName = "broadcast",
) -> Transfer:
    """Replaces the served weights by random ones, several times.

    Args:
        engine: the servers, whose weights are lost.
        repeats: updates that count; one before them does not.
        bucket_bytes: size of a transfer, in bytes.
        transport: how they travel.

    Raises:
        ConfigurationError: if the servers are on GPUs, and this process has none.
    """
    on_cpu = engine.capabilities.server_args.get("device") == "cpu"
    shared = transport == "cuda_ipc"
    if not on_cpu and torch.cuda.device_count() < (1 if shared else 2):
        raise ConfigurationError(
            "Weights travel from one GPU to another, and this process sees "
            f"{torch.cuda.device_count()}; measure where there are two."
        )
    device = torch.device("cpu" if on_cpu else "cuda:0")
    weights = {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(std=STD)
        for name, (dtype, shape) in engine.get_model_metadata().items()
    }
    scheme = SGLangWeightSyncScheme(
        engine, device=device, bucket_bytes=bucket_bytes, transport=transport
    )
    try:
        sender = scheme.create_sender()
        # The servers keep the memory that the first one takes.
        with _LeastFree(0 if on_cpu else torch.cuda.device_count()) as watch:
            sender.update_weights(weights)
        reports = [sender.update_weights(weights) for _ in range(repeats)]
    finally:
        scheme.shutdown()
    weights.clear()
    first = reports[0]
    limit = plain_gloo if on_cpu else same_copy if shared else peer_copy
    return Transfer(
        transport=first.transport,
        extra_bytes=watch.taken,
        num_bytes=first.num_bytes,
        num_tensors=first.num_tensors,
        num_buckets=first.num_buckets,
        limit=limit(first.num_bytes, repeats),
        send=statistics.median(r.phase_seconds["send"] for r in reports),
        update=statistics.median(r.seconds for r in reports),
    )


class _LeastFree:
    """Watches the free memory of GPUs inside a ``with`` block.

    Args:
        count: how many GPUs.
    """

    def __init__(self, count: int) -> None:
        self.taken: int | None = None
        self._count = count
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before: list[int] = []

    def __enter__(self) -> Self:
        # What this process holds without need would hide what it takes.
        if self._count:
            torch.cuda.empty_cache()
        self._before = self._free()
        if self._count:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._count:
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            pairs = zip(self._before, self._free(), strict=True)
            taken = max(before - now for before, now in pairs)
            self.taken = max(taken, self.taken or 0)

    def _free(self) -> list[int]:
        return [torch.cuda.mem_get_info(index)[0] for index in range(self._count)]


def plain_gloo(num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of a broadcast between two processes, no more."""
    budget = datetime.timedelta(seconds=GLOO_SECONDS)
    store = open_store("127.0.0.1", 0, 2, budget)
    code = (
        "import datetime, torch, torch.distributed as dist\n"
        f"budget = datetime.timedelta(seconds={GLOO_SECONDS})\n"
        f"store = dist.TCPStore('127.0.0.1', {store.port}, 2, timeout=budget)\n"
        "group = dist.ProcessGroupGloo(store, 1, 2, budget)\n"
        f"flat = torch.empty({num_bytes}, dtype=torch.uint8)\n"
        f"for _ in range({repeats + 1}):\n"
        "    group.broadcast([flat], dist.BroadcastOptions()).wait()\n"
        "    group.barrier().wait()\n"
        "del group\n"
    )
    # Of its own session: Ctrl-C reaches this process, which ends the other one.
    with gloo_listens_on("127.0.0.1"):
        other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        with gloo_listens_on("127.0.0.1"):
            group: Any = dist.ProcessGroupGloo(store, 0, 2, budget)
        flat = torch.ones(num_bytes, dtype=torch.uint8)
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            group.broadcast([flat], dist.BroadcastOptions()).wait()
            group.barrier().wait()
            seconds.append(time.perf_counter() - start)
        # A group that still has its threads when the interpreter ends complains.
        del group
        other.wait(GLOO_SECONDS)
    finally:
        other.kill()
        other.wait()
    return statistics.median(seconds[1:])


def peer_copy(num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of a copy from one GPU to another."""
    return _copy(num_bytes, repeats, 1)


def same_copy(num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of a copy within one GPU."""
    return _copy(num_bytes, repeats, 0)


def _copy(num_bytes: int, repeats: int, index: int) -> float:
    """Returns the median seconds of a copy from the first GPU to another, or itself."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{index}")
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(index)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(index)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
