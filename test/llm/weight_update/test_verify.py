"""``verify=True`` finds servers that hold other weights than those that were sent."""

from __future__ import annotations

import pytest
import requests
import torch
from helpers.weights import open_weights
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends import session
from torchrl_sglang.errors import (
    UnsupportedByServerError,
    WeightMismatchError,
    WeightSyncStateError,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from torchrl_sglang.weight_update.encodings.block_fp8 import BlockFP8
from torchrl_sglang.weight_update.sources.base import unwrap
from torchrl_sglang.weight_update.transports.broadcast import BroadcastTransport
from torchrl_sglang.weight_update.verify import (
    allowed_difference,
    choose_names,
    comparable,
    watch,
    whole_model,
)
from torchrl_sglang.weight_update.weights import TensorSpec


def make_llama(seed: int) -> nn.Module:
    """A model of the family that servers tell the values of."""
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "model"
    make_llama(0).save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return str(path)


ENGINES = {
    "sessions": {},
    "no sessions": {"sglang_version": "0.5.20"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if arguments else [])
        for name, arguments in ENGINES.items()
    ],
)
def llama_engine(request, llama_path):
    with AsyncSGLang.from_pretrained(
        llama_path, device="cpu", **ENGINES[request.param]
    ) as engine:
        yield engine


@pytest.fixture
def sender(llama_engine):
    scheme = SGLangWeightSyncScheme(llama_engine, verify=True)
    yield scheme.create_sender()
    scheme.shutdown()


def test_of_fp8_only_what_is_sent_as_it_is_can_be_compared():
    model = make_llama(0)
    specs = [
        part
        for name, value in model.named_parameters()
        for part in BlockFP8().plan(
            TensorSpec(name=name, dtype=value.dtype, shape=value.shape)
        )
    ]
    names = comparable(specs)
    left = {name for name, _ in model.named_parameters()} - set(names)
    assert left
    assert {name.split(".")[-2] for name in left} == {
        f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert set(choose_names(names)) >= {"model.norm.weight", "lm_head.weight"}
    assert not any(name.endswith("_scale_inv") for name in names)


def can_generate(engine) -> bool:
    (answer,) = engine.generate(
        input_ids=[5, 6], sampling_params={"max_new_tokens": 2, "ignore_eos": True}
    )
    return len(answer.token_ids) == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(sender, llama_engine, value):
    """Servers tell them as null: the error names them, and the next update mends it."""
    words = {
        torch.nan: r"have NaN: model\.layers\.1\.mlp\.up_proj\.weight is the first",
        torch.inf: "log-probs of http.* are no numbers",
    }[value]
    model = make_llama(1)
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = value
    given = [model, model.state_dict()] if value is torch.nan else [model]
    for weights in given:
        with pytest.raises(WeightMismatchError, match=words):
            sender.update_weights(weights)
        with pytest.raises(
            WeightSyncStateError, match=r"[a-z]\. Generation stays paused"
        ):
            can_generate(llama_engine)
    sender.update_weights(make_llama(1))
    assert can_generate(llama_engine)


def test_right_weights_pass(sender, llama_engine):
    model = make_llama(1)
    for weights in (model, model.state_dict(), list(model.named_parameters())):
        report = sender.update_weights(weights)
        assert report.phase_seconds["verify"] > 0
        assert can_generate(llama_engine)
    # The trainer's model is as it was, in training and on its way.
    model.train()
    model.lm_head.eval()
    sender.update_weights(model)
    assert model.training
    assert model.model.training
    assert not model.lm_head.training


def test_values_that_are_cast_pass(sender):
    """A master copy in float32 is served in half precision, and the other way."""
    model = make_llama(2)
    sender.update_weights(model.bfloat16())
    sender.update_weights({n: p.double() for n, p in model.named_parameters()})


def test_only_what_is_asked_for(sender):
    report = sender.update_weights(make_llama(3), verify=False)
    assert "verify" not in report.phase_seconds


def update_and_interfere(engine, weights, interfere):
    """An update, after which somebody does something before it is verified."""
    version = str(int("0" + engine.weight_version.strip("default")) + 1)
    opened = open_weights(weights, engine.get_model_metadata())
    assert opened.memory is not None
    opened, check = watch(engine, opened, unwrap(weights), version=version)
    # Servers that have it open would be sent nothing to compare with.
    assert opened.memory is None

    def verify():
        interfere()
        check()

    transport = BroadcastTransport(engine, device=torch.device("cpu"))
    try:
        session.update_weights(
            engine,
            transport,
            opened,
            version=version,
            pause_mode="retract",
            verify=verify,
        )
    finally:
        transport.close()


def test_a_server_with_other_values_is_found(llama_engine, sender, llama_path):
    """Another trainer has this server load its own checkpoint, after the update."""

    def load_others():
        reply = requests.post(
            f"{llama_engine.server_url}/update_weights_from_disk",
            json={"model_path": llama_path, "flush_cache": False},
            timeout=60,
        )
        assert reply.ok

    # They differ in one element, which few prompts would show.
    model = make_llama(0)
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] += 0.1
    with pytest.raises(WeightMismatchError, match="embed_tokens") as caught:
        update_and_interfere(llama_engine, model, load_others)
    assert llama_engine.server_url in str(caught.value)
    value = model.model.embed_tokens.weight.detach()[0, 1]
    served = value.to(llama_engine.capabilities.dtype or value.dtype)
    assert str(round(float(served), 6)) in str(caught.value)
    # It generates no more, and the next update heals it.
    with pytest.raises(WeightSyncStateError, match="inconsistent"):
        can_generate(llama_engine)
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{llama_engine.server_url}/generate",
            json={"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
            timeout=1,
        )
    sender.update_weights(model)
    assert can_generate(llama_engine)


