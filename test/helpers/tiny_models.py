"""Tiny models of kinds that users serve and the package's own tiny model is none of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

IMAGE_TOKENS = (
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
"""Tokens of a vision model; an image in a prompt is the first three of them."""

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def save_tiny_moe(path: Path, *, num_layers: int = 2, num_experts: int = 8) -> Path:
    """Writes a mixture of experts, of which each token uses two in each layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tiny_tokenizer()
    config = Qwen3MoeConfig(
        **_SIZES,
        **_tokens(tokenizer),
        vocab_size=len(tokenizer),
        num_hidden_layers=num_layers,
        moe_intermediate_size=32,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return _save(path, Qwen3MoeForCausalLM, config, tokenizer)


def save_tiny_vision_model(path: Path) -> Path:
    """Writes a Qwen2.5-VL, which takes 14 by 14 pixels as a patch and four as one."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={
            **_SIZES,
            **_tokens(tokenizer),
            "model_type": "qwen2_5_vl_text",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            "rope_parameters": rope,
            "rope_scaling": {"type": "mrope", **rope},
            "use_sliding_window": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "in_channels": 3,
            "initializer_range": 0.3,
        },
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        tie_word_embeddings=False,
    )
    _save(path, Qwen2_5_VLForConditionalGeneration, config, tokenizer)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 16 * 28 * 28,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


def _tokens(tokenizer: Any) -> dict[str, Any]:
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save(path: Path, kind: Any, config: Any, tokenizer: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
