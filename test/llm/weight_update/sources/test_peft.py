"""Adapters are merged as PEFT merges them, without a second model."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from helpers.weights import open_weights
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torchrl.modules.llm import TransformersWrapper
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchrl_sglang import SGLangWeightSyncScheme, get_model_metadata
from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.weights import read_buckets

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

CONFIGURATIONS = {
    "LoRA": peft.LoraConfig(r=4, target_modules=ATTENTION),
    "LoRA of everything": peft.LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", use_rslora=True
    ),
    "LoRA with biases": peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True),
    "LoRA of embeddings": peft.LoraConfig(
        r=4, target_modules=["embed_tokens", "lm_head", "q_proj"]
    ),
    "DoRA": peft.LoraConfig(
        r=4, target_modules=["embed_tokens", "q_proj", "up_proj"], use_dora=True
    ),
    "saved modules": peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]
    ),
    "trained tokens": peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5]
    ),
    "LoHa": peft.LoHaConfig(r=4, target_modules=ATTENTION),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "OFT": peft.OFTConfig(oft_block_size=16, target_modules=["q_proj"]),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
}


def adapt(model, configuration):
    """A model whose adapters all have random values, which change it."""
    adapted = peft.get_peft_model(model, copy.deepcopy(configuration))
    return randomise(adapted)


def randomise(adapted):
    torch.manual_seed(0)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    return adapted.eval()


@pytest.fixture
def served(hf_model):
    return get_model_metadata(hf_model)


def merge(adapted) -> dict[str, torch.Tensor]:
    return copy.deepcopy(adapted).merge_and_unload().state_dict()


def check(weights, expected, served) -> None:
    found = dict(open_weights(weights, served).read())
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_it_is_what_peft_merges(hf_model, served, kind):
    base = copy.deepcopy(hf_model.state_dict())
    adapted = adapt(hf_model, CONFIGURATIONS[kind])
    before = copy.deepcopy(adapted.state_dict())
    merged = merge(adapted)
    assert any(not torch.equal(merged[name], base[name]) for name in base)
    for _ in range(2):
        check(adapted, merged, served)
    # Nothing of the model that is trained has changed.
    for name, value in adapted.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(getattr(part, "merged", False) for part in adapted.modules())


def test_wrappers_around_it(hf_model, served, tokenizer):
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA"])
    merged = merge(adapted)
    shell = nn.Module()
    shell.module = adapted
    check(shell, merged, served)
    wrapper = TransformersWrapper(adapted, tokenizer=tokenizer, generate=False)
    check(wrapper, merged, served)


def test_adapters_that_transformers_has_added(hf_model, served):
    # As add_adapter() does, which from transformers 5.24 on refuses PEFT before 0.22.
    peft.inject_adapter_in_model(copy.deepcopy(CONFIGURATIONS["LoRA"]), hf_model)
    randomise(hf_model)
    other = make_tiny_model_like(hf_model)
    merged = merge(load_adapters(other, hf_model))
    check(hf_model, merged, served)


def make_tiny_model_like(model):
    return type(model)(model.config).eval()


def load_adapters(other, model):
    """The same weights and adapters in a model of PEFT, which can merge."""
    adapted = peft.get_peft_model(other, copy.deepcopy(CONFIGURATIONS["LoRA"]))
    state = {f"base_model.model.{name}": v for name, v in model.state_dict().items()}
    adapted.load_state_dict(state)
    return adapted.eval()


def test_half_precision(hf_model, served):
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA"]).bfloat16()
    merged = merge(adapted)
    assert merged["lm_head.weight"].dtype == torch.bfloat16
    check(adapted, merged, served)
    # What gets smaller is cast before it travels.
    adapted = adapted.float()
    halved = {name: (torch.float16, shape) for name, (_, shape) in served.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    found = dict(open_weights(adapted, halved).read())
    assert torch.equal(found[name], merge(adapted)[name].half())


def test_active_adapters_are_sent(hf_model, served):
    base = copy.deepcopy(hf_model.state_dict())
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA"])
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up_proj"]))
    adapted.set_adapter("other")
    randomise(adapted)
    other = merge(adapted)
    check(adapted, other, served)
    adapted.set_adapter("default")
    first = merge(adapted)
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"],
        other["model.layers.0.mlp.up_proj.weight"],
    )
    check(adapted, first, served)
    adapted.base_model.set_adapter(["default", "other"])
    check(adapted, merge(adapted), served)
    with adapted.disable_adapter():
        check(adapted, base, served)


@pytest.mark.parametrize("disabled", [False, True])
def test_what_is_merged_already(hf_model, served, disabled):
    base = copy.deepcopy(hf_model.state_dict())
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA"])
    merged = merge(adapted)
    adapted.merge_adapter()
    if not disabled:
        check(adapted, merged, served)
        return
    with adapted.disable_adapter():
        found = dict(open_weights(adapted, served).read())
    for name, value in base.items():
        torch.testing.assert_close(found[name], value)


def test_tied_embeddings_that_are_trained_apart(tokenizer):
    """A served model with one tensor for both cannot have two."""
    tied = make_tiny_model(tokenizer, tie_word_embeddings=True)
    served = get_model_metadata(tied)
    adapted = adapt(copy.deepcopy(tied), CONFIGURATIONS["LoRA"])
    check(adapted, {name: merge(adapted)[name] for name in served}, served)
    apart = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.warns(UserWarning, match="tie"):
        adapted = adapt(tied, apart)
    with pytest.raises(WeightMismatchError, match="tied to its input embeddings"):
        open_weights(adapted, served)


def test_experts_with_adapters():
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    served = get_model_metadata(model)
    adapted = adapt(
        model,
        peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    check(adapted, merge(adapted), served)


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "PROMPT_TUNING is no change of weights",
        ),
        (
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                target_modules=["q_proj"],
                alora_invocation_tokens=[1],
            ),
            "PEFT cannot merge the adapters of layer .*q_proj",
        ),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    hf_model, served, configuration, words
):
    adapted = adapt(hf_model, configuration)
    with pytest.raises(ConfigurationError, match=words):
        open_weights(adapted, served)


def test_tensors_alone_cannot_be_merged(hf_model, served):
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA"])
    with pytest.raises(WeightMismatchError, match="give the model itself"):
        open_weights(adapted.state_dict(), served)


def test_one_bucket_of_merged_tensors_is_alive(hf_model, served):
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA of everything"])
    held = {value.untyped_storage().data_ptr() for value in adapted.parameters()}
    weights = open_weights(adapted, served)
    assert not weights.stable
    alive: dict[StorageWeakRef, int] = {}
    peaks = []

    def read():
        for name, value in weights.read():
            storage = value.untyped_storage()
            if storage.data_ptr() not in held:
                alive[StorageWeakRef(storage)] = storage.nbytes()
            del storage
            for gone in [each for each in alive if each.expired()]:
                del alive[gone]
            peaks.append(sum(alive.values()))
            yield name, value
            del value

    bucket = 70_000
    count = 0
    for _, tensors in read_buckets(dataclasses.replace(weights, read=read), bucket):
        count += 1
        del tensors
    assert count > 5
    assert 0 < max(peaks) <= bucket


def test_merged_weights_reach_the_engine(restored_engine, hf_model, tokenizer):
    adapted = adapt(hf_model, CONFIGURATIONS["LoRA of everything"])
    scheme = SGLangWeightSyncScheme(restored_engine, bucket_bytes=70_000)
    sender = scheme.create_sender()
    sender.register_model(adapted)
    sender.init_all_workers_group(get_model_metadata(adapted))
    sender.update_weights()
    ids = tokenizer.encode("some prompt")
    (answer,) = restored_engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 8, "ignore_eos": True},
        return_logprobs=True,
    )
    full = torch.tensor(ids + answer.token_ids)
    with torch.no_grad(), adapted.disable_adapter():
        without = log_probs(adapted, full, len(ids))
    with torch.no_grad():
        expected = log_probs(adapted, full, len(ids))
    found = torch.tensor(answer.log_probs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (found - without).abs().max() > 0.01
    scheme.shutdown()
    adapted.unload()


def log_probs(model, full, start):
    logits = model(full[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, full[1:, None])[start - 1 :, 0]
