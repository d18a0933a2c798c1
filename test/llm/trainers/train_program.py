"""GRPO in processes of its own: ``train_program.py MODEL URL FOLDER STEPS [JSON]``."""

from __future__ import annotations

import json
import sys

import torch
from tensordict import set_list_to_stack

from torchrl_sglang import GRPO


def few_tokens(conversation, task):
    return -len(conversation.turns[-1].token_ids) / 10


if __name__ == "__main__":
    model, url, folder, steps = sys.argv[1:5]
    options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    GRPO(
        model,
        prompts=[{"query": f"Say {n}.", "number": n} for n in range(24)],
        rewards=few_tokens,
        group_size=4,
        groups_per_batch=4,
        steps=int(steps),
        lr=2e-3,
        checkpoint_every=2,
        output=folder,
        resume="auto",
        **{"engine": url, "generate_kwargs": {"max_new_tokens": 12}, **options},
    ).train()
