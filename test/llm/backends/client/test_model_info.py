from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from torchrl_sglang.backends.client.model_info import (
    fused_from_config,
    load_model_config,
    metadata_from_config,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.testing.tiny_model import save_tiny_model


def checkpoint(folder) -> dict:
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_checkpoint_holds(tmp_path, tied, dtype):
    save_tiny_model(tmp_path, num_layers=1, tie_word_embeddings=tied, dtype=dtype)
    found = metadata_from_config(load_model_config(str(tmp_path)), None)
    assert found == checkpoint(tmp_path)
    assert ("lm_head.weight" in found) == (not tied)


def test_the_served_type_counts(tiny_model_path):
    found = metadata_from_config(load_model_config(tiny_model_path), torch.float16)
    assert {dtype for dtype, _ in found.values()} == {torch.float16}


@pytest.mark.slow
def test_a_model_that_is_no_language_model():
    from transformers import ViTConfig

    with pytest.raises(ConfigurationError, match="ViTConfig.*cannot be listed"):
        metadata_from_config(ViTConfig(), None)


SHAPES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}

MIXTURES = {
    "Mixtral": lambda: MixtralConfig(**SHAPES, num_local_experts=3),
    "Qwen3": lambda: Qwen3MoeConfig(
        **SHAPES, head_dim=16, num_experts=3, moe_intermediate_size=16
    ),
    "DeepSeek": lambda: DeepseekV3Config(
        **SHAPES,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "GPT-OSS": lambda: GptOssConfig(
        **SHAPES, head_dim=16, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_are_listed_as_a_checkpoint_holds_them(tmp_path, kind):
    config = MIXTURES[kind]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}
    found = metadata_from_config(config, None)
    assert found == {name: (value.dtype, value.shape) for name, value in saved.items()}
    # And how to get there from what the module holds, without a copy.
    held = model.state_dict()
    fused = fused_from_config(config)
    assert bool(fused) == (kind != "GPT-OSS")
    for name, parameter in fused.items():
        assert held[name].shape == parameter.shape
        for part in parameter.parts:
            view = held[name].as_strided(part.shape, part.stride, part.offset)
            assert torch.equal(view, saved[part.name])
    taken = {part.name for each in fused.values() for part in each.parts}
    assert taken | (held.keys() - fused.keys()) == saved.keys()


def test_buffers_keep_their_type():
    found = metadata_from_config(MIXTURES["DeepSeek"](), torch.bfloat16)
    assert {name for name, (dtype, _) in found.items() if dtype != torch.bfloat16} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
