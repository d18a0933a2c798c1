"""Two real servers behind a real router: what survives, and what it computes."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.engines import fleet_of
from helpers.forked_starts import processes_below
from helpers.in_flight import TRIES, InFlight
from helpers.waiting import wait_until
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.backends.launch.watchdog import is_alive
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    ServerDiedError,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model

GREEDY = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
LONG = {"max_new_tokens": 1000, "ignore_eos": True}
PATIENCE = 300.0
"""Budget for a server to be started again beside everything else, in seconds."""


@pytest.fixture(scope="module")
def pair(tiny_model_path):
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", num_replicas=2, max_restarts=100
    ) as engine:
        yield engine


@pytest.fixture
def engine(pair):
    """Both servers serve, whatever the test before did."""
    wait_for(pair, ["serving", "serving"])
    return pair


def wait_for(engine, states) -> None:
    wait_until(
        lambda: [server.state for server in engine.stats().servers] == states,
        report=engine.stats,
    )


def prompts(count, length=8):
    return [[3 + (7 * i + 5 * j) % 90 for j in range(length)] for i in range(count)]


def generate(engine, batch, params=GREEDY, **kwargs):
    return engine.generate(input_ids=batch, sampling_params=params, **kwargs)


def tokens(answers):
    return [answer.token_ids for answer in answers]


def restarts(engine):
    return [server.restarts for server in engine.stats().servers]


def running(engine):
    return [server.running for server in engine.stats().servers]


@pytest.mark.slow
def test_both_answer_as_one_does(engine, session_engine):
    batch = prompts(40)
    assert engine.server_url not in [s.url for s in engine.stats().servers]
    flying = InFlight(engine, lambda: generate(engine, batch, LONG), all_servers=True)
    engine.abort()
    with pytest.raises(GenerationAbortedError):
        flying.wait()
    assert tokens(generate(engine, batch)) == tokens(generate(session_engine, batch))
    assert engine.stats().retries == 0


@pytest.mark.parametrize(
    "params", [{**GREEDY, "logit_bias": {"20": 1e3}}, {**GREEDY, "stop_regex": "[a-m]"}]
)
def test_arguments_that_a_router_would_drop_arrive(engine, session_engine, params):
    params = {**params, "ignore_eos": False}
    batch = prompts(6)
    expected = tokens(generate(session_engine, batch, params))
    assert tokens(generate(engine, batch, params)) == expected
    assert expected != tokens(generate(session_engine, batch))


def test_groups_share_what_is_cached(engine):
    groups = [
        [3 + (11 * group + 3 * index) % 96 for index in range(200)]
        for group in range(8)
    ]
    batch = [list(prompt) for prompt in groups for _ in range(4)]
    for prompt in batch:
        prompt[0] = 3 + os.getpid() % 90  # Not what another run has cached.
    answers = generate(engine, batch)
    cached = sum(answer.cached_tokens for answer in answers)
    assert cached >= 0.98 * (len(batch) - len(groups)) * 199


def test_a_server_killed_in_the_middle(engine, session_engine):
    """Its requests go to the other, and it comes back."""
    batch = prompts(16)
    params = {**GREEDY, "max_new_tokens": 120}
    expected = tokens(generate(session_engine, batch, params))
    for _ in range(TRIES):
        flying = InFlight(
            engine, lambda: generate(engine, batch, params), all_servers=True
        )
        os.kill(engine.servers[0].pid, signal.SIGKILL)
        assert tokens(flying.wait()) == expected
        after = engine.stats()
        assert after.completed - flying.before.completed == len(batch)
        wait_for(engine, ["serving", "serving"])
        if after.retries > flying.before.retries:
            break
    assert after.retries > flying.before.retries
    # More than once if the port was not free yet.
    assert engine.stats().restarts > flying.before.restarts
    assert tokens(generate(engine, batch)) == tokens(generate(session_engine, batch))


@pytest.mark.slow
def test_a_server_that_hangs(tiny_model_path, session_engine):
    """It answers nothing and has not ended; a probe finds it."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", num_replicas=2, progress_timeout=2.0
    ) as engine:
        batch = prompts(4)
        stopped = engine.servers[0].pid
        below = [stopped, *processes_below(stopped)]
        # Its watchdog lives on, as it does where a scheduler hangs.
        for pid in below[1:]:
            os.kill(pid, signal.SIGSTOP)
        answers = generate(engine, batch, timeout=PATIENCE)
        assert tokens(answers) == tokens(generate(session_engine, batch))
        wait_for(engine, ["serving", "serving"])
        assert not [pid for pid in below if is_alive(pid)]


