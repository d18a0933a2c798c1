"""A made-up quantity of each token: log-probs of two tokens, whichever was sampled.

Hugging Face's model is its oracle.
"""

from __future__ import annotations

import math

import torch

from torchrl_sglang import TokenColumn

CHOICES = [5, 9]


def read(entries, num_tokens):
    return [[entry[0] for entry in row] for row in entries]


def ask(start):
    return {"return_logprob": True, "token_ids_logprob": CHOICES}


YES_NO = TokenColumn(
    name="yes_no",
    dtype="float32",
    shape=(2,),
    unknown=math.nan,
    padding=0.0,
    request=ask,
    field="output_token_ids_logprobs",
    read=read,
)


@torch.no_grad()
def expected(model, token_ids, start):
    """Log-probs of the two tokens at each position from ``start`` on."""
    logits = model(torch.as_tensor(token_ids)[None]).logits[0].float()
    return logits.log_softmax(-1)[start - 1 : -1, CHOICES]
