"""Changed elements over HTTP, on real servers; Hugging Face is the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import UnsupportedByServerError
from torchrl_sglang.testing.tiny_model import make_tiny_model

LOADER = "torchrl_sglang_delta.load"
UPDATES = 50
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module", params=["0.5.23", "0.5.20"])
def engine(request, tiny_model_path):
    """A server of each generation, with update sessions and without."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        sglang_version=request.param,
        custom_weight_loader=LOADER,
    ) as engine:
        assert engine.capabilities.weight_loaders == (LOADER,)
        yield engine


def trained(tokenizer, seed=0):
    """Returns a model in bfloat16, and a function that takes a step of AdamW."""
    torch.manual_seed(seed)
    model = make_tiny_model(tokenizer).to(torch.bfloat16)
    # A step of 2e-6 moves a few of a hundred weights to another bfloat16.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6, weight_decay=0.0)

    def step():
        ids = torch.randint(3, model.config.vocab_size, (2, 12))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_fifty_updates_are_exact(engine, tokenizer):
    """Only the first one has all bytes, and the servers compute with the last."""
    model, step = trained(tokenizer)
    scheme = SGLangWeightSyncScheme(engine, model, transport="delta", verify=True)
    sender = scheme.create_sender()
    reports = [sender.update_weights()]
    for _ in range(UPDATES):
        step()
        reports.append(sender.update_weights(verify=False))
    assert "everything" in reports[0].reason
    assert all("that changed" in report.reason for report in reports[1:])
    full = reports[0].wire_bytes
    assert max(report.wire_bytes for report in reports[1:]) < full / 2
    exact = copy.deepcopy(model).float()
    assert difference(engine, exact) < TOLERANCE
    # Whether the oracle sees one step.
    step()
    assert sender.update_weights(verify=True).version == engine.weight_version
    scheme.shutdown()


def test_a_server_without_the_loader(request, tokenizer):
    plain = request.getfixturevalue("restored_engine")
    scheme = SGLangWeightSyncScheme(plain, make_tiny_model(tokenizer), transport="delta")
    with pytest.raises(UnsupportedByServerError, match="custom_weight_loader='torch"):
        scheme.create_sender().update_weights()
    scheme.shutdown()
