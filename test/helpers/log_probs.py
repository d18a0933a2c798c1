"""Compares log-probs of an engine with those of a Hugging Face model, the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TOLERANCE = 1e-4
"""Greatest difference between the engine's log-probs and Hugging Face's in float32."""

PROMPT = [5, 6, 7, 8, 9, 10, 11]
"""Token ids of a prompt for every tiny model."""


@torch.no_grad()
def score(model: Any, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Log-prob of each token given those before it, on the CPU; 0.0 for the first."""
    device = next(model.parameters()).device
    ids = torch.as_tensor(token_ids, device=device)
    log_probs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    picked = log_probs.gather(-1, ids[1:, None])[:, 0].cpu()
    return torch.cat([torch.zeros(1), picked])


def response_difference(
    response: Any,
    prompt: Sequence[int],
    model: Any,
    start: int = 0,
    end: int | None = None,
) -> float:
    """Greatest difference of a response's log-probs from a model's, in a range."""
    expected = score(model, [*prompt, *response.token_ids])[len(prompt) :]
    found = torch.tensor(response.log_probs)
    return float((expected - found)[start:end].abs().max())


def difference(
    engine: Any,
    model: Any,
    prompt: Sequence[int] = PROMPT,
    *,
    length: int = 8,
    **arguments: Any,
) -> float:
    """Generates with an engine; greatest difference of its log-probs from a model's."""
    (response,) = engine.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": length, "ignore_eos": True},
        return_logprobs=True,
        **arguments,
    )
    return response_difference(response, prompt, model)


def batch_difference(batch: Any, model: Any) -> float:
    """Greatest difference of collected log-probs of responses from a model's."""
    worst = 0.0
    for tokens, log_probs in zip(
        batch.get(("tokens", "full"), as_list=True),
        batch.get(("log_probs", "response"), as_list=True),
        strict=True,
    ):
        expected = score(model, tokens)[-len(log_probs) :]
        worst = max(worst, float((log_probs - expected).abs().max()))
    return worst
