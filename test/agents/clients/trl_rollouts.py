"""TRL's rollout worker and weight transfer of ``AsyncGRPOTrainer``, without its model.

``python trl_rollouts.py JOB``: a JSON text with ``url``, ``model`` (a folder), ``out``
(another), ``updates``, ``samples`` after each update, and ``tokens`` of a response.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

NOISE = 0.02
SECONDS = 300.0


def length(completions, **_):
    """Rewards long responses."""
    return [float(len(completion[-1]["content"])) for completion in completions]


def make_worker(job, tokenizer):
    prompts = [[{"role": "user", "content": f"{n}+1="}] for n in range(64)]
    return AsyncRolloutWorker(
        model_name=job["model"],
        dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=[length],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=4,
        max_inflight_tasks=16,
        queue_maxsize=64,
        vllm_server_url=job["url"],
        max_tokens=job["tokens"],
    )


def take(worker, number):
    worker.check_health(SECONDS)
    return [worker.rollout_buffer.get(timeout=SECONDS) for _ in range(number)]


def main():
    job = json.loads(sys.argv[1])
    device = PartialState().device
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    # The worker parses responses of templates that it knows.
    tokenizer.chat_template = qwen2_5_chat_template
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    parameters = dict(model.to(device).named_parameters())
    client = VLLMClient(job["url"])
    transfer = WeightTransferClient(
        client,
        {
            "names": list(parameters),
            "dtype_names": [str(p.dtype).split(".")[-1] for p in parameters.values()],
            "shapes": [list(p.shape) for p in parameters.values()],
        },
    )
    transfer.init_weight_transfer()
    worker, samples = make_worker(job, tokenizer), []

    def sync(version):
        transfer.pause()
        transfer.send_weights(iter(parameters.items()))
        transfer.resume()
        worker.update_model_version(version)
        save_file(model.state_dict(), Path(job["out"]) / f"{version}.safetensors")

    sync(1)
    worker.start()
    try:
        for version in range(2, job["updates"] + 1):
            samples += take(worker, job["samples"])
            with torch.no_grad():
                for value in parameters.values():
                    value.add_(torch.randn_like(value), alpha=NOISE)
            sync(version)
        samples += take(worker, job["samples"])
    finally:
        worker.stop()
    transfer.destroy()
    report = [
        {
            "ids": sample.input_ids.tolist(),
            "mask": sample.completion_mask.tolist(),
            "log_probs": sample.old_log_probs.tolist(),
            "version": sample.model_version,
        }
        for sample in samples
    ]
    about = {"max_model_len": client.get_max_model_len(), "dtype": client.get_dtype()}
    sys.stdout.write(json.dumps({"samples": report, **about}) + "\n")


if __name__ == "__main__":
    main()
