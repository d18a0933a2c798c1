from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from torchrl_sglang.backends.capabilities import load_model_config
from torchrl_sglang.backends.metadata import metadata_from_config
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


def test_a_model_that_is_no_language_model():
    from transformers import ViTConfig

    with pytest.raises(ConfigurationError, match="ViTConfig.*cannot be listed"):
        metadata_from_config(ViTConfig(), None)
