r"""Bandwidth of weight updates over that of the link, measured in the same run.

On CPU the limit is a plain gloo broadcast of as many bytes between two processes; on
two GPUs it is a copy from one to the other, on one a copy within it.

    python benchmarks/weight_sync.py                       # CPU, gloo
    python benchmarks/weight_sync.py --shapes 7b           # two GPUs, NCCL
    python benchmarks/weight_sync.py --shapes 7b --transport cuda_ipc    # one GPU
    python benchmarks/weight_sync.py --shapes 7b --transport broadcast cuda_ipc

`--torchrl` adds the scheme that TorchRL itself has for SGLang, and `--pause` how long a
stream on a GPU stands still (see `update_pause.py`). It is what `python -m
torchrl_sglang bench weights` does, with the arguments of the results in RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.cli.bench.shapes import SHAPES, save_model, save_shapes
from torchrl_sglang.cli.bench.transfer import Transfer, measure_weights
from torchrl_sglang.testing.gpu import server_arguments
from update_pause import show_pause

GPU_OF_SERVER = {"broadcast": 1, "cuda_ipc": 0, "torchrl": 1}
"""The trainer is on GPU 0."""

TORCHRL_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""What TorchRL starts SGLang with, and sets in the trainer."""


def start(shapes: str, names: list[str], folder: str) -> dict[str, AsyncSGLang]:
    """Starts a server for each measurement, where it has to be."""
    if shapes == "cpu":
        model, _ = save_model("35m", folder)
        return {
            name: AsyncSGLang.from_pretrained(model, device="cpu") for name in names
        }
    model = save_shapes(shapes, folder)

    def one(name: str) -> AsyncSGLang:
        return AsyncSGLang.from_pretrained(
            model,
            device="cuda",
            load_format="dummy",
            base_gpu_id=GPU_OF_SERVER[name],
            enforce_eager=True,
            # Servers may share a GPU here; what they take for caches is little.
            gpu_memory_utilization=0.6,
            max_total_tokens=16_384,
            start_timeout=400,
            environment=TORCHRL_SETTINGS if name == "torchrl" else None,
            **server_arguments(),
        )

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def show(found: Transfer) -> None:
    """Prints one measurement."""
    extra = (
        ""
        if found.extra_bytes is None
        else f", at most {found.extra_bytes / 1e9:.2f} GB of further memory"
    )
    print(
        f"{found.transport}: {found.num_bytes / 1e9:.3f} GB in {found.num_tensors} "
        f"tensors and {found.num_buckets} transfers{extra}"
    )
    for name in ("limit", "send", "update"):
        seconds = getattr(found, name)
        print(
            f"  {name:8} {seconds:8.4f} s {found.gb_per_second(seconds):8.2f} GB/s "
            f"{found.limit / seconds:6.3f} of the limit",
            flush=True,
        )


def compare_torchrl(engine: AsyncSGLang) -> None:
    """Runs TorchRL's scheme in a process of its own: it changes NCCL's settings."""
    script = Path(__file__).with_name("torchrl_scheme.py")
    subprocess.run([sys.executable, script, engine.server_url], check=True, timeout=180)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=["cpu", *SHAPES], default="cpu")
    parser.add_argument("--bucket-bytes", type=int, nargs="+", default=[2 << 30])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--transport",
        choices=["broadcast", "cuda_ipc"],
        nargs="+",
        default=["broadcast"],
    )
    parser.add_argument("--torchrl", action="store_true")
    parser.add_argument("--pause", action="store_true")
    arguments = parser.parse_args()
    engines: Mapping[str, AsyncSGLang] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            names = arguments.transport + ["torchrl"] * arguments.torchrl
            engines = start(arguments.shapes, names, folder)
            version = next(iter(engines.values())).capabilities.version
            print(
                f"SGLang {version}, torch {torch.__version__}, {os.cpu_count()} cores, "
                f"median of {arguments.repeats}"
            )
            for transport in arguments.transport:
                for bucket_bytes in arguments.bucket_bytes:
                    print(f"buckets of {bucket_bytes / (1 << 30):g} GiB, ", end="")
                    show(
                        measure_weights(
                            engines[transport],
                            repeats=arguments.repeats,
                            bucket_bytes=bucket_bytes,
                            transport=transport,
                        )
                    )
            if arguments.pause:
                weights = {
                    name: torch.randn(shape, dtype=dtype, device="cuda:0") * 0.02
                    for name, (dtype, shape) in engines[transport]
                    .get_model_metadata()
                    .items()
                }
                show_pause(engines[transport], weights, "in_place", arguments.repeats)
                del weights
            if arguments.torchrl:
                compare_torchrl(engines["torchrl"])
        finally:
            for engine in engines.values():
                engine.shutdown()


if __name__ == "__main__":
    main()
