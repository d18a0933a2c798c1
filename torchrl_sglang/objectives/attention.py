"""Attention among the tokens of each sequence of a row, without a mask.

A mask of all tokens by all tokens of a row takes time and memory by the square of the
row's length, although it is nearly empty. Here each sequence is computed alone: by
PyTorch's variable-length kernel if available, and otherwise in a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from torchrl_sglang.errors import ConfigurationError

PACKED = "torchrl_sglang_packed"
"""Name in transformers: ``model.config._attn_implementation``."""

_LARGEST_HEAD = 256
"""Largest head dimension of FlashAttention's kernels."""


def no_mask(device: torch.device) -> Tensor:
    """Returns a placeholder of a precomputed mask, which a model passes on."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    path_nodes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence, with transformers' signature.

    ``query``, ``key`` and ``value`` are ``(1, heads, tokens, dimension)``, the last two
    possibly with fewer heads; the result is ``(1, tokens, heads, dimension)``, and no
    weights. ``cu_seq_lens_q``, ``(sequences + 1,)``, are the boundaries of the
    sequences in the row; without them it is PyTorch's ``scaled_dot_product_attention``
    with the mask. ``sliding_window`` counts the token itself.

    In a row that is a :class:`.TokenTree`, the boundaries are those of its segments,
    and ``cu_seq_lens_k`` those of their paths in ``path_nodes``.
    """
    if cu_seq_lens_q is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise ConfigurationError(
                f"{type(module).__name__} got no boundaries of the sequences in a row, "
                f"because its model does not hand cu_seq_lens_q on; give packing=False."
            )
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return attended
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if path_nodes is None:
        cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
    else:
        key, value = (_along_paths(x, path_nodes) for x in (key, value))
    assert cu_seq_lens_k is not None
    bounds = cu_seq_lens_q, cu_seq_lens_k
    kernel = None if dropout else _kernel()
    if kernel is None or not _takes(query, value):
        lengths, paths = (bound.diff().tolist() for bound in bounds)
        alone = [
            _attend(q, k, v, dropout, scaling, sliding_window)
            for q, k, v in zip(
                torch.split(query, lengths, 2),
                torch.split(key, paths, 2),
                torch.split(value, paths, 2),
                strict=True,
            )
        ]
        return torch.cat(alone, 2).transpose(1, 2).contiguous(), None
    window = -1 if sliding_window is None else sliding_window - 1
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    output = kernel(
        *rows, *bounds, max_length_q, max_length_k, scale=scaling, window=window
    )
    return output.unsqueeze(0), None


class _AlongPaths(torch.autograd.Function):
    """Selects the tokens of paths; a token's gradient is summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, path_nodes: Tensor) -> Tensor:
        ctx.save_for_backward(path_nodes)
        ctx.shape = states.shape
        return states.index_select(2, path_nodes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (path_nodes,) = ctx.saved_tensors
        (gradient,) = gradients
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        # Rows of tokens, as the kernel returns them.
        rows = gradient.transpose(1, 2).to(dtype).flatten(2)[0]
        _, heads, tokens, dimension = ctx.shape
        sums = rows.new_zeros(tokens, rows.shape[-1]).index_add_(0, path_nodes, rows)
        shaped = sums.view(1, tokens, heads, dimension).transpose(1, 2)
        return shaped.to(gradient.dtype), None


_along_paths: Callable[[Tensor, Tensor], Tensor] = _AlongPaths.apply


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Computes the attention of the last tokens of a path to all of it."""
    length, path, mask = query.shape[2], key.shape[2], None
    if length < path or (window is not None and window < path):
        start = path - length
        mask = torch.ones(length, path, dtype=torch.bool, device=query.device)
        mask = mask.tril(start)
        if window is not None:
            mask = mask.triu(start + 1 - window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _takes(query: Tensor, value: Tensor) -> bool:
    """Returns whether the kernel supports these tensors."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@cache
def _kernel() -> Callable[..., Tensor] | None:
    """Returns PyTorch's variable-length attention, if available."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *bounds: Any,
        scale: float | None,
        window: int,
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale, "window_size": (window, 0)}
        # Without the argument fewer heads of keys need no permission.
        if query.shape[1] > key.shape[1] and "enable_gqa" in parameters:
            options["enable_gqa"] = True
        output = varlen_attn(query, key, value, *bounds, **options)
        assert isinstance(output, Tensor)
        return output

    return attend


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
