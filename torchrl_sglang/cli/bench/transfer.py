"""Bandwidth of a weight update, and of the link in the same run.

On CPU the limit is a plain gloo broadcast of equal size between two processes; on GPUs
it is a copy between two of them, or within the shared GPU of trainer and server.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchrl_sglang.cli.bench.timing import median_seconds
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme
from torchrl_sglang.weight_update.transports.base import BUCKET_BYTES
from torchrl_sglang.weight_update.transports.process_group import (
    gloo_listens_on,
    open_store,
)

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang
    from torchrl_sglang.types import SyncReport

GLOO_SECONDS = 60.0
"""Timeout for the rendezvous of the limit's two processes, and for each broadcast."""

OTHER_RANK = """
import datetime, sys, torch, torch.distributed as dist
port, num_bytes, rounds, seconds = map(int, sys.argv[1:])
timeout = datetime.timedelta(seconds=seconds)
store = dist.TCPStore("127.0.0.1", port, 2, timeout=timeout)
group = dist.ProcessGroupGloo(store, 1, 2, timeout)
flat = torch.empty(num_bytes, dtype=torch.uint8)
for _ in range(rounds):
    group.broadcast([flat], dist.BroadcastOptions()).wait()
    group.barrier().wait()
del group
"""


def measure_weights(
    engine: AsyncSGLang,
    *,
    repeats: int = 5,
    bucket_bytes: int = BUCKET_BYTES,
    transport: str = "broadcast",
) -> dict[str, Any]:
    """Replaces the served weights by random weights; returns median seconds.

    ``limit`` is the time of equal bytes over the bare link, ``send`` from the first
    bucket to the last response, ``update`` with pause, flush and resume;
    ``extra_bytes`` is the peak memory of the first update on a GPU, of trainer and
    server together. Servers with a traced loader use it; the model's own loader is
    measured in the same run (``own_loader``).
    """
    on_cpu = engine.capabilities.args.device == "cpu"
    gpus = 0 if on_cpu else torch.cuda.device_count()
    first_gpu = engine.capabilities.server_args.get("base_gpu_id")
    target = int(first_gpu or 0) if transport == "cuda_ipc" else 1
    if not on_cpu and gpus <= target:
        raise ConfigurationError(
            f"Weights travel from one GPU to another, and this process sees {gpus}; "
            f"measure where there are two."
        )
    device = "cpu" if on_cpu else "cuda:0"
    weights = random_weights(engine, device)
    options = {
        "device": torch.device(device),
        "bucket_bytes": bucket_bytes,
        "transport": transport,
    }
    reports, memory = _updates(engine, weights, repeats, gpus, **options)
    untraced = None
    if engine.capabilities.has_traced_loader:
        untraced, _ = _updates(
            engine, weights, repeats, gpus, weight_loader="sglang", **options
        )
    weights.clear()
    first = reports[0]
    if on_cpu:
        limit = limit_of_gloo(first.num_bytes, repeats)
    else:
        limit = limit_of_gpus(first.num_bytes, repeats, target=target)
    send, update = _medians(reports)
    return {
        "transport": first.transport,
        "num_bytes": first.num_bytes,
        "num_tensors": first.num_tensors,
        "num_buckets": first.num_buckets,
        "limit": limit,
        "send": send,
        "update": update,
        "extra_bytes": max(memory, default=None),
        "ratio": limit / update,
        "gb_per_second": first.num_bytes / send / 1e9,
        "own_loader": untraced
        and dict(zip(("send", "update"), _medians(untraced), strict=True)),
    }


def _updates(
    engine: AsyncSGLang,
    weights: dict[str, torch.Tensor],
    repeats: int,
    gpus: int,
    **options: Any,
) -> tuple[list[SyncReport], list[int]]:
    """Updates the weights repeatedly; returns reports, and the first's memory."""
    scheme = SGLangWeightSyncScheme(engine, **options)
    try:
        sender = scheme.create_sender()
        # The servers keep the memory of the first update.
        with _watch_memory(gpus) as memory:
            sender.update_weights(weights)
        return [sender.update_weights(weights) for _ in range(repeats)], memory
    finally:
        scheme.shutdown()


def _medians(reports: list[SyncReport]) -> tuple[float, float]:
    send = statistics.median(report.phase_seconds["send"] for report in reports)
    return send, statistics.median(report.seconds for report in reports)


def random_weights(engine: AsyncSGLang, device: str) -> dict[str, torch.Tensor]:
    """Returns random tensors for all parameters of the served model."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)
        for name, (dtype, shape) in engine.get_model_metadata().items()
    }


@contextlib.contextmanager
def _watch_memory(gpus: int) -> Iterator[list[int]]:
    """Samples the memory of the block on any GPU."""
    memory: list[int] = []
    done = threading.Event()

    def free() -> list[int]:
        return [torch.cuda.mem_get_info(index)[0] for index in range(gpus)]

    def watch() -> None:
        while not done.wait(0.001):
            memory.extend(a - b for a, b in zip(initial, free(), strict=True))

    if gpus:
        # Memory cached by this process would hide the difference.
        torch.cuda.empty_cache()
    initial = free()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def limit_of_gloo(num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of a plain broadcast between two processes."""
    timeout = datetime.timedelta(seconds=GLOO_SECONDS)
    store = open_store("127.0.0.1", 0, 2, timeout)
    numbers = map(str, (store.port, num_bytes, repeats + 1, int(GLOO_SECONDS)))
    with gloo_listens_on("127.0.0.1"):
        # In its own session: Ctrl-C only reaches this process, which ends it.
        command = [sys.executable, "-c", OTHER_RANK, *numbers]
        other = subprocess.Popen(command, start_new_session=True)
        try:
            group: Any = dist.ProcessGroupGloo(store, 0, 2, timeout)
            flat = torch.ones(num_bytes, dtype=torch.uint8)

            def broadcast() -> None:
                group.broadcast([flat], dist.BroadcastOptions()).wait()
                group.barrier().wait()

            seconds = median_seconds(broadcast, repeats)
            other.wait(GLOO_SECONDS)
        finally:
            other.kill()
            other.wait()
    return seconds


def limit_of_gpus(num_bytes: int, repeats: int, *, target: int) -> float:
    """Returns the median seconds of a copy from the first GPU to another, or itself."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    copied = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{target}")

    def copy() -> None:
        copied.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(target)

    return median_seconds(copy, repeats)
