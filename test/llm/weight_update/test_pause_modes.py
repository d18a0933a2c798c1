"""What becomes of requests in flight, in every pause mode, on both engine generations.

Prefixes are cached before each update, and requests run through it. A mode that claims
to be exact is held to Hugging Face's log-probs of the new weights.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import threading
from contextlib import contextmanager

import pytest
import requests
import torch
from helpers.in_flight import TRIES, InFlight
from helpers.log_probs import TOLERANCE
from helpers.log_probs import response_difference as difference
from helpers.slow import diagonal, older_engine_is_slow
from tensordict import TensorDict
from torchrl.modules.llm.policies import Tokens

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.errors import GenerationAbortedError, WeightSyncStateError
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

PROMPTS = [list(range(5, 65)), list(range(5, 45)), list(range(50, 90))]
LENGTH = 200
"""Tokens of a response: an update by a connected sender pauses it within some 25."""
CUT_OFF = 1500
"""Tokens of a response that is aborted long before it has them."""


@pytest.fixture
def models(tokenizer):
    """Different weights, one after the other."""
    return (make_tiny_model(tokenizer, seed=seed) for seed in range(1000, 2000))


@contextmanager
def sender_of(engine, **arguments):
    scheme = SGLangWeightSyncScheme(engine, **arguments)
    yield scheme.create_sender()
    scheme.shutdown()


def generate(engine, prompts=PROMPTS, length=LENGTH, **arguments):
    return engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": length, "ignore_eos": True},
        return_logprobs=True,
        timeout=120,
        **arguments,
    )


def test_right_answers_are_computed_once(any_engine, models):
    """An update overtook them in the queue: what they find cached is of new weights."""
    engine, count = any_engine, 16
    prompts = [[7] * 40 + [index] for index in range(count)]
    params = {"max_new_tokens": 4, "ignore_eos": True}
    with sender_of(engine) as sender:
        sender.update_weights(next(models))
        new = next(models)
        before = engine.stats().completed
        run_sync(engine.control.pause("retract"))
        found = []
        thread = threading.Thread(
            target=lambda: found.extend(
                engine.generate(
                    input_ids=prompts, sampling_params=params, return_logprobs=True
                )
            )
        )
        thread.start()
        while engine.stats().in_flight < count:
            assert thread.is_alive()
        report = sender.update_weights(new)
        thread.join(120)
    assert engine.stats().completed - before == len(found) == count
    assert {answer.versions[0].version for answer in found} == {report.version}
    for prompt, answer in zip(prompts, found, strict=True):
        assert difference(answer, prompt, new) < TOLERANCE


@older_engine_is_slow
def test_scores_of_tokens_whose_weights_are_gone_are_unknown(any_engine, models):
    """A response that has to be scored, and lived through an update in place."""
    engine = any_engine
    old, new = next(models), next(models)
    params = {"max_new_tokens": LENGTH, "ignore_eos": True, "logit_bias": {"9": 1.0}}

    def call():
        return engine.generate(
            input_ids=PROMPTS, sampling_params=params, return_logprobs=True
        )

    with sender_of(engine, pause_mode="in_place") as sender:
        sender.update_weights(old)
        flying = InFlight(engine, call)
        report = sender.update_weights(new)
        answers = flying.wait()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        start = answer.versions[-1].start
        assert answer.versions[-1].version == report.version
        unknown = [math.isnan(value) for value in answer.log_probs]
        assert unknown == [True] * start + [False] * (LENGTH - start)
        assert difference(answer, prompt, new, start) < TOLERANCE


@pytest.mark.parametrize(
    ("any_engine", "flush"),
    [
        ("sessions", False),
        ("no sessions", True),
        pytest.param("sessions", True, marks=pytest.mark.slow),
        pytest.param("no sessions", False, marks=pytest.mark.slow),
    ],
    indirect=["any_engine"],
)
def test_continue_computes_the_prefix_again(any_engine, models, flush):
    engine = any_engine
    with sender_of(engine, flush_cache=flush) as sender:
        assert any(continues(engine, sender, models) for _ in range(TRIES))


def continues(engine, sender, models):
    """Updates the weights while requests run; returns whether all of them went on."""
    old, new = next(models), next(models)
    sender.update_weights(old)
    generate(engine, length=1)
    flying = InFlight(engine, lambda: generate(engine), least=len(PROMPTS))
    report = sender.update_weights(new)
    answers = flying.wait()
    if any(answer.versions[-1].version != report.version for answer in answers):
        return False
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.token_ids) == LENGTH
        assert not answer.mixed_state
        start = answer.versions[-1].start
        assert difference(answer, prompt, new, start) < TOLERANCE
        if start:
            assert difference(answer, prompt, old, 0, start) < TOLERANCE
    # The earlier tokens are kept by newer servers, or by the engine.
    return {len(answer.versions) for answer in answers} == {2}


INTERVAL = 20
"""Tokens between two updates."""


def update_while(flying, engine, sender, models, versions):
    """Sends weights every few tokens until a call returns; counts the updates."""
    number = 0
    while flying.runs:
        number += 1
        # Takes as long as a response takes for so many tokens.
        generate(engine, PROMPTS[:1], INTERVAL)
        model = next(models)
        versions[sender.update_weights(model).version] = model
    return number


def check_spans(answers, prompts, lengths, versions):
    """Returns at how many boundaries of versions responses went on."""
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        assert (len(answer.token_ids), answer.finish_reason) == (length, "length")
        assert not answer.mixed_state
        ends = [0, *(span.end for span in answer.versions)]
        assert ends[:-1] == [span.start for span in answer.versions]
        assert ends[-1] == length
        for span in answer.versions:
            model = versions[span.version]
            found = difference(answer, prompt, model, span.start, span.end)
            assert found < TOLERANCE, span
    return sum(len(answer.versions) - 1 for answer in answers)


def requests_of_many_lengths(count):
    prompts = [[5 + index % 90, *range(5, 12 + index % 7)] for index in range(count)]
    lengths = [20 + 37 * index % 180 for index in range(count)]
    return prompts, lengths


def check_every_token(engine, models, count):
    assert any(boundaries(engine, models, count) for _ in range(TRIES))


def boundaries(engine, models, count):
    """Updates the weights again and again while requests run.

    Returns at how many boundaries of versions a response went on.
    """
    prompts, lengths = requests_of_many_lengths(count)
    params = [{"max_new_tokens": n, "ignore_eos": True} for n in lengths]
    first, versions = next(models), {}
    with sender_of(engine) as sender:
        versions[sender.update_weights(first).version] = first
        flying = InFlight(
            engine,
            lambda: engine.generate(
                input_ids=prompts, sampling_params=params, return_logprobs=True
            ),
        )
        updates = update_while(flying, engine, sender, models, versions)
        answers = flying.wait()
    found = check_spans(answers, prompts, lengths, versions)
    computed = engine.stats().response_tokens - flying.before.response_tokens
    assert computed == sum(lengths) + INTERVAL * updates, "No token is computed twice."
    return found


@older_engine_is_slow
@pytest.mark.parametrize("count", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_every_token_is_of_the_version_that_its_span_says(any_engine, models, count):
    check_every_token(any_engine, models, count)


@older_engine_is_slow
def test_the_same_weights_again_change_no_token(any_engine, models):
    engine = any_engine
    prompts, lengths = requests_of_many_lengths(12)
    params = [
        {"max_new_tokens": n, "temperature": 0.0, "min_new_tokens": n // 2 * (n % 2)}
        for n in lengths
    ]
    model, versions = next(models), {}
    with sender_of(engine) as sender:
        sender.update_weights(model)
        expected = engine.generate(input_ids=prompts, sampling_params=params)
        for _ in range(TRIES):
            flying = InFlight(
                engine,
                lambda: engine.generate(input_ids=prompts, sampling_params=params),
            )
            update_while(flying, engine, sender, itertools.repeat(model), versions)
            answers = flying.wait()
            if versions:
                break
    assert versions
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]


@pytest.fixture(scope="module", params=[None, "0.5.20"])
def two_servers(tiny_model_path, request):
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        num_replicas=2,
        router_policy=None,
        sglang_version=request.param,
    ) as engine:
        yield engine


@pytest.mark.slow
def test_every_token_of_two_servers(two_servers, models):
    check_every_token(two_servers, models, 200)


@pytest.mark.slow
def test_two_servers_one_of_which_is_killed(two_servers, models):
    engine = two_servers
    prompts, lengths = requests_of_many_lengths(40)
    params = [
        {"max_new_tokens": 8 * n, "temperature": 0.0, "ignore_eos": True}
        for n in lengths
    ]
    model = next(models)
    with sender_of(engine) as sender:

        def call():
            return engine.generate(
                input_ids=prompts, sampling_params=params, return_logprobs=True
            )

        sender.update_weights(model)
        expected = call()
        flying = InFlight(engine, call)
        sender.update_weights(model)
        lost = engine.servers[1]
        while not any(run_sync(engine.control.loads(urls=[lost.url]))[0]):
            assert flying.runs
        os.kill(lost.pid, signal.SIGKILL)
        answers = flying.wait()
        assert engine.stats().retries > 0
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert any(len(answer.versions) > 1 for answer in answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert difference(answer, prompt, model) < TOLERANCE


@older_engine_is_slow
def test_continue_and_a_stream(any_engine, models):
    engine = any_engine
    with sender_of(engine) as sender:
        sender.update_weights(next(models))
        flying = InFlight(
            engine,
            lambda: dict(
                engine.generate_iter(
                    input_ids=PROMPTS,
                    sampling_params={"max_new_tokens": LENGTH, "ignore_eos": True},
                    return_logprobs=True,
                )
            ),
        )
        new = next(models)
        report = sender.update_weights(new)
        answers = flying.wait()
    for index, prompt in enumerate(PROMPTS):
        span = answers[index].versions[-1]
        assert span.version == report.version
        assert difference(answers[index], prompt, new, span.start) < TOLERANCE


def test_who_aborts_meanwhile_is_not_sent_again(older_engine, models):
    """Only what the update itself ended begins anew."""
    engine = older_engine
    proxy = FaultyProxy(engine.server_url)
    with proxy, AsyncSGLang.connect(proxy.url) as through, sender_of(through) as sender:
        flying = InFlight(
            through,
            lambda: generate(through, length=CUT_OFF, request_ids=["a", "b", "c"]),
        )
        # Between the pause and the flush, so that both end the same requests.
        proxy.inject("/flush_cache", lambda: through.abort(["b"]))
        sender.update_weights(next(models))
        with pytest.raises(GenerationAbortedError) as caught:
            flying.wait()
    assert caught.value.index == 1
    assert caught.value.requested


def test_other_engine_objects_hear_of_it(older_engine, models):
    """A copy knows of no update; it gets an error, and never a stale token."""
    engine = older_engine
    copy = pickle.loads(pickle.dumps(engine))
    with sender_of(engine) as sender:
        flying = InFlight(engine, lambda: generate(copy, length=CUT_OFF))
        new = next(models)
        sender.update_weights(new)
        with pytest.raises(GenerationAbortedError, match="Send it again"):
            flying.wait()
        answers = generate(copy, length=20)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert difference(answer, prompt, new) < TOLERANCE
    copy.shutdown()


@pytest.mark.parametrize("flush", [True, False])
def test_abort_ends_what_runs(any_engine, models, flush):
    engine = any_engine
    with sender_of(engine, pause_mode="abort", flush_cache=flush) as sender:
        flying = InFlight(engine, lambda: generate(engine, length=CUT_OFF))
        new = next(models)
        sender.update_weights(new)
        with pytest.raises(GenerationAbortedError, match="Send it again"):
            flying.wait()
        answers = generate(engine, length=20)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert difference(answer, prompt, new) < TOLERANCE


CHATS = {
    "chat_completion": {"messages": [{"role": "user", "content": "Hi"}]},
    "completion": {"prompt": PROMPTS},
}


def openai_answer(engine, route, length):
    limits = {"max_tokens": length, "ignore_eos": True, "n": 2}
    return getattr(engine, route)({**CHATS[route], **limits}, timeout=120)


@older_engine_is_slow
@pytest.mark.parametrize(
    ("mode", "route"), diagonal(["continue", "in_place", "abort"], CHATS)
)
def test_answers_of_openai_are_whole_or_errors(any_engine, models, mode, route):
    engine = any_engine
    length = CUT_OFF if mode == "abort" else LENGTH
    with sender_of(engine, pause_mode=mode) as sender:
        sender.update_weights(next(models))
        flying = InFlight(engine, lambda: openai_answer(engine, route, length), least=2)
        sender.update_weights(next(models))
        if mode == "abort":
            with pytest.raises(GenerationAbortedError, match="Send it again"):
                flying.wait()
            return
        answer = flying.wait()
    count = 2 * len(PROMPTS) if route == "completion" else 2
    assert {each["finish_reason"] for each in answer["choices"]} == {"length"}
    assert len(answer["choices"]) == count
    assert answer["usage"]["completion_tokens"] == count * LENGTH


@pytest.mark.parametrize("route", CHATS)
def test_abort_ends_requests_of_openai(any_engine, route):
    engine = any_engine
    flying = InFlight(engine, lambda: openai_answer(engine, route, CUT_OFF), least=2)
    assert engine.abort() == 1
    with pytest.raises(GenerationAbortedError) as caught:
        flying.wait()
    assert caught.value.requested


@older_engine_is_slow
def test_in_place_is_marked(any_engine, models):
    """The stale KV cache of the old weights is kept, and the data says so."""
    engine = any_engine
    copy = AsyncSGLang.connect(engine.server_url)
    policy = SGLangWrapper(
        copy,
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": LENGTH, "ignore_eos": True},
        return_generation_info=True,
        pad_output=True,
    )
    tokens = Tokens(prompt=torch.tensor([PROMPTS[0]]), batch_size=1)
    with sender_of(engine, pause_mode="in_place") as sender:
        before = sender.update_weights(next(models))
        flying = InFlight(
            engine,
            lambda: (
                generate(engine),
                policy(TensorDict(tokens=tokens, batch_size=1))["generation_info"],
            ),
        )
        other = InFlight(
            engine,
            lambda: policy(TensorDict(tokens=tokens, batch_size=1))["generation_info"],
            least=len(PROMPTS) + 1,
        )
        new = next(models)
        report = sender.update_weights(new)
        answers, later = flying.wait()
        info = other.wait()
        fresh = generate(engine, length=20)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        versions = [span.version for span in answer.versions]
        assert versions == [before.version, report.version]
        assert answer.mixed_state
        start = answer.versions[-1].start
        assert difference(answer, prompt, new, start) > 0.1
    # An engine object that knows nothing of the mode tells, too.
    assert info.mixed_state.tolist() == [True]
    assert set(info.weight_version[0].tolist()) == {
        int(before.version),
        int(report.version),
    }
    # What begins after the update is exact, and not marked.
    assert later.mixed_state.tolist() == [False]
    for prompt, answer in zip(PROMPTS, fresh, strict=True):
        assert difference(answer, prompt, new) < TOLERANCE
        assert not answer.mixed_state
    copy.shutdown()


@older_engine_is_slow
def test_none_is_for_idle_servers(any_engine, models):
    """Refused while a request runs; otherwise nothing is generated meanwhile."""
    engine = any_engine
    old, new = next(models), next(models)
    with sender_of(engine) as sender:
        sender.update_weights(old)
    generate(engine, length=1)
    proxy = FaultyProxy(engine.server_url)
    seen = []

    def look():
        with pytest.raises(WeightSyncStateError, match="without a pause"):
            generate(through, length=1)
        seen.append(requests.get(f"{engine.server_url}/health", timeout=10).ok)

    with (
        proxy,
        AsyncSGLang.connect(proxy.url) as through,
        sender_of(through, pause_mode="none") as sender,
    ):
        # To connect can take as long as the requests, on a busy machine.
        sender.update_weights(old)
        flying = InFlight(engine, lambda: generate(engine))
        with pytest.raises(WeightSyncStateError, match="continue"):
            sender.update_weights(new)
        for prompt, answer in zip(PROMPTS, flying.wait(), strict=True):
            assert len(answer.versions) == 1
            assert difference(answer, prompt, old) < TOLERANCE
        proxy.inject("/update_weights_from_distributed", look)
        sender.update_weights(new)
        assert seen == [True]
        assert not proxy.counts["/pause_generation"]
        answers = generate(through, length=20)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert difference(answer, prompt, new) < TOLERANCE
