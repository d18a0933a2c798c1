"""The kernel that TRL's trainer loads from the hub, FlashAttention 3, in PyTorch."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional


def get_kernel(name: str, version: int) -> Any:
    assert (name, version) == ("kernels-community/flash-attn3", 1)
    return SimpleNamespace(flash_attn_varlen_func=attend)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query: int,
    max_key: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Returns attention ``(tokens, heads, size)`` of segments to their paths."""
    assert (causal, window_size) == (True, (-1, -1))
    segments = []
    spans = zip(
        pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True
    )
    for of_query, of_key in spans:
        q, k, v = (
            tensor[slice(*span)].transpose(0, 1)
            for tensor, span in ((query, of_query), (key, of_key), (value, of_key))
        )
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            # The last token of a segment attends to its whole path.
            attn_mask=mask.tril(k.shape[1] - q.shape[1]),
            scale=softmax_scale,
            enable_gqa=True,
        )
        segments.append(out.transpose(0, 1))
    return torch.cat(segments)
