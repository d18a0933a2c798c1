"""Updates by traced copies on a real server equal those by the model's own loader.

Log-probs are compared bitwise: every prompt is computed by the same server in the same
way, so equal weights give equal bits.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import requests
import torch
from helpers.log_probs import PROMPT, TOLERANCE, difference
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
)

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import (
    ConfigurationError,
    UnsupportedByServerError,
    WeightSyncError,
    WeightSyncStateError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from torchrl_sglang.types import TRACED_LOADER
from torchrl_sglang.weight_update.transports.traced import QUESTION, TracedLoader

TENSOR = "/update_weights_from_tensor"
TRANSPORTS = ("broadcast", "cuda_ipc")
LENGTH = 96
TWO_RANKS = {
    "tp_size": 2,
    # SGLang has a rank for each NUMA node, unless it is told which cores they take.
    "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
}

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": partial(LlamaConfig, tie_word_embeddings=True),
    "moe": partial(
        Qwen3MoeConfig,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}


def new_model(family: str, seed: int) -> torch.nn.Module:
    tokenizer = make_tiny_tokenizer()
    if family == "qwen2":
        return make_tiny_model(tokenizer, seed=seed)
    config = CONFIGS[family](
        **_SIZES,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def start(family: str, folder: Path, **arguments) -> AsyncSGLang:
    new_model(family, 0).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return AsyncSGLang.from_pretrained(
        str(folder), device="cpu", weight_loader="traced", **arguments
    )


def log_probs(engine: AsyncSGLang) -> list[list[float]]:
    """Log-probs of prompts that every row of the embedding and every expert is in."""
    generator = torch.Generator().manual_seed(0)
    size = engine.capabilities.vocab_size
    prompts = [
        torch.randperm(size, generator=generator)[:LENGTH].tolist() for _ in range(3)
    ]
    key = str(time.monotonic_ns())
    (found,) = run_sync(engine.control.prompt_log_probs(prompts, cache_key=key))
    return found


def update(engine: AsyncSGLang, model, weight_loader: str, **options) -> None:
    scheme = SGLangWeightSyncScheme(engine, weight_loader=weight_loader, **options)
    scheme.create_sender().update_weights(model)
    scheme.shutdown()


def is_traced(engine: AsyncSGLang) -> bool:
    ((_, requests_done, failed, traced, *_),) = run_sync(
        engine.control.get_weights_by_name(QUESTION, 1)
    )
    assert requests_done > 0
    assert not failed
    return bool(traced)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        pytest.param("moe", {}, id="moe"),
        pytest.param("llama", {}, id="llama", marks=pytest.mark.slow),
        pytest.param("moe", TWO_RANKS, id="moe-ranks", marks=pytest.mark.slow),
        pytest.param("llama", TWO_RANKS, id="llama-ranks", marks=pytest.mark.slow),
        pytest.param(
            "moe",
            {"sglang_version": "0.5.20"},
            id="moe-no-sessions",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.timeout(300)
def test_traced_updates_equal_those_by_the_models_own_loader(
    family, arguments, tmp_path
):
    models = [new_model(family, seed) for seed in (1, 2)]
    with start(family, tmp_path, **arguments) as engine:
        expected = []
        for model in models:
            update(engine, model, "sglang")
            assert difference(engine, model) < TOLERANCE
            expected.append(log_probs(engine))
        assert expected[0] != expected[1]
        for transport in TRANSPORTS:
            # One bucket, and several.
            for bucket_bytes in (1 << 30, 20_000):
                options = {"transport": transport, "bucket_bytes": bucket_bytes}
                for model, found in zip(models, expected, strict=True):
                    update(engine, model, "traced", **options)
                    assert log_probs(engine) == found
        assert is_traced(engine)


@pytest.fixture(scope="module")
def traced_engine(tmp_path_factory):
    with start("qwen2", tmp_path_factory.mktemp("traced")) as engine:
        yield engine


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_servers_with_the_loader_use_it(traced_engine, transport):
    model = new_model("qwen2", 1)
    update(traced_engine, model, "sglang", transport=transport)
    expected = log_probs(traced_engine)
    for seed in (2, 1):
        model = new_model("qwen2", seed)
        update(traced_engine, model, "auto", transport=transport)
        assert difference(traced_engine, model) < TOLERANCE
    assert log_probs(traced_engine) == expected
    assert is_traced(traced_engine)


class Trainer:
    """A trainer that reaches the server through a proxy."""

    def __init__(self, engine, transport):
        self.server = engine
        self.proxy = FaultyProxy(engine.server_url)
        self.engine = AsyncSGLang.connect(self.proxy.url, max_attempts=1)
        self.scheme = SGLangWeightSyncScheme(
            self.engine,
            transport=transport,
            bucket_bytes=100_000,
            send_timeout=3.0,
            control_timeout=3.0,
        )
        self.sender = self.scheme.create_sender()

    def close(self):
        self.proxy.clear()
        self.scheme.shutdown()
        self.engine.shutdown()
        self.proxy.close()


@pytest.fixture(params=["cuda_ipc", pytest.param("broadcast", marks=pytest.mark.slow)])
def trainer(request, traced_engine):
    trainer = Trainer(traced_engine, request.param)
    yield trainer
    trainer.close()


FAULTS = [
    pytest.param(path, number, fault, marks=[] if fast else [pytest.mark.slow])
    for path, number, fault, fast in [
        (TENSOR, 1, "refuse", True),
        (TENSOR, 2, "refuse", False),
        (TENSOR, 1, "cut", False),
        (TENSOR, 2, "cut", True),
        (TENSOR, 1, "lose", False),
        (TENSOR, 2, "lose", False),
        (TENSOR, 2, "stall", False),
        (TENSOR, 1, "late", False),
        ("/get_weights_by_name", 1, "fail", True),
        ("/get_weights_by_name", 1, "lose", False),
        ("/get_weights_by_name", 1, "stall", False),
    ]
]


@pytest.mark.parametrize(("path", "number", "fault"), FAULTS)
def test_a_fault_leaves_no_mix_behind(trainer, path, number, fault):
    old, new = new_model("qwen2", 3), new_model("qwen2", 4)
    trainer.sender.update_weights(old)
    # A question that came back without an answer is asked once more.
    times = 2 if path == "/get_weights_by_name" else 1
    injected = trainer.proxy.inject(path, fault, first=number, times=times)
    # All that a broadcast sends is one request, but where it is made bit by bit.
    given = new if number == 1 else partial(iter, list(new.named_parameters()))
    with pytest.raises(WeightSyncError) as caught:
        trainer.sender.update_weights(given)
    assert injected.happened.is_set()
    trainer.proxy.clear()
    if getattr(caught.value, "untouched", False):
        assert (number, fault) == (1, "refuse")
        assert difference(trainer.engine, old) < TOLERANCE
    else:
        with pytest.raises(WeightSyncStateError, match="send the weights again"):
            trainer.engine.generate(input_ids=PROMPT)
    trainer.sender.update_weights(new)
    assert difference(trainer.engine, new) < TOLERANCE
    assert is_traced(trainer.engine)


@pytest.mark.parametrize("trainer", ["cuda_ipc"], indirect=True)
def test_an_answer_that_is_lost_is_asked_for_again(trainer):
    injected = trainer.proxy.inject("/get_weights_by_name", "lose")
    model = new_model("qwen2", 5)
    trainer.sender.update_weights(model)
    assert injected.happened.is_set()
    assert difference(trainer.engine, model) < TOLERANCE


@pytest.mark.parametrize("trainer", ["broadcast"], indirect=True)
def test_buckets_that_are_ready_are_one_request(trainer, monkeypatch):
    orders = []
    receive = TracedLoader.receive
    monkeypatch.setattr(
        TracedLoader,
        "receive",
        lambda self, buckets, *rest: (
            orders.append(len(buckets)) or receive(self, buckets, *rest)
        ),
    )
    model = new_model("qwen2", 5)
    report = trainer.sender.update_weights(model)
    assert orders == [report.num_buckets]
    assert report.num_buckets > 1
    orders.clear()
    pairs = list(new_model("qwen2", 6).named_parameters())
    report = trainer.sender.update_weights(partial(iter, pairs))
    assert orders == [1] * report.num_buckets


@pytest.mark.parametrize("trainer", ["broadcast"], indirect=True)
def test_a_trainer_that_fails_between_buckets_is_given_up(trainer, monkeypatch):
    """The servers wait for the next one in a collective."""
    model = new_model("qwen2", 5)
    trainer.sender.update_weights(model)
    transport = trainer.sender.transport
    make, made = transport._make_flight, []

    def make_some(*given):
        if made:
            raise torch.OutOfMemoryError("there is no memory")
        made.append(make(*given))
        return made[0]

    monkeypatch.setattr(transport, "_make_flight", make_some)
    with pytest.raises(WeightSyncError, match="there is no memory") as caught:
        trainer.sender.update_weights(model)
    assert not caught.value.untouched
    monkeypatch.undo()
    trainer.sender.update_weights(model)
    assert difference(trainer.engine, model) < TOLERANCE


def test_a_loader_that_fails_is_an_error_and_the_server_lives(traced_engine):
    """An exception in the loader would end the server."""
    model = new_model("qwen2", 5)
    update(traced_engine, model, "traced")
    scheme = SGLangWeightSyncScheme(traced_engine, transport="cuda_ipc")
    sender = scheme.create_sender()
    sender.update_weights(model)
    loader = sender.transport._loader
    order = loader.order
    # As if another version of this package had started the server.
    loader.order = lambda action, *given, **fields: order("unknown", *given, **fields)
    with pytest.raises(WeightSyncError, match="did not load the weights: KeyError"):
        sender.update_weights(new_model("qwen2", 6))
    loader.order = order
    with pytest.raises(WeightSyncStateError):
        traced_engine.generate(input_ids=PROMPT)
    sender.update_weights(model)
    assert difference(traced_engine, model) < TOLERANCE
    scheme.shutdown()


MODEL_THAT_COMPUTES = """
from sglang.srt.models.qwen2 import Qwen2ForCausalLM as Served


