"""Batches of responses, as a collector writes them, for learners."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict, lazy_stack

from torchrl_sglang import GroupAdvantage

GROUP = 4


def make_row(number, reward, length=3, *, scored=True):
    """Returns a response as a collector writes it."""
    generator = torch.Generator().manual_seed(number)
    prompt = torch.tensor([5, 6, 7])
    response = torch.randint(8, 60, (length,), generator=generator)
    log_probs = torch.full((length,), -5.0 if scored else math.nan)
    full = torch.cat([prompt, response])
    return TensorDict(
        query=f"question {number // GROUP}",
        tokens=TensorDict(prompt=prompt, response=response, full=full),
        masks=TensorDict(
            all_attention_mask=torch.ones(len(full), dtype=torch.bool),
            all_assistant_mask=(torch.arange(len(full)) >= 3) & scored,
        ),
        log_probs=TensorDict(
            response=log_probs, full=torch.cat([torch.full((3,), math.nan), log_probs])
        ),
        token_policy_version=torch.zeros(length, dtype=torch.int64),
        next=TensorDict(
            reward=torch.full((1, 1), float(reward)),
            done=torch.ones(1, dtype=torch.bool),
            policy_version=torch.tensor(0),
        ),
    )


def make_batch(rewards, lengths=None, *, unscored=0):
    lengths = lengths or [3] * len(rewards)
    rows = [
        make_row(number, reward, length, scored=number >= unscored)
        for number, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return GroupAdvantage(GROUP)(lazy_stack(rows))
