"""Ranks of a trainer, and servers on GPUs: ``colocated_program.py TASK MODEL ...``.

With one GPU both ranks and both servers are on it, and talk by gloo, over which FSDP2
does not work on GPUs: each rank has the whole model. With more each rank has its own,
and a server beside it. The last line of the output is what was found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.gpu import GPUS, difference, new_model, start
from helpers.small_runs import few_tokens
from tensordict import set_list_to_stack

from torchrl_sglang import GRPO, AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.models import server_arguments
from torchrl_sglang.trainers.models import shard
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.weight_update.transports import handle_ranks

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUNDS = 3


def start_servers(path: str) -> AsyncSGLang:
    tp_size = int(os.environ.get("TP_SIZE", "1"))
    groups = [[number % GPUS] for number in range(SIZE)]
    if tp_size > 1:
        groups = [list(range(tp_size))]
    return start(
        path,
        num_replicas=len(groups),
        router_policy=None,
        tp_size=tp_size,
        cuda_devices=groups,
        enable_memory_saver=True,
        gpu_memory_utilization=0.3,
    )


def updates(path: str) -> dict[str, Any]:
    """Servers sleep, the model changes, and each opens its own rank's memory."""
    engine: Any = start_servers(path) if RANK == 0 else "http://127.0.0.1:1"
    dist.barrier()
    model, whole = new_model(3), new_model(3)
    options: dict[str, Any] = {"bucket_bytes": 400_000}
    if GPUS < SIZE:
        options["process_group"] = dist.group.WORLD
    else:
        device = torch.device("cuda", RANK)
        shard(model, TrainerRanks(rank=RANK, size=SIZE), device)
    scheme = SGLangWeightSyncScheme(engine, model, **options)
    sender = scheme.create_sender()
    packed, pack = [], handle_ranks.pack
    handle_ranks.pack = lambda value: (packed.append(0), pack(value))[1]
    found: dict[str, Any] = {"differences": [], "seconds": []}
    for _ in range(ROUNDS):
        if RANK == 0:
            engine.sleep(("weights", "kv_cache"))
        with torch.no_grad():
            for each in (*model.parameters(), *whole.parameters()):
                each.mul_(1.05)
        dist.barrier()
        if RANK == 0:
            engine.wake_up("weights")
        packed.clear()
        begun = time.perf_counter()
        report = sender.update_weights()
        found["seconds"].append(time.perf_counter() - begun)
        if RANK == 0:
            engine.wake_up()
            for url in engine.control.urls:
                with AsyncSGLang.connect(url) as one:
                    found["differences"].append(difference(one, whole))
        dist.barrier()
    counts: list[Any] = [None] * SIZE
    dist.all_gather_object(counts, len(packed))
    found |= {"packed": counts, "requests": report.num_buckets}
    found["transport"] = report.transport
    scheme.shutdown()
    if RANK == 0:
        engine.shutdown()
    return found


def train(path: str, folder: str) -> dict[str, Any]:
    """A run of two ranks: each with a server on its GPU, or with one on a third GPU."""
    colocated = os.environ.get("APART") is None
    run = GRPO(
        path,
        prompts=[{"query": f"Say {number}."} for number in range(12)],
        rewards=few_tokens,
        generate_kwargs={"max_new_tokens": 8},
        group_size=4,
        groups_per_batch=4,
        lr=1e-4,
        colocated=colocated,
        engine={
            "max_total_tokens": 65_536,
            "enforce_eager": True,
            "router_policy": None,
            **server_arguments(),
        },
        output=folder,
    )
    found: dict[str, Any] = {"folder": str(run.train()), "metrics": run.metrics}
    report = run.scheme.create_sender().last_report
    return {**found, "transport": report and report.transport}


if __name__ == "__main__":
    set_list_to_stack(True).set()
    torch.cuda.set_device(RANK % GPUS)
    backend = "gloo" if GPUS < SIZE else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    answer = (
        updates(*sys.argv[2:]) if sys.argv[1] == "updates" else train(*sys.argv[2:])
    )
    if RANK == 0:
        sys.stdout.write("\n" + json.dumps(answer) + "\n")
    dist.destroy_process_group()
