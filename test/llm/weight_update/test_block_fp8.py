"""Weights in FP8 with a scale for each block; transformers is the oracle."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.fake_server import FakeServer
from transformers import FineGrainedFP8Config, Qwen2Config, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.client.capabilities import check_weight_route
from torchrl_sglang.backends.client.quantization import find_quantization
from torchrl_sglang.backends.launch.block_fp8 import (
    QUANTIZATION,
    block_fp8_arguments,
    rollout_arguments,
)
from torchrl_sglang.errors import ConfigurationError, UnsupportedByServerError
from torchrl_sglang.types import BLOCK_FP8, ServerArgs
from torchrl_sglang.weight_update.encodings.block_fp8 import BlockFP8, decode
from torchrl_sglang.weight_update.encodings.registry import encoding_for, find_encoding
from torchrl_sglang.weight_update.weights import TensorSpec

FP8 = BlockFP8()


def spec_of(name, tensor):
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape)


def encode(tensor, name="model.layers.0.mlp.up_proj.weight"):
    return list(FP8.encode(spec_of(name, tensor), tensor))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (4224, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_scales_are_those_of_transformers(shape, dtype):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    # Blocks of their own sizes, one of zeros and one with a value far above the others.
    weight *= torch.linspace(0.01, 3, shape[1]).to(dtype)
    weight[:128, :128] = 0
    weight[-1, -1] = 900.0
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    oracle = Fp8Quantize(SimpleNamespace(quantization_config=config))
    expected = oracle.convert({"up_proj.weight": weight})
    values, scales = encode(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(
        values.view(torch.uint8), expected["up_proj.weight"].view(torch.uint8)
    )
    assert torch.equal(scales, expected["up_proj.weight_scale_inv"])


@pytest.mark.parametrize("shape", [(896, 4864), (200, 300), (1, 1), (130, 128)])
def test_sides_that_are_no_multiples(shape):
    weight = torch.randn(shape)
    name = "model.layers.3.self_attn.q_proj.weight"
    planned = FP8.plan(spec_of(name, weight))
    values, scales = encode(weight, name)
    assert [part.name for part in planned] == [name, f"{name}_scale_inv"]
    assert [(p.dtype, p.shape) for p in planned] == [
        (values.dtype, values.shape),
        (scales.dtype, scales.shape),
    ]
    # Half a step of three bits, of the greatest value of a block.
    assert (decode(values, scales) - weight).abs().max() <= weight.abs().max() / 28
    assert weight.equal(weight.clone())


@pytest.mark.parametrize(
    ("name", "shape", "encoded"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (128, 128), True),
        ("model.layers.0.mlp.down_proj.weight", (128, 128), True),
        ("model.layers.0.mlp.experts.7.gate_proj.weight", (128, 128), True),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", (128, 128), True),
        ("model.layers.0.block_sparse_moe.experts.7.w1.weight", (128, 128), True),
        ("model.layers.0.self_attn.q_proj.bias", (128,), False),
        ("model.layers.0.self_attn.q_norm.weight", (128,), False),
        ("model.layers.0.mlp.gate.weight", (8, 128), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 128), False),
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 128), False),
        ("model.embed_tokens.weight", (128, 128), False),
        ("lm_head.weight", (128, 128), False),
    ],
)
def test_what_is_encoded(name, shape, encoded):
    spec = TensorSpec(name=name, dtype=torch.bfloat16, shape=torch.Size(shape))
    assert (FP8.plan(spec) != (spec,)) is encoded


def test_the_servers_decide():
    assert find_encoding("auto") == "auto"
    assert encoding_for("auto", None).name == "identity"
    assert encoding_for("auto", "awq").name == "identity"
    assert encoding_for("auto", BLOCK_FP8).name == "fp8"
    assert encoding_for(find_encoding("identity"), BLOCK_FP8).name == "identity"


@pytest.mark.parametrize(
    ("checkpoint", "quantization", "overrides", "expected"),
    [
        ({}, None, {}, None),
        ({}, "fp8", {}, "fp8"),
        ({}, "fp8", {"quantization_config": dict(QUANTIZATION)}, BLOCK_FP8),
        (dict(QUANTIZATION), None, {}, BLOCK_FP8),
        (dict(QUANTIZATION), "fp8", {}, BLOCK_FP8),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, None, {}, "fp8"),
        ({"quant_method": "awq"}, None, {}, "awq"),
        ({"quant_method": "awq"}, "awq_marlin", {}, "awq_marlin"),
    ],
)
def test_what_servers_hold(checkpoint, quantization, overrides, expected):
    args = ServerArgs(
        quantization=quantization, json_model_override_args=json.dumps(overrides)
    )
    assert find_quantization(checkpoint, args) == expected


def qwen(**sizes):
    return Qwen2Config(
        **{
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            **sizes,
        }
    )


def test_arguments_of_servers():
    given = {"json_model_override_args": '{"rope_theta": 5.0}', "tp_size": 1}
    found = block_fp8_arguments(qwen(), given, None)
    assert found["quantization"] == "fp8"
    assert found["load_format"] == "dummy"
    assert json.loads(found["json_model_override_args"]) == {
        "rope_theta": 5.0,
        "quantization_config": dict(QUANTIZATION),
    }
    moe = Qwen3MoeConfig(moe_intermediate_size=768, head_dim=128)
    assert block_fp8_arguments(moe, {"tp_size": 2}, "cuda")


@pytest.mark.parametrize(
    ("config", "given", "device", "words"),
    [
        (qwen(), {}, "cpu", "no FP8 kernels"),
        (qwen(), {"quantization": "awq"}, None, "quantization='awq' does not go"),
        (qwen(), {"load_format": "auto"}, None, "load_format='auto' does not go"),
        (qwen(model_type="gpt2"), {}, None, "knows the layers of llama"),
        (
            qwen(quantization_config={"quant_method": "awq"}),
            {},
            None,
            "quantised already",
        ),
        # 14 heads of 64 on two ranks are 3.5 blocks each.
        (qwen(), {"tp_size": 2}, None, "query heads is 896 / 2, .*give tp_size=1"),
        (qwen(intermediate_size=4900), {}, None, "size is 4900, .*leave rollout_dtype"),
    ],
)
def test_unsupported_servers_and_models_are_refused(config, given, device, words):
    if config.model_type == "gpt2":
        config = SimpleNamespace(
            get_text_config=lambda: config, model_type="gpt2", quantization_config=None
        )
    with pytest.raises(ConfigurationError, match=words):
        block_fp8_arguments(config, given, device)


def test_another_type(tiny_model_path):
    with pytest.raises(ConfigurationError, match="'int4' is not 'fp8'"):
        rollout_arguments("int4", str(tiny_model_path), {}, None)
    with pytest.raises(ConfigurationError, match="no FP8 kernels"):
        AsyncSGLang.from_pretrained(tiny_model_path, device="cpu", rollout_dtype="fp8")


@pytest.fixture
def fp8_engine(tiny_model_path):
    overrides = json.dumps({"quantization_config": dict(QUANTIZATION)})
    said = {"quantization": "fp8", "json_model_override_args": overrides}
    with (
        FakeServer(tiny_model_path, server_args=said) as server,
        AsyncSGLang.connect(server.url) as engine,
    ):
        yield engine


def test_weights_as_they_are_are_refused(fp8_engine, hf_model):
    assert fp8_engine.capabilities.quantized == BLOCK_FP8
    scheme = SGLangWeightSyncScheme(fp8_engine, encoding="identity")
    with pytest.raises(UnsupportedByServerError, match="hold quantised weights"):
        scheme.create_sender().update_weights(hf_model)


def test_files_are_refused(fp8_engine):
    capabilities = fp8_engine.capabilities
    check_weight_route(capabilities, "tensor", quantized=BLOCK_FP8)
    check_weight_route(capabilities, "distributed", quantized=BLOCK_FP8)
    with pytest.raises(UnsupportedByServerError, match="loads them from files"):
        check_weight_route(capabilities, "disk", quantized=BLOCK_FP8)
    check_weight_route(replace(capabilities, quantized=None), "disk")