def test_the_router_killed(engine, session_engine):
    batch = prompts(10)
    expected = tokens(generate(session_engine, batch))
    router = fleet_of(engine).router
    os.kill(router.pid, signal.SIGKILL)
    # Until it is there again, requests go to the servers.
    assert tokens(generate(engine, batch)) == expected
    wait_until(lambda: (now := fleet_of(engine).router) is not router and now.usable)
    assert engine.server_url == router.url
    assert tokens(generate(engine, batch)) == expected


def test_all_servers_killed(engine):
    expected = tokens(generate(engine, prompts(4)))
    before = restarts(engine)
    for server in engine.servers:
        os.kill(server.pid, signal.SIGKILL)
    start = time.monotonic()
    # Unless one is there again before the other one's end is noticed.
    answers = generate(engine, prompts(4), return_exceptions=True)
    for answer, token_ids in zip(answers, expected, strict=True):
        if isinstance(answer, ServerDiedError):
            assert "The end of its log" in str(answer)
        else:
            assert answer.token_ids == token_ids
    assert time.monotonic() - start < 60
    # A server can answer for a moment after its watchdog was killed.
    wait_until(
        lambda: all(map(operator.gt, restarts(engine), before)), report=engine.stats
    )
    wait_for(engine, ["serving", "serving"])
    generate(engine, prompts(4))


@pytest.mark.slow
def test_after_an_update_a_restarted_server_waits_for_weights(engine, tokenizer):
    """No token is computed with the checkpoint's weights any more."""
    model = make_tiny_model(tokenizer, seed=5)
    sender = SGLangWeightSyncScheme(engine).create_sender()
    report = sender.update_weights(model)
    assert {s.weight_version for s in engine.stats().servers} == {report.version}
    expected = tokens(generate(engine, prompts(8)))
    os.kill(engine.servers[1].pid, signal.SIGKILL)
    assert tokens(generate(engine, prompts(8))) == expected
    wait_for(engine, ["serving", "stale"])
    for _ in range(3):
        answers = generate(engine, prompts(8))
        assert tokens(answers) == expected
        assert {a.versions[-1].version for a in answers} == {report.version}
    report = sender.update_weights(model)
    wait_for(engine, ["serving", "serving"])
    answers = generate(engine, prompts(8))
    assert tokens(answers) == expected
    assert {a.versions[-1].version for a in answers} == {report.version}
    sender.update_weights(make_tiny_model(tokenizer))
    sender.shutdown()


def test_openai_says_what_the_wrapper_says(engine, tokenizer):
    """The same chat gives the same tokens, whichever protocol asks."""
    chat = [{"role": "user", "content": "what is 2+2?"}]
    wrapper = SGLangWrapper(
        engine, generate_kwargs={"max_new_tokens": 12, "temperature": 0.0}
    )
    history = ChatHistory(prompt=History.from_chats([chat]), batch_size=1)
    text = wrapper(TensorDict(history=history, batch_size=1))["history"]
    expected = text.response[0].content[0]
    payload = {"messages": chat, "max_tokens": 12, "temperature": 0.0}
    answer = engine.chat_completion(payload, session_id="episode 1")
    assert answer["choices"][0]["message"]["content"] == expected
    prompt = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    plain = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0}
    assert engine.completion(plain)["choices"][0]["text"] == expected
    found = asyncio.run(engine.achat_completion(payload))
    assert found["choices"][0]["message"]["content"] == expected
    assert engine.openai_base_url == f"{engine.server_url}/v1"
    with pytest.raises(ConfigurationError, match="stream"):
        engine.chat_completion({**payload, "stream": True})


@pytest.mark.slow
def test_a_copy_uses_the_same_servers(engine, session_engine):
    batch = prompts(10)
    copy = pickle.loads(pickle.dumps(engine))
    assert copy.servers == ()
    assert tokens(generate(copy, batch)) == tokens(generate(session_engine, batch))
    with AsyncSGLang.connect(router_url=engine.server_url) as other:
        assert other.num_replicas == 2
        assert tokens(generate(other, batch)) == tokens(generate(session_engine, batch))


def test_abort_frees_the_servers(engine):
    names = ["a", "b"] * 3
    with ThreadPoolExecutor() as pool:
        options = {"request_ids": names, "return_exceptions": True}
        call = pool.submit(generate, engine, prompts(6), LONG, **options)
        while sum(running(engine)) < 6:
            assert not call.done()
        assert engine.abort("a") == 3
        while sum(running(engine)) != 3:
            assert not call.done()
        assert engine.abort() == 3
        outcomes = call.result(60)
    assert [type(o) for o in outcomes] == [GenerationAbortedError] * 6
