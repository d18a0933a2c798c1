"""What a sampler leaves of each token's distribution, from a model's logits."""

from __future__ import annotations

import torch

EDGE = 1e-6
"""Distance from a bound that float32 does not see."""


@torch.no_grad()
def expected(model, prompt, token_ids, params, edge_width=EDGE):
    """Returns support, its edge, and log-prob of each token, in float64.

    Of the edge it depends on float32's rounding whether a token is left.
    """
    rows = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    found = []
    for row, token in zip(rows.double(), token_ids, strict=True):
        if params["temperature"] == 0:
            found.append(({int(row.argmax())}, set(), 0.0))
            continue
        scaled = row / params["temperature"]
        probs, order = scaled.softmax(-1).sort(descending=True)
        keep = torch.arange(len(probs)) < params.get("top_k", len(probs))
        # On CPU, top-p's share is one of all tokens.
        share = probs.cumsum(0) - probs - params.get("top_p", 1.0)
        margin = probs / probs[0] - params.get("min_p", 0.0)
        edge = keep & ((share.abs() < edge_width) | (margin.abs() < edge_width))
        keep &= (share <= 0) & (margin >= 0)
        kept = order[keep]
        log_prob = float(scaled[token] - scaled[kept].logsumexp(0))
        found.append((set(kept.tolist()), set(order[edge].tolist()), log_prob))
    return found
