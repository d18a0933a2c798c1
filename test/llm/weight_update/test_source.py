from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import get_model_metadata
from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.source import named_tensors, to_served_names


@pytest.fixture
def served(hf_model):
    return get_model_metadata(hf_model)


def sources(model, tokenizer):
    class Shell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    parameters = dict(model.named_parameters())
    return {
        "module": model,
        "state dict": model.state_dict(),
        "iterator": iter(parameters.items()),
        "flat TensorDict": TensorDict(parameters),
        "nested TensorDict": TensorDict.from_module(model),
        "DDP": Shell(),
        "compiled": {f"_orig_mod.{name}": value for name, value in parameters.items()},
        "wrapper": TransformersWrapper(model, tokenizer=tokenizer, generate=False),
        "TensorDict of the wrapper": TensorDict.from_module(
            TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        ),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "module",
        "state dict",
        "iterator",
        "flat TensorDict",
        "nested TensorDict",
        "DDP",
        "compiled",
        "wrapper",
        "TensorDict of the wrapper",
    ],
)
def test_every_source(hf_model, tokenizer, served, kind):
    source = sources(hf_model, tokenizer)[kind]
    found = to_served_names(named_tensors(source), served)
    assert list(found) == list(served)
    for name, parameter in hf_model.named_parameters():
        assert torch.equal(found[name], parameter)
        assert not found[name].requires_grad


def test_tied_weights_are_sent_once(tokenizer):
    tied = make_tiny_model(tokenizer, tie_word_embeddings=True)
    served = get_model_metadata(tied)
    assert "lm_head.weight" not in served
    # A state dict lists the shared tensor under both names.
    assert "lm_head.weight" in tied.state_dict()
    found = to_served_names(named_tensors(tied.state_dict()), served)
    assert list(found) == list(served)


def test_all_mismatches_are_listed(served, hf_model):
    weights = dict(hf_model.state_dict())
    del weights["model.norm.weight"]
    weights["extra"] = torch.zeros(1)
    weights["lm_head.weight"] = torch.zeros(3, 4)
    with pytest.raises(WeightMismatchError) as caught:
        to_served_names(weights, served)
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 unexpected: extra" in message
    assert "lm_head.weight: (3, 4), served (99, 64)" in message


def test_integers_do_not_become_weights(served, hf_model):
    weights = dict(hf_model.state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].long()
    with pytest.raises(WeightMismatchError, match="another kind"):
        to_served_names(weights, served)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (3, "got int"),
        ({"a": 1}, "'a' is a int"),
        (nn.Module(), "no parameter"),
        (nn.Linear(1, 1).parameters(), "named_parameters"),
    ],
)
def test_what_holds_no_weights_is_refused(weights, words):
    with pytest.raises(ConfigurationError, match=words):
        named_tensors(weights)
