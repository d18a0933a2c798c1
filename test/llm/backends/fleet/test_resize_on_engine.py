"""Real servers that join and leave while others generate; what the tokens are."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import ServerStartError, WeightSyncStateError
from torchrl_sglang.testing.tiny_model import make_tiny_model

LONG = {"max_new_tokens": 600, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def engine(tiny_model_path):
    with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        yield engine


def prompts(count):
    return [[3 + (7 * i + 5 * j) % 90 for j in range(8)] for i in range(count)]


def generate(engine, count, params=LONG):
    return engine.generate(
        input_ids=prompts(count), sampling_params=params, return_logprobs=True
    )


def states(engine):
    return [server.state for server in engine.stats().servers]


def busy(engine):
    return {server.url for server in engine.stats().servers if server.running}


def generate_on(engine, count, servers):
    """Returns responses that these servers computed, each some of them.

    What a server runs is told some time later, and of short responses maybe never.
    """
    seen = set()
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, engine, count)
            while not call.done():
                seen |= busy(engine)
        if seen == servers:
            break
    assert seen == servers
    return call.result()


def twin_log_probs(model, answer, prompt):
    """What ``transformers`` computes for the tokens of a response."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        scores = model(input_ids=ids).logits.float().log_softmax(-1)
    found = scores[0, len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])
    return found[:, 0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_joins_and_leaves_under_load(engine, tokenizer):
    """Every token is of the version that its answer says, and none is lost."""
    first = engine.servers[0].url
    expected = [answer.token_ids for answer in generate(engine, 6)]
    model = make_tiny_model(tokenizer, seed=5)
    sender = SGLangWeightSyncScheme(engine, model).create_sender()
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(generate, engine, 6)
        (url,) = engine.add_servers(1)
        # The checkpoint's weights are the current ones.
        assert states(engine) == ["serving", "serving"]
        assert [a.token_ids for a in call.result(300)] == expected
        call = pool.submit(generate, engine, 6)
        while len(busy(engine)) < 2:
            assert not call.done()
        engine.remove_servers(first, drain_timeout=0)
        assert [a.token_ids for a in call.result(300)] == expected
    assert [server.url for server in engine.servers] == [url]

    # The process group of the next update has other members.
    report = sender.update_weights()
    (third,) = engine.add_servers(1)
    assert states(engine) == ["serving", "stale"]
    generate_on(engine, 6, {url})
    filled = sender.update_new_servers()
    assert filled is not None
    assert filled.num_bytes == report.num_bytes
    assert states(engine) == ["serving", "serving"]
    assert sender.update_new_servers() is None
    answers = generate_on(engine, 6, {url, third})
    for answer, prompt in zip(answers, prompts(6), strict=True):
        assert {span.version for span in answer.versions} == {report.version}
        found = torch.tensor(answer.log_probs)
        assert torch.allclose(found, twin_log_probs(model, answer, prompt), atol=1e-4)

    # A model that was trained since is no model of this version.
    (fourth,) = engine.add_servers(1)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    with pytest.raises(WeightSyncStateError, match="trained since"):
        sender.update_new_servers()
    assert states(engine) == ["serving", "serving", "stale"]
    report = sender.update_weights()
    assert states(engine) == ["serving"] * 3
    answers = generate_on(engine, 9, {url, third, fourth})
    for answer, prompt in zip(answers, prompts(9), strict=True):
        found = torch.tensor(answer.log_probs)
        assert torch.allclose(found, twin_log_probs(model, answer, prompt), atol=1e-4)
    sender.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_server_is_killed_while_it_joins(engine):
    """The others go on, and the next one joins."""
    pids = [server.pid for server in engine.servers]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.add_servers, 1)
        while not engine._resize._starting:
            assert not call.done()
        os.kill(engine._resize._starting[0].pid, signal.SIGKILL)
        with pytest.raises(ServerStartError):
            call.result(300)
    assert [server.pid for server in engine.servers] == pids
    expected = [answer.token_ids for answer in generate(engine, 4)]
    engine.add_servers(1)
    answers = generate_on(engine, 4, {server.url for server in engine.servers})
    assert [answer.token_ids for answer in answers] == expected
