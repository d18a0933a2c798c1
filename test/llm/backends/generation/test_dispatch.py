"""Outcomes of a batch when the server fails, refuses or changes its weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.generation.dispatch import retry_delay
from torchrl_sglang.errors import (
    GenerationAbortedError,
    NotFiniteError,
    RequestRefusedError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import Completion, VersionSpan

PROMPTS = [[5], [6, 7], [8, 9, 10]]
SHORT = {"max_new_tokens": 4}
REFUSED = {"max_new_tokens": 4, "stop": [f"stop {i}" for i in range(33)]}
"""Our checks let it through, and SGLang takes at most 32 stop texts."""


def generate(engine, **options):
    options = {"input_ids": PROMPTS, "sampling_params": SHORT, **options}
    return engine.generate(**options)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("hang_up", ServerUnavailableError, "Disconnected"),
        ("hang_up_mid_body", ServerUnavailableError, "Payload"),
        ("malformed_json", ServerUnavailableError, "not JSON"),
        ("error_500", ServerUnavailableError, "HTTP 500.*Internal Server Error"),
        ("short_tokens", ServerUnavailableError, "sent 3 tokens .* counts 4"),
        ("short_log_probs", ServerUnavailableError, "4 tokens and sent 3"),
        ("short_top_log_probs", ServerUnavailableError, "top-2 tokens at 4 positions"),
        ("no_log_probs", ServerUnavailableError, "4 tokens and sent none"),
        ("null_log_probs", NotFiniteError, "position 3 of .* unset"),
        ("other_tokens", ServerUnavailableError, "other tokens"),
        ("abort", GenerationAbortedError, "after 1 tokens"),
        ("abort_400", RequestRefusedError, "HTTP 400.*cannot be served"),
        ("abort_compiling", GenerationAbortedError, "after 0 tokens"),
    ],
)
def test_faults(fake, fake_engine, fault, error, words):
    with fake.misbehaving(fault), pytest.raises(error, match=words) as caught:
        generate(fake_engine, return_logprobs=True, top_logprobs=2)
    assert type(caught.value) is error
    assert fake.url in str(caught.value)
    assert len(generate(fake_engine, return_logprobs=True)) == 3


def test_an_aborted_response_leaves_the_others_alone(fake, fake_engine):
    with fake.misbehaving("abort", when=lambda asked: asked["input_ids"] == PROMPTS[2]):
        *good, bad = generate(fake_engine, return_exceptions=True)
        assert [answer.token_ids for answer in good] == [[5, 5, 5, 5], [6, 7, 6, 7]]
        assert isinstance(bad, GenerationAbortedError)
        with pytest.raises(GenerationAbortedError) as caught:
            generate(fake_engine)
    assert caught.value.index == 2
    assert caught.value.__notes__ == ["It is item 2 of 3."]


def test_indices_when_only_a_part_of_the_batch_is_sent(fake, fake_engine):
    prompts = [[5], [], [6], [10**6], [7], [8]]
    params = [SHORT] * 4 + [REFUSED, SHORT]
    with fake.misbehaving("abort"):
        outcomes = generate(
            fake_engine,
            input_ids=prompts,
            sampling_params=params,
            return_exceptions=True,
        )
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "GenerationAbortedError",
        "ConfigurationError",
        "GenerationAbortedError",
        "ConfigurationError",
        "RequestRefusedError",
        "GenerationAbortedError",
    ]
    places = [getattr(outcome, "index", None) for outcome in outcomes]
    assert places == [0, None, 2, None, 4, 5]
    sent = [payload["input_ids"] for payload in fake.payloads()]
    assert sorted(sent) == [[[5]], [[6]], [[7]], [[8]]]


def test_a_response_on_a_stale_kv_cache_is_not_used(fake, fake_engine):
    """Another process updates the weights between two requests."""
    generate(fake_engine, input_ids=[5])
    fake.weight_version = "3"
    generate(fake_engine, input_ids=[5])
    assert fake_engine.weight_version == "3"
    assert len(fake.payloads()) == 2, "Nothing was cached, so the answers were right."
    fake.weight_version, fake.cached_tokens = "4", 1
    generate(fake_engine, input_ids=[5])
    keys = [payload["extra_key"][0] for payload in fake.payloads()]
    assert keys == ["default", "default", "3", "4"]


def test_a_stale_response_is_requested_again_at_once(fake, tiny_model_path):
    """It does not wait for the others of its batch."""
    with (
        FakeServer(tiny_model_path) as slow,
        AsyncSGLang.connect(urls=[fake.url, slow.url]) as engine,
        slow.misbehaving("hang"),
    ):
        answers = engine.generate_iter(
            input_ids=[[5], [6]], session_ids=["a", "b"], sampling_params=SHORT
        )
        fake.weight_version, fake.cached_tokens = "4", 1
        _, answer = next(answers)
        assert answer.versions[0].version == "4"
        keys = [payload["extra_key"][0] for payload in fake.payloads()]
        assert keys == ["default", "4"]
        answers.close()


def test_requests_carry_the_weight_version_at_the_time_of_sending(fake):
    answer = fake.routes["/generate"]

    def update(content):
        fake.weight_version = str(len(fake.payloads()))
        return answer(content)

    fake.routes["/generate"] = update
    with AsyncSGLang.connect(fake.url, max_in_flight=1) as engine:
        engine.generate(input_ids=PROMPTS, sampling_params=SHORT, request_timeout=30.0)
    keys = [payload["extra_key"][0] for payload in fake.payloads()]
    assert keys == ["default", "1", "2"]


POISON = 50
"""A token; a request with a prompt that has it is answered with an error."""
TWENTY = [[index] for index in range(19)] + [[POISON]]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_poisoned_prompt_fails_alone(fake, tiny_model_path, servers):
    with FakeServer(tiny_model_path) as other:
        fake.poison = other.poison = {POISON}
        urls = [fake.url, other.url][:servers]
        with AsyncSGLang.connect(urls=urls, max_attempts=2) as engine:
            *good, bad = generate(engine, input_ids=TWENTY, return_exceptions=True)
            assert [answer.token_ids for answer in good] == [
                [index] * 4 for index in range(19)
            ]
            assert type(bad) is ServerUnavailableError
            assert "HTTP 500" in str(bad)
            with pytest.raises(ServerUnavailableError, match="HTTP 500") as caught:
                generate(engine, input_ids=TWENTY)
    assert "It is item 19 of 20." in caught.value.__notes__
    assert 19 not in caught.value.completions


@pytest.mark.parametrize(
    "fault", ["malformed_json", "error_500", "hang_up", "other_tokens"]
)
def test_errors_are_returned_in_their_places(fake, tiny_model_path, fault):
    """With return_exceptions, none of them ends the batch."""
    with (
        AsyncSGLang.connect(fake.url, max_attempts=2) as engine,
        fake.misbehaving(fault),
    ):
        outcomes = generate(engine, return_logprobs=True, return_exceptions=True)
        assert [type(each) for each in outcomes] == [ServerUnavailableError] * 3


def test_finished_responses_survive_the_death_of_their_server(fake):
    """A server that ends in the middle of a batch takes only the rest with it."""
    prompts = [[index] for index in range(10)]
    with (
        AsyncSGLang.connect(fake.url, max_attempts=2, max_in_flight=1) as engine,
        fake.misbehaving("hang_up", when=lambda asked: asked["input_ids"][0] >= 5),
    ):
        outcomes = generate(engine, input_ids=prompts, return_exceptions=True)
        assert [answer.token_ids for answer in outcomes[:5]] == [
            [index] * 4 for index in range(5)
        ]
        assert {type(error) for error in outcomes[5:]} == {ServerUnavailableError}
        with pytest.raises(ServerUnavailableError) as caught:
            generate(engine, input_ids=prompts)
        finished = caught.value.completions
        assert {index: answer.token_ids for index, answer in finished.items()} == {
            index: [index] * 4 for index in range(5)
        }


def test_a_recovered_server_gets_only_the_unfinished_requests(fake):
    prompts = [[index] for index in range(10)]

    def first_of_prompt_5(asked):
        tried = [payload["input_ids"] for payload in fake.payloads()]
        return asked["input_ids"] == [5] and tried.count([[5]]) == 1

    with (
        AsyncSGLang.connect(fake.url, max_in_flight=1) as engine,
        fake.misbehaving("hang_up", when=first_of_prompt_5),
    ):
        answers = generate(engine, input_ids=prompts)
    assert [answer.token_ids for answer in answers] == [[i] * 4 for i in range(10)]
    sent = [prompt for (prompt,) in (p["input_ids"] for p in fake.payloads())]
    assert sorted(sent) == sorted([*prompts, [5]])


def test_versions_of_a_server_that_reports_only_the_last(tiny_model_path):
    """A weight update during a response leaves its versions unknown."""
    with (
        FakeServer(tiny_model_path, version_spans=False) as fake,
        AsyncSGLang.connect(fake.url) as engine,
    ):
        (before,) = generate(engine, input_ids=[5], return_logprobs=True)
        assert before.versions == (VersionSpan(version="default", start=0, end=4),)
        fake.weight_version = "3"
        (during,) = generate(engine, input_ids=[5], return_logprobs=True)
        assert during.versions == ()
        assert during.weight_version == "3"
        assert during.mixed_state
        assert len(during.log_probs) == 4
        (after,) = generate(engine, input_ids=[5], return_logprobs=True)
        assert after.versions == (VersionSpan(version="3", start=0, end=4),)
        assert not after.mixed_state


def seeds(fake) -> list[int | None]:
    return [
        params.get("sampling_seed")
        for payload in fake.payloads()
        for params in payload["sampling_params"]
    ]


def test_each_request_gets_its_own_seed_where_servers_use_seeds(tiny_model_path):
    """SGLang would use the same seed for all requests without one."""
    with (
        FakeServer(tiny_model_path, enable_deterministic_inference=True) as fake,
        AsyncSGLang.connect(fake.url) as engine,
    ):
        generate(engine, input_ids=[[5]] * 40)
        drawn = seeds(fake)
        assert len(set(drawn)) == 40
        assert None not in drawn
        generate(engine, sampling_params={**SHORT, "sampling_seed": 7})
        assert seeds(fake)[40:] == [7] * 3


def test_a_seed_that_would_be_ignored_is_refused(fake, fake_engine):
    with pytest.raises(UnsupportedByServerError, match="sampling_seed=7.*ignored"):
        generate(fake_engine, sampling_params={**SHORT, "sampling_seed": 7})
    greedy = {**SHORT, "sampling_seed": 7, "temperature": 0.0}
    assert len(generate(fake_engine, sampling_params=greedy)) == 3
    generate(fake_engine)
    assert seeds(fake)[3:] == [None] * 3


def test_an_empty_batch_is_no_request(fake, fake_engine):
    assert fake_engine.generate(input_ids=[]) == []
    assert fake_engine.generate([]) == []
    assert fake.payloads() == []


def test_shutdown_ends_waiting_calls(fake, fake_engine):
    with ThreadPoolExecutor() as pool, fake.misbehaving("hang"):
        call = pool.submit(generate, fake_engine, timeout=60)
        fake.wait_for("/generate")
        fake_engine.shutdown()
        assert type(call.exception(60)) is ServerUnavailableError


def test_completions_are_frozen(fake_engine):
    (answer, *_) = generate(fake_engine)
    assert isinstance(answer, Completion)
    with pytest.raises(AttributeError):
        answer.token_ids = []


def test_only_transient_errors_are_retried():
    for transient in (True, False):
        error = ServerUnavailableError("no", transient=transient)
        assert (retry_delay(error, 1, 5) is not None) == transient


def test_delays_grow_up_to_a_limit():
    error = ServerUnavailableError("no", transient=True)
    for attempt in range(1, 20):
        delay = retry_delay(error, attempt, 20)
        limit = min(0.1 * 2 ** (attempt - 1), 5.0)
        assert limit / 2 <= delay <= limit
    assert retry_delay(error, 20, 20) is None
    assert retry_delay(error, 1, 1) is None
