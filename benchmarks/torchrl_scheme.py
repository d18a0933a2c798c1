"""TorchRL's own weight-sync scheme for SGLang, for `weight_sync.py --torchrl`."""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torchrl.weight_update.llm import SGLangWeightSyncScheme

from torchrl_sglang import AsyncSGLang

REPEATS = 3


def main() -> None:
    url = sys.argv[1]
    served = AsyncSGLang.connect(url).get_model_metadata()
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="cuda:0").normal_(std=0.02)
        for name, (dtype, shape) in served.items()
    }
    sender = SGLangWeightSyncScheme(
        url, master_address="127.0.0.1", num_gpus=1, device=0
    ).create_sender()
    sender.init_all_workers_group(served)
    sender.update_weights(tensors)
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        sender.update_weights(tensors)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    update = statistics.median(seconds)
    print(
        f"TorchRL's scheme: {update:.4f} s, {num_bytes / update / 1e9:.2f} GB/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
