"""Mixtures of experts: modules hold all experts in one tensor, loaders take each."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from helpers.log_probs import difference
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, get_model_metadata
from torchrl_sglang.errors import WeightMismatchError

FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def make_model(tokenizer, seed):
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def experts_engine(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    make_model(tokenizer, 0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with AsyncSGLang.from_pretrained(str(path), device="cpu") as engine:
        yield engine


@pytest.fixture
def compare(experts_engine):
    """Greatest difference of the engine's log-probs from a model's."""
    return partial(difference, experts_engine)


def test_experts_reach_the_engine(experts_engine, tokenizer, compare):
    scheme = SGLangWeightSyncScheme(experts_engine)
    sender = scheme.create_sender()
    model = make_model(tokenizer, 1)
    assert FUSED in get_model_metadata(model)
    assert compare(model) > 0.1
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model))
    report = sender.update_weights()
    assert report.num_bytes == 4 * sum(value.numel() for value in model.parameters())
    assert compare(model) < 1e-4
    # Only experts change now: nothing else hides that they have not.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(-1)
            layer.mlp.experts.down_proj.add_(0.1)
    assert compare(model) > 0.1
    sender.update_weights(model.state_dict())
    assert compare(model) < 1e-4
    scheme.shutdown()


def test_a_checkpoint_reaches_the_engine(experts_engine, tokenizer, compare, tmp_path):
    """What is exported under a checkpoint's own names is sent as it is."""
    from safetensors.torch import load_file

    model = make_model(tokenizer, 2)
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    assert checkpoint.keys() == experts_engine.get_model_metadata().keys()
    scheme = SGLangWeightSyncScheme(experts_engine)
    scheme.create_sender().update_weights(checkpoint)
    assert compare(model) < 1e-4
    scheme.shutdown()


def test_adapters_of_experts_reach_the_engine(experts_engine, tokenizer, compare):
    import peft

    model = make_model(tokenizer, 3)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    scheme = SGLangWeightSyncScheme(experts_engine)
    scheme.create_sender().update_weights(adapted)
    assert compare(copy.deepcopy(adapted).merge_and_unload()) < 1e-4
    scheme.shutdown()


def test_experts_of_another_number_are_refused(experts_engine, tokenizer):
    weights = make_model(tokenizer, 1).state_dict()
    weights[FUSED] = weights[FUSED][:3]
    sender = SGLangWeightSyncScheme(experts_engine).create_sender()
    with pytest.raises(WeightMismatchError, match=r"gate_up_proj: \(3, 64, 64\), serv"):
        sender.update_weights(weights)
