"""Fused kernels for :mod:`.token_terms`: a single pass over each token's logits.

Written in Triton, which CUDA builds of PyTorch include. The kernels read logits once,
in float32; PyTorch's own operations read and write them several times.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from torchrl_sglang.support.log import torchrl_logger

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 4096
"""Logits of a token per step."""


if triton is not None:

    @triton.jit
    def _sums(  # type: ignore[no-untyped-def]
        logits, tokens, scales, log_probs, log_sums, entropies, width, stride,
        block_size: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        begin = logits + row.to(tl.int64) * stride
        scale = tl.load(scales + row)
        largest = tl.full((), float("-inf"), tl.float32)
        # Sums of the exponentials, and of their products with the logits.
        total = tl.zeros((), tl.float32)
        moment = tl.zeros((), tl.float32)
        for start in range(0, width, block_size):
            place = start + tl.arange(0, block_size)
            value = tl.load(begin + place, place < width, float("-inf"))
            value = value.to(tl.float32) * scale
            new = tl.maximum(largest, tl.max(value, 0))
            # Only -inf so far: no difference exists.
            base = tl.where(new == float("-inf"), 0.0, new)
            part = tl.exp(value - base)
            shrunk = tl.exp(largest - base)
            total = total * shrunk + tl.sum(part, 0)
            weighted = tl.where(part > 0, part * value, 0.0)
            moment = moment * shrunk + tl.sum(weighted, 0)
            largest = new
        log_sum = largest + tl.log(total)
        chosen = tl.load(begin + tl.load(tokens + row)).to(tl.float32) * scale
        tl.store(log_probs + row, chosen - log_sum)
        tl.store(log_sums + row, log_sum)
        tl.store(entropies + row, log_sum - moment / total)

    @triton.jit
    def _gradients(  # type: ignore[no-untyped-def]
        logits, tokens, scales, log_sums, entropies, of_log_prob, of_entropy, width,
        stride, block_size: tl.constexpr,
    ):  # fmt: skip
        row, block = tl.program_id(0), tl.program_id(1)
        begin = logits + row.to(tl.int64) * stride
        scale = tl.load(scales + row)
        weight, spread = tl.load(of_log_prob + row), tl.load(of_entropy + row)
        place = block * block_size + tl.arange(0, block_size)
        value = tl.load(begin + place, place < width, float("-inf"))
        log_prob = value.to(tl.float32) * scale - tl.load(log_sums + row)
        prob = tl.exp(log_prob)
        surprise = tl.where(prob > 0, log_prob + tl.load(entropies + row), 0.0)
        gradient = tl.where(place == tl.load(tokens + row), weight, 0.0)
        gradient -= prob * (weight + spread * surprise)
        gradient = (gradient * scale).to(logits.dtype.element_ty)
        tl.store(begin + place, gradient, place < width)


def fits(logits: Tensor) -> bool:
    """Returns whether the kernels work here and compute terms of these logits."""
    return (
        logits.is_cuda
        and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and logits.stride(-1) == 1
        and _work(logits.device.index)
    )


@functools.cache
def _work(device: int) -> bool:
    """Tries the kernels once: without a C compiler Triton fails."""
    if triton is None:
        return False
    try:
        logits = torch.zeros(1, 2, device=f"cuda:{device}")
        index = torch.zeros(1, dtype=torch.int64, device=logits.device)
        scales = torch.ones(1, device=logits.device)
        outputs = forward(logits, index, scales)
        backward(logits, index, scales, outputs[1:], scales, scales)
    except Exception as error:  # noqa: BLE001 - From Triton, a compiler or a driver.
        torchrl_logger.warning(
            "Log-probs are computed by PyTorch's operations, which takes longer: "
            "Triton does not work here: %s",
            error,
        )
        return False
    return True


class _FusedTokenTerms(torch.autograd.Function):
    # There is no second derivative, and the logits are gone afterwards.

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, scales: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        log_probs, *sums = forward(logits, tokens, scales)
        ctx.save_for_backward(logits, tokens, scales, *sums)
        ctx.with_entropy = with_entropy
        entropies = sums[1] if with_entropy else torch.zeros_like(log_probs)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_prob: Tensor, of_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, tokens, scales, *sums = ctx.saved_tensors
        if not ctx.with_entropy:
            of_entropy = torch.zeros_like(of_entropy)
        backward(logits, tokens, scales, sums, of_log_prob, of_entropy)
        # PyTorch does not track kernel writes: a second backward() has to be refused.
        increment_version(logits)
        return logits, None, None, None


def fused_token_terms(
    logits: Tensor, tokens: Tensor, temperatures: Tensor | None, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Computes :func:`.token_terms` for logits accepted by :func:`fits`."""
    scales = torch.ones(len(tokens), device=logits.device)
    if temperatures is not None:
        scales /= temperatures
    terms: tuple[Tensor, Tensor] = _FusedTokenTerms.apply(  # type: ignore[no-untyped-call]
        logits, tokens, scales, entropy
    )
    return terms


def forward(
    logits: Tensor, tokens: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs of tokens, logarithms of sums, and entropies; in float32."""
    count, width = logits.shape
    outputs = torch.empty(3, count, dtype=torch.float32, device=logits.device).unbind()
    if count:
        with torch.cuda.device(logits.device):
            _sums[(count,)](
                logits, tokens, scales, *outputs, width, logits.stride(0),
                block_size=_BLOCK,
            )  # fmt: skip
    log_probs, log_sums, entropies = outputs
    return log_probs, log_sums, entropies


def backward(
    logits: Tensor,
    tokens: Tensor,
    scales: Tensor,
    sums: Any,
    of_log_prob: Tensor,
    of_entropy: Tensor,
) -> None:
    """Overwrites the logits with their gradients; ``sums`` are from :func:`forward`."""
    count, width = logits.shape
    if not count:
        return
    gradients = (g.contiguous().float() for g in (of_log_prob, of_entropy))
    with torch.cuda.device(logits.device):
        _gradients[(count, triton.cdiv(width, _BLOCK))](
            logits, tokens, scales, *sums, *gradients, width, logits.stride(0),
            block_size=_BLOCK,
        )  # fmt: skip
