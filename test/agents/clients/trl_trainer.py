"""A whole run of TRL's ``AsyncGRPOTrainer``, on a CPU.

``python trl_trainer.py JOB``: a JSON text with ``url``, ``model`` (a folder), ``out``
(another) and ``steps``. ``out/VERSION.safetensors`` has the weights of each sync.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


def vowels(completions, **_):
    """Rewards vowels."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / 4 for text in texts]


class SaveWeights(TrainerCallback):
    """Saves the weights that the trainer sends."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_train_begin(self, args, state, control, model, **_):
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model, **_):
        path = self.folder / f"{state.global_step + 1}.safetensors"
        save_file(model.state_dict(), path)


def main():
    job = json.loads(sys.argv[1])
    # The trainer looks up the speed of its device.
    torch.cuda.get_device_name = str
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    # The worker parses responses of templates that it knows.
    tokenizer.chat_template = qwen2_5_chat_template
    prompts = [[{"role": "user", "content": f"Say {n}."}] for n in range(16)]
    trainer = AsyncGRPOTrainer(
        model=job["model"],
        reward_funcs=vowels,
        args=AsyncGRPOConfig(
            output_dir=job["out"],
            vllm_server_base_url=job["url"],
            dtype="float32",
            bf16=False,
            use_cpu=True,
            max_steps=job["steps"],
            learning_rate=2e-3,
            num_generations=8,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=1,
            token_budget=0,
            max_completion_length=12,
            max_inflight_tasks=32,
            max_staleness=2,
            queue_maxsize=32,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[SaveWeights(job["out"])],
    )
    trainer.train()
    sys.stdout.write("\n" + json.dumps(trainer.state.log_history) + "\n")


if __name__ == "__main__":
    main()
