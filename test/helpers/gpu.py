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
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
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

LARGE_MODEL: dict[str, Any] = {
    "hidden_size": 2048,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 8,
    "initializer_range": 0.02,
    "dtype": torch.bfloat16,
}
"""Weights of about half a GB: enough to be seen beside a CUDA context."""

LARGE_CACHE_TOKENS = 1_300_000
"""Tokens in the cache of the server of that model: 20 GB."""

SPECULATIVE_STEPS = 3
"""Tokens that a draft model proposes at a time."""

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
    """Starts a server on a GPU, beside others, each of which takes a little of it."""
    settings = {
        # SGLang asks for free memory beyond this share. The tokens bound its cache:
        # servers that start at once do not see what the others are about to take.
        "gpu_memory_utilization": 0.85,
        "max_total_tokens": 65_536,
        "start_timeout": 300,
        "enforce_eager": True,
        **arguments,
    }
    return AsyncSGLang.from_pretrained(
        path,
        device="cuda",
        dtype=torch.bfloat16,
        **settings,
        **server_arguments(),
    )


def restore(engine: AsyncSGLang) -> AsyncSGLang:
    """Returns a server that other tests use, too, with the weights it started with."""
    scheme = SGLangWeightSyncScheme(engine)
    scheme.create_sender().update_weights(new_model(0))
    scheme.shutdown()
    return engine
