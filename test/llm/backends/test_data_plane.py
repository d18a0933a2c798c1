"""What becomes of a batch when the server does not answer it as it should."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from torchrl_sglang.backends.data_plane import SINGLE_REQUESTS
from torchrl_sglang.errors import (
    GenerationAbortedError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
)
from torchrl_sglang.types import Completion

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
        ("short_batch", ServerUnavailableError, "sent 3 prompts and answered 2"),
        ("short_tokens", ServerUnavailableError, "sent 3 tokens .* counts 4"),
        ("short_log_probs", ServerUnavailableError, "4 tokens and sent 3"),
        ("short_top_log_probs", ServerUnavailableError, "2 likeliest tokens .* of 4"),
        ("no_log_probs", ServerUnavailableError, "4 tokens and sent none"),
        ("null_log_probs", ServerUnavailableError, "position 3 of .* unset"),
        ("other_tokens", ServerUnavailableError, "other tokens"),
        ("abort", GenerationAbortedError, "after 1 tokens"),
        ("abort_400", RequestRefusedError, "HTTP 400.*cannot be served"),
    ],
)
def test_faults(fake, fake_engine, fault, error, words):
    with fake.misbehaving(fault), pytest.raises(error, match=words) as caught:
        generate(fake_engine, return_logprobs=True, top_logprobs=2)
    assert type(caught.value) is error
    assert fake.url in str(caught.value)
    assert len(generate(fake_engine, return_logprobs=True)) == 3


@pytest.mark.parametrize("fault", ["abort", "abort_400"])
def test_a_response_that_was_cut_off_tells_which(fake, fake_engine, fault):
    with fake.misbehaving(fault):
        outcomes = generate(fake_engine, return_exceptions=True)
    assert [outcome.index for outcome in outcomes] == [0, 1, 2]


def test_the_others_are_answered(fake, fake_engine):
    with fake.misbehaving("abort_last"):
        *good, bad = generate(fake_engine, return_exceptions=True)
        assert [answer.token_ids for answer in good] == [[5, 5, 5, 5], [6, 7, 6, 7]]
        assert isinstance(bad, GenerationAbortedError)
        with pytest.raises(GenerationAbortedError) as caught:
            generate(fake_engine)
    assert caught.value.index == 2
    assert caught.value.__notes__ == ["It is item 2 of 3."]


def test_places_in_the_batch_where_not_all_of_it_is_sent(fake, fake_engine):
    prompts = [[5], [], [6], [10**6], [7], [8]]
    params = [SHORT] * 4 + [REFUSED, SHORT]
    with fake.misbehaving("abort_last"):
        outcomes = generate(
            fake_engine,
            input_ids=prompts,
            sampling_params=params,
            return_exceptions=True,
        )
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "GenerationAbortedError",  # each is the last one of its own request
        "ConfigurationError",
        "GenerationAbortedError",
        "ConfigurationError",
        "RequestRefusedError",
        "GenerationAbortedError",
    ]
    places = [getattr(outcome, "index", None) for outcome in outcomes]
    assert places == [0, None, 2, None, 4, 5]
    sent = [payload["input_ids"] for payload in fake.payloads()]
    assert sent[0] == [[5], [6], [7], [8]]
    assert sorted(sent[1:]) == [[[5]], [[6]], [[7]], [[8]]]


def test_cached_state_that_may_be_of_older_weights_is_not_used(fake, fake_engine):
    """Somebody else has updated the weights since this engine looked."""
    generate(fake_engine)
    fake.weight_version = "3"
    generate(fake_engine)
    assert fake_engine.weight_version == "3"
    assert len(fake.payloads()) == 2, "Nothing was cached, so the answers were right."
    fake.weight_version, fake.cached_tokens = "4", 1
    generate(fake_engine)
    keys = [payload["extra_key"][0] for payload in fake.payloads()]
    assert keys == ["default", "default", "3", "4"]


def test_a_budget_that_is_used_up(fake, fake_engine):
    start = time.monotonic()
    with fake.misbehaving("hang"), pytest.raises(ServerTimeoutError, match="0.3 s"):
        generate(fake_engine, timeout=0.3)
    assert time.monotonic() - start < 60


def test_a_refused_batch_is_sent_again_within_the_same_budget(fake, fake_engine):
    """The batch is refused after most of its budget, and then nothing answers."""
    answer = fake.routes["/generate"]
    start = time.monotonic()
    with ExitStack() as faults:

        def slow_once(content):
            time.sleep(2.5)
            faults.enter_context(fake.misbehaving("hang"))
            return answer(content)

        fake.routes["/generate"] = slow_once
        with pytest.raises(ServerTimeoutError):
            generate(fake_engine, sampling_params=[SHORT, REFUSED, SHORT], timeout=3.0)
    # A budget of its own would have ended 5.5 s after the beginning.
    assert time.monotonic() - start < 5.5
    assert len(fake.payloads()) > 1


def test_a_large_batch_that_is_refused_does_not_open_as_many_connections(
    fake, fake_engine
):
    count = 5 * SINGLE_REQUESTS
    params = [SHORT] * (count - 1) + [REFUSED]
    outcomes = generate(
        fake_engine,
        input_ids=[[index % 90] for index in range(count)],
        sampling_params=params,
        return_exceptions=True,
    )
    assert fake.most_connections <= SINGLE_REQUESTS + 1
    assert isinstance(outcomes.pop(), RequestRefusedError)
    found = [outcome.token_ids[0] for outcome in outcomes]
    assert found == [index % 90 for index in range(count - 1)]


def test_a_batch_is_one_request(fake, fake_engine):
    generate(fake_engine, return_prompt_logprobs=True)
    (payload,) = fake.payloads()
    assert payload["input_ids"] == PROMPTS
    assert payload["extra_key"] == ["default"] * 3
    assert payload["logprob_start_len"] == [0, 0, 0]


def test_an_empty_batch_is_no_request(fake, fake_engine):
    assert fake_engine.generate(input_ids=[]) == []
    assert fake_engine.generate([]) == []
    assert fake.payloads() == []


def test_shutting_down_ends_what_waits(fake, fake_engine):
    errors = []

    def wait() -> None:
        try:
            generate(fake_engine, timeout=60)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    with fake.misbehaving("hang"):
        thread.start()
        fake.wait_for("/generate")
        fake_engine.shutdown()
        thread.join(60)
    assert [type(error) for error in errors] == [ServerUnavailableError]


def test_completions_cross_rooms_frozen(fake_engine):
    (answer, *_) = generate(fake_engine)
    assert isinstance(answer, Completion)
    with pytest.raises(AttributeError):
        answer.token_ids = []
