"""Servers that the tests on GPUs share: those that are asked for start at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.gpu import (
    GPUS,
    LARGE_CACHE_TOKENS,
    LARGE_MODEL,
    MODEL,
    SPECULATIVE_STEPS,
    restore,
    start,
)

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.testing.tiny_model import save_tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    "gpu_engine": {"cuda_devices": [GPUS - 1]},
    "same_gpu": {"cuda_devices": [0]},
    "gpu_lora_engine": {
        "cuda_devices": [GPUS - 1],
        "enable_lora": True,
        "max_lora_rank": 16,
        "lora_target_modules": ["all"],
    },
    "draft_engine": {
        "cuda_devices": [0],
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": SPECULATIVE_STEPS,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": SPECULATIVE_STEPS + 1,
    },
    "quantized_engine": {"cuda_devices": [0], "quantization": "fp8"},
    "deterministic_engine": {"cuda_devices": [0], "deterministic": True},
    "sleeping_engine": {
        "cuda_devices": [GPUS - 1],
        "enable_memory_saver": True,
        "max_total_tokens": LARGE_CACHE_TOKENS,
    },
}
"""Arguments of the server of each fixture below. Those with equal ones share it."""


@pytest.fixture(scope="session")
def gpu_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny model in bfloat16."""
    return str(save_tiny_model(tmp_path_factory.mktemp("gpu") / "model", **MODEL))


@pytest.fixture(scope="session")
def gpu_servers(
    request: pytest.FixtureRequest,
    gpu_model_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, AsyncSGLang]]:
    """The servers that tests of this run ask for, by the names of their fixtures."""
    folder = tmp_path_factory.mktemp("servers")
    # A copy of the model from another folder.
    draft = folder / "draft"
    draft.symlink_to(gpu_model_path)
    further = {"draft_engine": {"speculative_draft_model_path": str(draft)}}
    asked = {name for item in request.session.items for name in _fixtures(item)}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        started: dict[str, Any] = {}
        names = {}
        for name in SETTINGS.keys() & asked:
            settings = SETTINGS[name] | further.get(name, {})
            path = gpu_model_path
            if name == "sleeping_engine":
                path = str(save_tiny_model(folder / "large", **LARGE_MODEL))
            names[name] = key = repr(settings)
            if key not in started:
                started[key] = pool.submit(_start, path, **settings)
        for future in started.values():
            # Those that started are ended, too, if another one fails.
            stack.callback(lambda future=future: future.result().shutdown())
        yield {name: started[key].result() for name, key in names.items()}


def _start(path: str, **settings: Any) -> AsyncSGLang:
    """Starts a server, which compiles kernels at its first requests."""
    engine = start(path, **settings)
    for temperature in (0.0, 1.0):
        engine.generate(
            input_ids=[5, 6, 7],
            sampling_params={"max_new_tokens": 8, "temperature": temperature},
            return_logprobs=True,
        )
    return engine


def _fixtures(item: pytest.Item) -> list[str]:
    """Names of the fixtures of a test, and of the fixtures of those."""
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="module")
def gpu_engine(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server on the last GPU; the trainer uses the first."""
    return restore(gpu_servers["gpu_engine"])


@pytest.fixture
def same_gpu(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server on the first GPU, which the trainer uses, too."""
    return gpu_servers["same_gpu"]


@pytest.fixture
def gpu_lora_engine(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server that holds adapters."""
    return gpu_servers["gpu_lora_engine"]


@pytest.fixture
def draft_engine(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server whose draft model is a copy of its model."""
    return gpu_servers["draft_engine"]


@pytest.fixture
def quantized_engine(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server that quantised the weights that it loaded."""
    return gpu_servers["quantized_engine"]


@pytest.fixture
def deterministic_engine(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server in deterministic mode."""
    return gpu_servers["deterministic_engine"]


@pytest.fixture
def sleeping_engine(gpu_servers: dict[str, AsyncSGLang]) -> AsyncSGLang:
    """A server of ``LARGE_MODEL`` that can give its memory back."""
    return gpu_servers["sleeping_engine"]
