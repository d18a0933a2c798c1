"""FP8 with a scale for each block of a weight, as DeepSeek-V3 is published.

A weight of ``[rows, columns]`` becomes ``weight`` (``float8_e4m3fn``) and
``weight_scale_inv`` (float32, a value for each block of 128 x 128), whose product it
is.
Servers that :meth:`.AsyncSGLang.from_pretrained` starts with ``rollout_dtype="fp8"``
take both under the names of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from torchrl_sglang.types import BLOCK_FP8, FP8_BLOCK
from torchrl_sglang.weight_update.encodings.base import WeightEncoding
from torchrl_sglang.weight_update.weights import TensorSpec

FP8 = torch.float8_e4m3fn

GREATEST = torch.finfo(FP8).max
"""Greatest value: 448."""

CHUNK_ROWS = 32 * FP8_BLOCK
"""Rows that are encoded at a time: they are held in float32 meanwhile."""

_ENCODED = re.compile(r"(^|[._])(\w*_proj|w[123]|fc[12])\.weight$")
"""Names of the weights of linear layers inside a model's blocks. Embeddings, the output
layer, norms, biases and routers (``mlp.gate``) stay as they are."""


class BlockFP8(WeightEncoding):
    """Quantises linear layers to FP8 in blocks of 128 x 128.

    The scale of a block is its greatest absolute value over 448, as in transformers'
    ``FineGrainedFP8Config``; values are rounded to the nearest of FP8. The bytes of an
    update are halved.

    Examples:
        >>> import torch
        >>> from torchrl_sglang.weight_update.encodings.block_fp8 import BlockFP8
        >>> from torchrl_sglang.weight_update.weights import TensorSpec
        >>> weight = torch.randn(256, 200, dtype=torch.bfloat16)
        >>> spec = TensorSpec(
        ...     name="mlp.up_proj.weight", dtype=weight.dtype, shape=weight.shape
        ... )
        >>> [tuple(part.shape) for part in BlockFP8().plan(spec)]
        [(256, 200), (2, 2)]
        >>> values, scales = BlockFP8().encode(spec, weight)
        >>> values.dtype, scales.dtype
        (torch.float8_e4m3fn, torch.float32)
    """

    name = "fp8"
    quantized = BLOCK_FP8

    def plan(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Returns values and scales of a linear layer, and anything else as it is."""
        if len(spec.shape) != 2 or _ENCODED.search(spec.name) is None:
            return (spec,)
        blocks = torch.Size(-(-size // FP8_BLOCK) for size in spec.shape)
        return (
            TensorSpec(name=spec.name, dtype=FP8, shape=spec.shape),
            TensorSpec(
                name=f"{spec.name}_scale_inv", dtype=torch.float32, shape=blocks
            ),
        )

    def encode(self, spec: TensorSpec, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        """Yields values and scales, on the tensor's device."""
        made = [_encode(rows) for rows in torch.split(tensor, CHUNK_ROWS)]
        values, scales = zip(*made, strict=True)
        yield torch.cat(values)
        yield torch.cat(scales)


def _encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values and the scales of some rows of blocks."""
    rows, columns = weight.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = pad(weight.float(), padding)
    blocks = padded.reshape(-1, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    greatest = blocks.abs().amax(dim=(1, 3))
    factor = torch.where(greatest > 0, GREATEST / greatest, 1.0)
    scaled = (blocks * factor[:, None, :, None]).clamp_(-GREATEST, GREATEST)
    values = scaled.to(FP8).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return values.contiguous(), factor.reciprocal()


def decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the weight that a server computes with, in float32."""
    rows, columns = values.shape
    factor = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return values.float() * factor[:rows, :columns]
