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
    from transformers import AutoModelForCausalLM

    from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = [5, 6, 7, 8]

    def difference(engine: AsyncSGLang) -> float:
        (answer,) = engine.generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 8, "ignore_eos": True},
            return_logprobs=True,
        )
        full = torch.tensor(ids + answer.token_ids)
        with torch.no_grad():
            log_probs = model(full[None]).logits[0, :-1].log_softmax(-1)
        log_probs = log_probs.gather(-1, full[1:, None])[len(ids) - 1 :, 0]
        return float((log_probs - torch.tensor(answer.log_probs)).abs().max())

    with AsyncSGLang.from_pretrained(model_path, device="cpu") as engine:
        before = difference(engine)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        stale = difference(engine)
        sender = SGLangWeightSyncScheme(engine).create_sender()
        report = sender.update_weights(model)
        after = difference(engine)
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
