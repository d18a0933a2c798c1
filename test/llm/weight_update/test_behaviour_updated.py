"""Supports and their log-probs are those of the weights that a token was drawn from."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch
from helpers.log_probs import TOLERANCE
from helpers.samplers import expected

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.testing.tiny_model import make_tiny_model

UPDATES = 10
COUNT = 24

EDGE = 3e-5
"""Share of a distribution that engine and model differ by, over a long prefix."""


@pytest.fixture(scope="module")
def two_servers(tiny_model_path):
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", num_replicas=2, router_policy=None
    ) as engine:
        yield engine


def samplers():
    generator = random.Random(1)
    return [
        {
            "max_new_tokens": 60 + 35 * number % 300,
            "ignore_eos": True,
            "temperature": generator.choice([0.6, 0.8, 1.0, 1.3]),
            "top_k": generator.choice([5, 20, 4096]),
            "top_p": generator.choice([1.0, 0.95, 0.7]),
            "min_p": generator.choice([0.0, 0.05]),
        }
        for number in range(COUNT)
    ]


def check(completion, prompt, params, models):
    """Holds each token to the model of its version; returns how many there are."""
    ids = completion.token_ids
    supports = completion.columns["sampling_support"].tolist()
    assert len(supports) == len(ids) == len(completion.log_probs)
    for span in completion.versions:
        model = models[span.version]
        wanted = expected(model, prompt, ids[: span.end], params, EDGE)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids[: span.end]]])).logits[0]
        rows = logits[len(prompt) - 1 : -1].double() / params["temperature"]
        for place in range(span.start, span.end):
            support, edge, _ = wanted[place]
            own = supports[place]
            assert set(own) ^ support <= edge, (place, span)
            assert ids[place] in own
            log_prob = rows[place][ids[place]] - rows[place][own].logsumexp(0)
            assert abs(completion.log_probs[place] - float(log_prob)) < TOLERANCE
    return len(ids)


@pytest.mark.slow
def test_through_updates_and_a_kill(two_servers, tokenizer):
    """Ten updates with "continue", a server that is killed, and an abort."""
    engine, params = two_servers, samplers()
    prompts = [[5 + number, *range(5, 10 + number % 5)] for number in range(COUNT)]
    seeds = iter(range(3000, 4000))
    scheme = SGLangWeightSyncScheme(engine)
    sender, models, found = scheme.create_sender(), {}, []

    def update():
        model = make_tiny_model(tokenizer, seed=next(seeds))
        models[sender.update_weights(model).version] = model

    def generate():
        found.extend(
            engine.generate(
                input_ids=prompts,
                sampling_params=params,
                return_logprobs=True,
                logprobs_mode="behaviour",
                request_ids=[f"response {number}" for number in range(COUNT)],
                return_partial=True,
                timeout=200,
            )
        )

    update()
    boundaries = rounds = killed = aborted = cut = 0
    while len(models) <= UPDATES or not killed:
        rounds += 1
        assert rounds < 8
        found.clear()
        thread = threading.Thread(target=generate)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            update()
            if len(models) == 4 and not killed:
                os.kill(engine.servers[1].pid, signal.SIGKILL)
                killed = 1
            if len(models) == 6 and not aborted:
                aborted = engine.abort([f"response {n}" for n in range(0, COUNT, 8)])
        assert len(found) == COUNT
        for completion, prompt, own in zip(found, prompts, params, strict=True):
            length = check(completion, prompt, own, models)
            whole = length == own["max_new_tokens"]
            assert whole is (completion.finish_reason == "length")
            cut += not whole
            boundaries += len(completion.versions) - 1
    assert boundaries > UPDATES
    assert cut <= aborted
    scheme.shutdown()
