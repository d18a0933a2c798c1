"""Two runs in one process: ``two_runs_program.py MODEL URL FOLDER``.

The second one trains the model that it is given. After each, each rank writes to a file
how many sockets it has open.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from tensordict import set_list_to_stack
from transformers import AutoModelForCausalLM

from torchrl_sglang import GRPO


def few_tokens(conversation, task):
    return -len(conversation.turns[-1].token_ids) / 10


def sockets() -> int:
    gc.collect()
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed.
        with suppress(FileNotFoundError):
            count += os.readlink(file).startswith("socket:")
    return count


if __name__ == "__main__":
    path, url, folder = sys.argv[1:]
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    models = {"of_a_path": path, "given": AutoModelForCausalLM.from_pretrained(path)}
    for name, model in models.items():
        GRPO(
            model,
            prompts=[{"query": f"Say {n}."} for n in range(8)],
            rewards=few_tokens,
            generate_kwargs={"max_new_tokens": 8},
            group_size=2,
            groups_per_batch=4,
            steps=2,
            lr=2e-3,
            engine=url,
            output=f"{folder}/{name}",
        ).train()
        file = Path(folder, f"sockets_{name}_{os.environ['RANK']}")
        file.write_text(str(sockets()))
