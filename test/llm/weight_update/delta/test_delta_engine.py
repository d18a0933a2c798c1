"""Changed elements over HTTP, on real servers; Hugging Face is the oracle."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.testing.tiny_model import make_tiny_model

LOADER = "torchrl_sglang_delta.load"


@pytest.fixture(
    scope="module",
    params=["0.5.23", pytest.param("0.5.20", marks=pytest.mark.slow)],
)
def delta_engine(request, tiny_model_path):
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


def exact_copy(model, tokenizer):
    """Returns the model in float32; its rotary frequencies were rounded, too."""
    exact = make_tiny_model(tokenizer)
    with torch.no_grad():
        for own, value in zip(exact.parameters(), model.parameters(), strict=True):
            own.copy_(value)
    return exact


@pytest.mark.parametrize("updates", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_many_updates_are_exact(delta_engine, tokenizer, updates):
    """Only the first one has all bytes, and the servers compute with the last."""
    model, step = trained(tokenizer)
    scheme = SGLangWeightSyncScheme(delta_engine, model, transport="delta")
    sender = scheme.create_sender()
    reports = [sender.update_weights()]
    for _ in range(updates):
        step()
        reports.append(sender.update_weights())
    assert "everything" in reports[0].reason
    assert all("that changed" in report.reason for report in reports[1:])
    full = reports[0].wire_bytes
    assert max(report.wire_bytes for report in reports[1:]) < full / 2
    assert difference(delta_engine, exact_copy(model, tokenizer)) < TOLERANCE
    scheme.shutdown()


def kill(engine):
    """Kills the engine's server, and waits until it is started again."""
    (server,) = engine.servers
    os.kill(server.pid, signal.SIGKILL)
    engine.revive()


@pytest.mark.slow
def test_a_killed_server_gets_everything(delta_engine, tokenizer):
    model, step = trained(tokenizer)
    scheme = SGLangWeightSyncScheme(delta_engine, model, transport="delta")
    sender = scheme.create_sender()
    sender.update_weights()
    step()
    assert "that changed" in sender.update_weights().reason
    kill(delta_engine)
    assert "everything" in sender.update_weights().reason
    step()
    assert "that changed" in sender.update_weights().reason
    assert difference(delta_engine, exact_copy(model, tokenizer)) < TOLERANCE
    scheme.shutdown()


@pytest.mark.slow
def test_tensor_parallel_servers(tiny_model_path, tokenizer):
    """A payload goes to the first rank, which gives it to the other one."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        tp_size=2,
        custom_weight_loader=LOADER,
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as engine:
        model, step = trained(tokenizer)
        scheme = SGLangWeightSyncScheme(engine, model, transport="delta")
        sender = scheme.create_sender()
        full = sender.update_weights()
        for _ in range(3):
            step()
            report = sender.update_weights()
            assert "that changed" in report.reason
            assert report.wire_bytes < full.wire_bytes / 2
        assert difference(engine, exact_copy(model, tokenizer)) < TOLERANCE
        scheme.shutdown()
