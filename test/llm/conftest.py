"""One real SGLang server on CPU for the whole test session, and its Hugging Face twin.

The twin is the oracle: whatever the engine says about tokens and log-probabilities is
compared with what ``transformers`` computes from the same files in float32.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import log_probs
from helpers.fake_server import FakeServer
from helpers.log_probs import response_difference
from helpers.ray_cluster import start_patiently
from tensordict import set_list_to_stack

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.launch.cpu import engine_python
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.testing.tiny_model import save_tiny_model

set_list_to_stack(True).set()
torch.set_num_threads(1)

Score = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="session")
def forking_python() -> Path | None:
    """The interpreter that all servers on CPU are forked by."""
    try:
        return engine_python()
    except ConfigurationError:
        # A machine for the tests that need a GPU.
        return None


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model and its tokenizer."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def session_engine(tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """The server of the test session. Use ``engine``, which restores its weights."""
    with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        yield engine


@pytest.fixture
def engine(session_engine: AsyncSGLang, tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """A running engine. Tests that change its weights use ``restored_engine``."""
    with unchanged_weights(session_engine, tiny_model_path):
        yield session_engine


@pytest.fixture
def fake(tiny_model_path: str) -> Iterator[FakeServer]:
    """A server for error paths that a healthy engine cannot produce."""
    with FakeServer(tiny_model_path) as server:
        yield server


@pytest.fixture
def fake_engine(fake: FakeServer) -> Iterator[AsyncSGLang]:
    with AsyncSGLang.connect(fake.url) as engine:
        yield engine


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Captures the messages of this package."""
    torchrl_logger.addHandler(caplog.handler)
    yield caplog
    torchrl_logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def session_lora_engine(tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """The server with LoRA of the test session. Use ``lora_engine``."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["all"],
        max_loras_per_batch=3,
        max_loaded_loras=3,
        custom_weight_loader="torchrl_sglang_delta.load",
    ) as engine:
        yield engine


@pytest.fixture
def lora_engine(
    session_lora_engine: AsyncSGLang, tiny_model_path: str
) -> Iterator[AsyncSGLang]:
    """A running engine that takes LoRA adapters; it has none before and after."""
    from torchrl_sglang import SGLangWeightSyncScheme

    with unchanged_weights(session_lora_engine, tiny_model_path):
        yield session_lora_engine
        for name in session_lora_engine.adapters:
            session_lora_engine.unload_adapter(name)
        if session_lora_engine.base_problem is not None:
            SGLangWeightSyncScheme(session_lora_engine).create_sender().recover()


@pytest.fixture
def ray_here(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray cluster in this process, without network and dashboard."""
    import ray
    from ray import cloudpickle

    # An actor cannot import the test's module.
    cloudpickle.register_pickle_by_value(request.module)
    # A finalizer that called Ray after its end has started it again.
    ray.shutdown()
    start_patiently(
        lambda: ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _node_ip_address="127.0.0.1",
        )
    )
    yield ray
    # A finalizer that calls Ray afterwards would start it again.
    gc.collect()
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def tokenizer(tiny_model_path: str) -> Any:
    """The tokenizer of the tiny model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture
def hf_model(tiny_model_path: str) -> torch.nn.Module:
    """The Hugging Face twin of the served model, new for every test."""
    return load_hf_model(tiny_model_path)


@pytest.fixture
def restored_engine(engine: AsyncSGLang, tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """An engine whose weights a test may change: they are put back afterwards."""
    yield engine
    restore_weights(engine, tiny_model_path)


class PeftModels:
    """Models with LoRA adapters, in PEFT's hands: the engine's answers are held to it.

    Args:
        path: folder of the base model.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def make(self, seed: int | None, **config: Any) -> Any:
        """Returns the model with an adapter whose effect is plain to see.

        With ``None`` for a seed it is as PEFT initialises it.
        """
        from peft import LoraConfig, get_peft_model

        settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        model = get_peft_model(
            load_hf_model(self.path), LoraConfig(**{**settings, **config})
        )
        if seed is not None:
            self.change(model, seed)
        return model.eval()

    @torch.no_grad()
    def change(self, model: Any, seed: int) -> None:
        """Gives the adapter other weights, in place, as a step of training does."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
                parameter.mul_(0.2)

    def difference(self, answer: Any, prompt: Sequence[int], model: Any) -> float:
        """Greatest difference of an answer's log-probs from a model's."""
        return response_difference(answer, prompt, model)


@pytest.fixture(scope="session")
def peft_models(tiny_model_path: str) -> PeftModels:
    """Makes models with adapters, and compares answers with them."""
    return PeftModels(tiny_model_path)


@pytest.fixture
def score(hf_model: torch.nn.Module) -> Score:
    """Log-probability of each token given those before it; 0.0 for the first."""
    return partial(log_probs.score, hf_model)


@contextmanager
def unchanged_weights(engine: AsyncSGLang, path: str) -> Iterator[None]:
    """Fails a test after which an engine that others use has other weights."""
    before = untrained_log_prob(engine)
    yield
    after = first_log_prob(engine)
    if after != pytest.approx(before, abs=1e-4):
        restore_weights(engine, path)
        pytest.fail(
            f"the engine has other weights than before this test: log-prob {after}, "
            f"not {before}; use restored_engine"
        )


def first_log_prob(engine: AsyncSGLang) -> float:
    """Returns the log-prob of the likeliest token after a prompt."""
    (response,) = engine.generate(
        input_ids=log_probs.PROMPT,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprobs=True,
    )
    return response.log_probs[0]


# Of an engine's first test; each test after it is checked when it ends.
untrained_log_prob = cache(first_log_prob)


def restore_weights(engine: AsyncSGLang, path: str) -> None:
    """Sends an engine the weights in a folder, which no test has trained."""
    from torchrl_sglang import SGLangWeightSyncScheme

    sender = SGLangWeightSyncScheme(engine).create_sender()
    sender.update_weights(load_hf_model(path))
    sender.shutdown()


def load_hf_model(path: str | Path) -> torch.nn.Module:
    """Returns the model in a folder, in float32 and evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32
    )
    return model.eval()