class Qwen2ForCausalLM(Served):
    def load_weights(self, weights):
        return super().load_weights((name, 1.0 * each) for name, each in weights)


EntryClass = Qwen2ForCausalLM
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_cannot_be_traced_is_loaded_by_its_own_loader(tmp_path, caplog):
    package = tmp_path / "own_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "computes.py").write_text(MODEL_THAT_COMPUTES)
    environment = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": package.name,
        "PYTHONPATH": str(tmp_path),
    }
    with start("qwen2", tmp_path / "model", environment=environment) as engine:
        for transport in TRANSPORTS:
            for seed in (1, 2):
                model = new_model("qwen2", seed)
                update(engine, model, "auto", transport=transport)
                assert difference(engine, model) < TOLERANCE
        assert not is_traced(engine)
    said = [each for each in caplog.messages if "the model's own loader" in each]
    assert len(said) == 1
    assert "aten.mul" in said[0]


def test_impossible_traced_updates_are_refused(engine, tmp_path):
    assert not engine.capabilities.has_traced_loader
    scheme = SGLangWeightSyncScheme(engine, weight_loader="traced")
    with pytest.raises(UnsupportedByServerError, match="not started with weight_load"):
        scheme.create_sender().update_weights(new_model("qwen2", 1))
    with pytest.raises(ConfigurationError, match="'fast' is not one of 'auto', 'sgl"):
        SGLangWeightSyncScheme(engine, weight_loader="fast")
    with pytest.raises(ConfigurationError, match="transport='disk' does not use it"):
        SGLangWeightSyncScheme(
            engine, weight_loader="traced", transport="disk", directory=tmp_path
        )
    with pytest.raises(ConfigurationError, match="'fast' is not one of 'sglang'"):
        AsyncSGLang.from_pretrained("owner/model", weight_loader="fast")


def test_other_loaders_of_the_user_stay(traced_engine):
    from torchrl_sglang.backends.launch.loaders import loader_arguments

    given = {"custom_weight_loader": ["mine.load"]}
    assert loader_arguments("traced", given) == {
        "custom_weight_loader": ["mine.load", TRACED_LOADER]
    }
    assert loader_arguments("sglang", given) == {}
    reported = requests.get(f"{traced_engine.server_url}/server_info", timeout=10)
    assert reported.json()["custom_weight_loader"] == [TRACED_LOADER]
