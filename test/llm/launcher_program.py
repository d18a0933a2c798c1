"""A trainer of several ranks, run by torchrun: rank 0 has an engine of its own.

Arguments: the model's folder and the file for what rank 0 has found, in JSON.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def train(model_path: str) -> dict[str, Any]:
    """Generates, sends other weights, and generates again."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from helpers.log_probs import difference
    from transformers import AutoModelForCausalLM

    from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with AsyncSGLang.from_pretrained(model_path, device="cpu") as engine:
        before = difference(engine, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        stale = difference(engine, model)
        sender = SGLangWeightSyncScheme(engine).create_sender()
        report = sender.update_weights(model)
        after = difference(engine, model)
        sender.shutdown()
    return {
        "before": before,
        "stale": stale,
        "after": after,
        "version": report.version,
    }


def main(model_path: str, found: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    if dist.get_rank() == 0:
        Path(found).write_text(json.dumps(train(model_path)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
