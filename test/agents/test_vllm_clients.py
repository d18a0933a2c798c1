"""Unmodified clients of vLLM on SGLang: log-probs are those of the tokens' weights.

TRL's weights go through its own ``WeightTransferClient``; the functions of vLLM that it
calls are replaced by ones over gloo, as NCCL needs GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.agent_clients import CLIENTS, ROOT
from helpers.log_probs import TOLERANCE, score
from safetensors.torch import load_file
from transformers import AutoTokenizer

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.vllm.broadcasts import LOADER
from torchrl_sglang.gateway.vllm.dialect import VLLM
from torchrl_sglang.testing.tiny_model import make_tiny_model, save_tiny_model

SHAPE = {"num_layers": 1, "initializer_range": 0.2}
UPDATES = 20
TOKENS = 32
STEPS = 12
SECONDS = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("vllm") / "model", **SHAPE))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[AsyncSGLang]:
    with AsyncSGLang.from_pretrained(
        folder, device="cpu", weight_loader="traced", custom_weight_loader=[LOADER]
    ) as engine:
        yield engine


@pytest.fixture
def gateway(engine) -> Iterator[Gateway]:
    limits = {"max_turns": 1_000_000}
    with Gateway(engine, dialects=[VLLM(engine)], **limits) as gateway:
        yield gateway


@contextmanager
def client(python: str, name: str, job: Any, **variables: str) -> Iterator[Any]:
    """Runs a client; yields its process."""
    with subprocess.Popen(
        [python, CLIENTS / name, json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def report_of(process: Any) -> Any:
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def compare(session, models) -> dict[tuple[int, ...], list[list[float]]]:
    """Compares recorded log-probs with Hugging Face's; returns them by the tokens.

    Short responses come several times, of several versions.
    """
    recorded = defaultdict(list)
    for turn in session.turns:
        prompt, done = turn.prompt.token_ids, turn.completion
        assert done.versions[-1].end == len(done.token_ids)
        found = torch.tensor(done.log_probs)
        for span in done.versions:
            ids = [*prompt, *done.token_ids]
            expected = score(models[span.version], ids)[len(prompt) :]
            place = slice(span.start, span.end)
            torch.testing.assert_close(
                found[place], expected[place], atol=TOLERANCE, rtol=0
            )
        recorded[*prompt, *done.token_ids].append(done.log_probs)
    return recorded


def versions_of(session) -> set[str]:
    return {span.version for turn in session.turns for span in turn.completion.versions}


@pytest.mark.parametrize("kind", ["renderers", "verifiers"])
def test_tokens_for_verifiers(verifiers_python, gateway, engine, folder, kind):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    session = gateway.session()
    requests = 16 * UPDATES
    job = {
        "kind": kind,
        "base_url": session.base_url,
        "key": session.key,
        "model": folder,
        "requests": requests,
        "at_once": 16,
        "tokens": TOKENS,
    }
    models = {engine.weight_version: make_tiny_model(tokenizer, **SHAPE)}
    sender = SGLangWeightSyncScheme(engine).create_sender()

    def update(seed):
        model = make_tiny_model(tokenizer, seed=seed, **SHAPE)
        models[sender.update_weights(model).version] = model

    update(0)
    with client(verifiers_python, "verifiers_train.py", job) as process:
        for number in range(UPDATES):
            wait_for(session, process, number * requests // (UPDATES + 1))
            update(1 + number)
        answers = report_of(process)
    sender.shutdown()
    recorded = compare(session, models)
    assert len(answers) == len(session.turns) == requests
    for (prompt, response), log_probs in answers:
        assert pytest.approx(log_probs) in recorded[*prompt, *response]
    assert len(versions_of(session)) >= UPDATES


def wait_for(session, process, turns) -> None:
    deadline = time.monotonic() + SECONDS
    while len(session.turns) < turns and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_trl_s_rollouts_and_weights(trl_python, gateway, folder, tmp_path):
    session = gateway.session()
    job = {
        "url": session.url,
        "model": folder,
        "out": str(tmp_path),
        "updates": UPDATES,
        "samples": 16,
        "tokens": TOKENS,
    }
    first = next_number(gateway)
    path = os.pathsep.join(map(str, (ROOT / "test/helpers/vllm_over_gloo", CLIENTS)))
    with client(trl_python, "trl_rollouts.py", job, PYTHONPATH=path) as process:
        report = report_of(process)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {}
    for version in range(1, UPDATES + 1):
        model = models[str(first + version)] = make_tiny_model(tokenizer, **SHAPE)
        model.load_state_dict(load_file(tmp_path / f"{version}.safetensors"))
    recorded = compare(session, models)
    assert len(versions_of(session)) >= UPDATES - 1
    assert len(report["samples"]) == 16 * UPDATES
    assert report["dtype"] == "torch.float32"
    for sample in report["samples"]:
        trained = sample["log_probs"][sample["mask"].index(1) :]
        assert pytest.approx(trained) in recorded[tuple(sample["ids"])]


def test_trl_s_trainer(trl_python, engine, folder, tmp_path):
    """The whole trainer, with an attention kernel of CPUs in the place of its own."""
    dialects = [VLLM(engine)]
    with Gateway(engine, dialects=dialects, max_turns=100_000) as gateway:
        session, first = gateway.session(), next_number(gateway)
        job = {
            "url": session.url,
            "model": folder,
            "out": str(tmp_path),
            "steps": STEPS,
        }
        path = str(ROOT / "test/helpers/vllm_over_gloo")
        with client(trl_python, "trl_trainer.py", job, PYTHONPATH=path) as process:
            history = report_of(process)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {}
    for version in range(1, STEPS + 2):
        model = models[str(first + version)] = make_tiny_model(tokenizer, **SHAPE)
        model.load_state_dict(load_file(tmp_path / f"{version}.safetensors"))
    compare(session, models)
    steps = [line for line in history if "reward" in line]
    assert len(steps) == STEPS
    # Weights of the same version, in the trainer and in the servers.
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=TOLERANCE)
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2


def next_number(gateway) -> int:
    """Returns the number before the next weight version."""
    version = gateway.engine.newest_version
    return int(version) if version.isdigit() else 0
