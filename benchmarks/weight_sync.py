r"""Bandwidth of a weight update over that of the link, measured in the same run.

On CPU the limit is a plain gloo broadcast of as many bytes between two processes; on
two GPUs it is a copy from one to the other.

    python benchmarks/weight_sync.py                       # CPU, gloo
    python benchmarks/weight_sync.py --shapes 7b           # two GPUs, NCCL
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from models import SHAPES, save_shapes, server_arguments
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.testing.tiny_model import save_tiny_model

CPU_MODEL = {"hidden_size": 768, "num_layers": 4, "num_heads": 12, "num_kv_heads": 4}
"""About 100 MB in float32."""


def plain_gloo(num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of a broadcast between two processes, no more."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    code = (
        "import datetime, torch, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {store.port}, 2)\n"
        "group = dist.ProcessGroupGloo(store, 1, 2, datetime.timedelta(seconds=60))\n"
        f"flat = torch.empty({num_bytes}, dtype=torch.uint8)\n"
        f"for _ in range({repeats + 1}):\n"
        "    group.broadcast([flat], dist.BroadcastOptions()).wait()\n"
        "    group.barrier().wait()\n"
        "del group\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code])
    group = dist.ProcessGroupGloo(store, 0, 2, datetime.timedelta(seconds=60))
    flat = torch.ones(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        group.broadcast([flat], dist.BroadcastOptions()).wait()
        group.barrier().wait()
        seconds.append(time.perf_counter() - start)
    # A group that still has its threads when the interpreter ends complains.
    del group
    other.wait()
    return statistics.median(seconds[1:])


def peer_copy(num_bytes: int, repeats: int) -> float:
    """Returns the median seconds of a copy from one GPU to another."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=["cpu", *SHAPES], default="cpu")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    on_cpu = arguments.shapes == "cpu"
    device = torch.device("cpu" if on_cpu else "cuda:0")
    with tempfile.TemporaryDirectory() as folder:
        if on_cpu:
            engine = AsyncSGLang.from_pretrained(
                save_tiny_model(folder, **CPU_MODEL), device="cpu"
            )
        else:
            engine = AsyncSGLang.from_pretrained(
                save_shapes(arguments.shapes, folder),
                device="cuda",
                load_format="dummy",
                base_gpu_id=1,
                enforce_eager=True,
                gpu_memory_utilization=0.5,
                **server_arguments(),
            )
        with engine:
            weights = {
                name: torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)
                for name, (dtype, shape) in engine.get_model_metadata().items()
            }
            scheme = SGLangWeightSyncScheme(
                engine, device=device, bucket_bytes=arguments.bucket_bytes
            )
            sender = scheme.create_sender()
            reports = [
                sender.update_weights(weights) for _ in range(arguments.repeats + 1)
            ]
            scheme.shutdown()
        weights.clear()
    num_bytes = reports[0].num_bytes
    limit = (plain_gloo if on_cpu else peer_copy)(num_bytes, arguments.repeats)
    send = statistics.median(r.phase_seconds["send"] for r in reports[1:])
    total = statistics.median(r.seconds for r in reports[1:])
    version = engine.capabilities.version
    print(
        f"{num_bytes / 1e9:.3f} GB in {reports[0].num_tensors} tensors and "
        f"{reports[0].num_buckets} buckets, SGLang {version}, torch "
        f"{torch.__version__}, {os.cpu_count()} cores, median of {arguments.repeats}:"
    )
    for name, seconds in [("limit", limit), ("send", send), ("update", total)]:
        print(
            f"{name:8} {seconds:8.4f} s {num_bytes / seconds / 1e9:8.2f} GB/s "
            f"{limit / seconds:6.3f} of the limit"
        )


if __name__ == "__main__":
    main()