class Drifting(nn.Module):
    """A model whose weights are other ones as soon as it has been called."""

    def __init__(self, model, other):
        super().__init__()
        self.model = model
        self._other = other.state_dict()

    def forward(self, input_ids):
        answer = self.model(input_ids=input_ids)
        self.model.load_state_dict(self._other)
        return answer


def test_a_model_that_is_not_what_was_sent_is_found(
    restored_engine, tokenizer, hf_model
):
    """Here the server tells no values, and log-probs tell."""
    scheme = SGLangWeightSyncScheme(restored_engine, verify=True)
    sender = scheme.create_sender()
    model = make_tiny_model(tokenizer, seed=21)
    sender.update_weights(model)
    drifting = Drifting(model, make_tiny_model(tokenizer, seed=22))
    with pytest.raises(WeightMismatchError, match="log-probs differ") as caught:
        sender.update_weights(drifting)
    assert restored_engine.server_url in str(caught.value)
    assert "inconsistent" in repr(restored_engine)
    sender.update_weights(hf_model)
    assert can_generate(restored_engine)
    scheme.shutdown()


@pytest.mark.slow
def test_every_server_is_asked(tiny_model_path, tokenizer):
    """The router may choose the one that is right."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        num_replicas=2,
        router_policy=None,
        parallel_start=False,
    ) as engine:
        for url in engine.control.urls:

            def load_others(url=url):
                reply = requests.post(
                    f"{url}/update_weights_from_disk",
                    json={"model_path": tiny_model_path, "flush_cache": False},
                    timeout=60,
                )
                assert reply.ok

            model = make_tiny_model(tokenizer, seed=23)
            with pytest.raises(WeightMismatchError, match=url):
                update_and_interfere(engine, model, load_others)


def test_nothing_to_compare_is_said_before_anything_is_sent(restored_engine, hf_model):
    scheme = SGLangWeightSyncScheme(restored_engine, verify=True)
    sender = scheme.create_sender()
    before = scheme.create_receiver().weight_versions()
    with pytest.raises(
        UnsupportedByServerError, match="nothing to compare.*OrderedDict"
    ):
        sender.update_weights(hf_model.state_dict())
    hf_model.forward = lambda input_ids: 1 / 0
    with pytest.raises(WeightSyncStateError, match="ZeroDivisionError"):
        sender.update_weights(hf_model)
    assert scheme.create_receiver().weight_versions() == before
    assert can_generate(restored_engine)
    scheme.shutdown()


def test_parameters_of_every_kind_and_depth():
    layers = [
        f"model.layers.{i}.{part}.weight"
        for i in range(10)
        for part in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "mlp.gate_proj",
            "mlp.down_proj",
        )
    ]
    names = [
        "model.embed_tokens.weight",
        *layers,
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert choose_names(names) == [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.5.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert choose_names(["a", "b"]) == ["a", "b"]
    assert len(choose_names([f"h.{i}.fc" for i in range(100)])) <= 7


def test_what_may_differ():
    spread = torch.tensor([-3.0, -1.0, -5.0, -3.0])
    assert allowed_difference(torch.float32, spread) == 1e-3
    half = [allowed_difference(d, spread) for d in (torch.float16, torch.bfloat16)]
    assert 1e-3 < half[0] < half[1] < 0.5 * float(spread.std())
    assert allowed_difference(torch.bfloat16, torch.zeros(4)) == 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_can_be_called(hf_model):
    assert whole_model(unwrap(hf_model)) is hf_model
    assert whole_model(unwrap(torch.compile(hf_model))) is hf_model
    assert whole_model(unwrap(nn.Linear(2, 2))) is None
    assert whole_model(unwrap(hf_model.state_dict())) is None
    assert whole_model(unwrap(iter([]))) is None
    assert whole_model(unwrap(hf_model.to("meta"))) is None
