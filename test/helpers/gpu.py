"""Model, server and marks of the tests that need a GPU.

Run them with ``pytest -m gpu`` where a Python with CUDA has both sglang and this
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from helpers import log_probs
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.cli.bench.models import server_arguments
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer

GPUS = torch.cuda.device_count()
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]

MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.05,
    "dtype": torch.bfloat16,
}
"""Shape of the served model. SGLang's CUDA kernels need half precision."""

TOLERANCE = 0.05
"""Greatest difference of log-probs, for bfloat16's rounding; two models of these shapes
differ by about 1."""

difference = partial(log_probs.difference, length=16)


def new_model(
    seed: int, dtype: torch.dtype = torch.bfloat16, shape: Mapping[str, Any] = MODEL
) -> torch.nn.Module:
    """Returns a model on the first GPU."""
    model = make_tiny_model(make_tiny_tokenizer(), seed=seed, **shape)
    return model.to("cuda:0", dtype)


def start(path: Any, **arguments: Any) -> AsyncSGLang:
    """Starts a server on a GPU."""
    settings = {"gpu_memory_utilization": 0.2, "start_timeout": 300, **arguments}
    return AsyncSGLang.from_pretrained(
        path,
        device="cuda",
        dtype=torch.bfloat16,
        enforce_eager=True,
        **settings,
        **server_arguments(),
    )
