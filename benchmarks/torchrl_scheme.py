"""Seconds of a weight update by the scheme that TorchRL itself has for SGLang.

Two GPUs; compare with `python -m torchrl_sglang bench weights 7b` in the same run.

    python benchmarks/torchrl_scheme.py [7b] [--repeats 3]
"""

from __future__ import annotations

import torch
from torchrl.weight_update.llm import SGLangWeightSyncScheme

from script import read_options
from torchrl_sglang.cli.bench.measure import (
    median_seconds,
    random_weights,
    start_engine,
)

TORCHRL_SETTINGS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""What TorchRL starts SGLang with, and sets in the trainer."""


def main() -> None:
    arguments = read_options(__doc__, model="7b", repeats=3)
    options = {"base_gpu_id": 1, "enforce_eager": True, "gpu_memory_utilization": 0.6}
    options |= {"environment": TORCHRL_SETTINGS, "start_timeout": 400}
    with start_engine(arguments.model, device="cuda", **options) as engine:
        weights = random_weights(engine, "cuda:0")
        sender = SGLangWeightSyncScheme(
            engine.server_url, master_address="127.0.0.1", num_gpus=1, device=0
        ).create_sender()
        sender.init_all_workers_group(engine.get_model_metadata())

        def update() -> None:
            sender.update_weights(weights)
            torch.cuda.synchronize()

        seconds = median_seconds(update, arguments.repeats)
    rate = sum(tensor.nbytes for tensor in weights.values()) / seconds / 1e9
    print(f"TorchRL's scheme: {seconds:.4f} s, {rate:.2f} GB/s")


if __name__ == "__main__":
    main()
