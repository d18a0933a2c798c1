r"""Bandwidth of a weight update over that of the link, measured in the same run.

On CPU the limit is a plain gloo broadcast of as many bytes between two processes; on
two GPUs it is a copy from one to the other, on one a copy within it.

    python benchmarks/weight_sync.py                       # CPU, gloo
    python benchmarks/weight_sync.py --shapes 7b           # two GPUs, NCCL
    python benchmarks/weight_sync.py --shapes 7b --transport cuda_ipc    # one GPU

It is what `python -m torchrl_sglang bench weights` does, with the arguments of the
results in RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch

from models import server_arguments
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.cli.bench.shapes import SHAPES, save_model, save_shapes
from torchrl_sglang.cli.bench.transfer import measure_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=["cpu", *SHAPES], default="cpu")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--transport", choices=["broadcast", "cuda_ipc"], default="broadcast"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shapes == "cpu":
            model, _ = save_model("35m", folder)
            engine = AsyncSGLang.from_pretrained(model, device="cpu")
        else:
            engine = AsyncSGLang.from_pretrained(
                save_shapes(arguments.shapes, folder),
                device="cuda",
                load_format="dummy",
                base_gpu_id=0 if arguments.transport == "cuda_ipc" else 1,
                enforce_eager=True,
                gpu_memory_utilization=0.5,
                **server_arguments(),
            )
        with engine:
            found = measure_weights(
                engine,
                repeats=arguments.repeats,
                bucket_bytes=arguments.bucket_bytes,
                transport=arguments.transport,
            )
            version = engine.capabilities.version
    print(
        f"{found.num_bytes / 1e9:.3f} GB in {found.num_tensors} tensors and "
        f"{found.num_buckets} buckets by {found.transport}, SGLang {version}, "
        f"torch {torch.__version__}, {os.cpu_count()} cores, "
        f"median of {arguments.repeats}:"
    )
    if found.extra_bytes is not None:
        print(f"extra memory of the first update: {found.extra_bytes / 1e9:.3f} GB")
    for name in ("limit", "send", "update"):
        seconds = getattr(found, name)
        print(
            f"{name:8} {seconds:8.4f} s {found.gb_per_second(seconds):8.2f} GB/s "
            f"{found.limit / seconds:6.3f} of the limit"
        )


if __name__ == "__main__":
    main()
