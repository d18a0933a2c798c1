"""Modes of log-probabilities, on a fake server with one value per mode."""

from __future__ import annotations

import dataclasses
import math

import pytest
from helpers.fake_server import LOG_PROB, SAMPLING_LOG_PROB, FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.generation.log_probs import is_unscaled, with_scores
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.requests.plan import plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.types import Completion, VersionSpan

PROMPTS = [[5], [6, 7], [8, 9, 10]]
WARM = {"max_new_tokens": 4, "temperature": 0.7}
MASKED = {"max_new_tokens": 4, "logit_bias": {"5": 1.0}}


@pytest.fixture
def scaling_fake(tiny_model_path):
    """A server that divides the logits before it takes log-probs."""
    with FakeServer(tiny_model_path, original_log_probs=False) as server:
        yield server


@pytest.fixture
def scaling_engine(scaling_fake):
    with AsyncSGLang.connect(scaling_fake.url) as engine:
        yield engine


def scorings(fake) -> list[list[int]]:
    return [
        ids
        for payload in fake.payloads()
        for ids, params, wanted in zip(
            payload["input_ids"],
            payload["sampling_params"],
            payload["return_logprob"],
            strict=True,
        )
        if params["max_new_tokens"] == 0 and wanted
    ]


def ask(engine, params, **options):
    return engine.generate(
        input_ids=PROMPTS,
        sampling_params=params,
        return_logprobs=True,
        top_logprobs=2,
        **options,
    )


def check(answers, value, mode) -> None:
    for answer in answers:
        assert answer.log_probs == [value] * 4
        assert answer.top_log_probs == [[value] * 2] * 4
        assert answer.top_token_ids == [[0, 1]] * 4
        assert answer.logprobs_mode == mode


def plan_of(params, capabilities):
    request = GenerateRequest(
        input_ids=[5], sampling_params=params, return_logprobs=True
    )
    return plan_request(request, capabilities)


@pytest.fixture
def able(capabilities):
    """Capabilities of servers that take every sampling parameter."""
    return dataclasses.replace(capabilities, has_grammar=True, uses_seeds=True)


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.2}, False),
        ({"stop": ["a"], "ignore_eos": True, "sampling_seed": 1}, False),
        ({"frequency_penalty": 0.0, "repetition_penalty": 1.0}, False),
        ({"logit_bias": {}, "min_new_tokens": 0, "regex": ""}, False),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"logit_bias": {"5": 0.5}}, True),
        ({"min_new_tokens": 1}, True),
        ({"regex": "a"}, True),
        ({"json_schema": "{}"}, True),
        ({"ebnf": "root ::= 'a'"}, True),
        ({"structural_tag": "{}"}, True),
    ],
)
def test_parameters_that_change_the_logits(params, changed, able):
    # A temperature of 1 is the only one that does not depend on the servers.
    params = {**params, "temperature": 1.0}
    assert plan_of(params, able).scores is changed
    assert plan_of(params, able).replayable is not changed
    preferring = dataclasses.replace(able, default_sampling_params=params)
    assert plan_of({}, preferring).scores is changed
    # Some leave tokens out, and change no other's: a support has the tokens they left.
    leaves_out = {"min_new_tokens", "regex", "json_schema", "ebnf", "structural_tag"}
    shifted = changed and not leaves_out & set(params)
    assert plan_of({**params, "top_k": 3}, able).replayable is not shifted


@pytest.mark.parametrize(
    ("temperature", "scaled"),
    [(None, False), (1, False), (1.0, False), (0, False), (1e-7, False), (0.7, True)],
)
def test_temperatures_that_scale_the_logits(temperature, scaled, able):
    params = {"temperature": temperature}
    scores = None if scaled else False
    assert plan_of(params, able).scores is scores
    preferring = dataclasses.replace(able, default_sampling_params=params)
    assert plan_of({}, preferring).scores is scores
    assert plan_of({"temperature": 1.0}, preferring).scores is False


def test_a_flat_model_counts_as_scaled():
    assert not is_unscaled(-math.log(99), vocab_size=99)
    assert not is_unscaled(-math.log(99) + 0.01, vocab_size=99)
    assert is_unscaled(-math.log(99) + 0.5, vocab_size=99)


def completion(*spans, **fields) -> Completion:
    versions = tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans)
    size = versions[-1].end if versions else fields.pop("size", 0)
    return Completion(
        token_ids=[1] * size, finish_reason="stop", versions=versions, **fields
    )


def scores(version, size) -> Completion:
    tops = [[-1.0, -2.0]] * size
    return completion(
        (version, 0, 0),
        log_probs=[-1.0] * size,
        top_log_probs=tops,
        top_token_ids=[[3, 4]] * size,
    )


def test_only_tokens_of_the_scoring_weights_get_log_probs():
    whole = with_scores(completion(("2", 0, 3)), scores("2", 3))
    assert whole is not None
    assert whole.log_probs == [-1.0] * 3
    assert whole.logprobs_mode == "model"
    mixed = with_scores(completion(("1", 0, 2), ("2", 2, 3)), scores("2", 3))
    assert mixed is not None
    assert [math.isnan(value) for value in mixed.log_probs] == [True, True, False]
    assert [math.isnan(row[0]) for row in mixed.top_log_probs] == [True, True, False]
    assert with_scores(completion(("1", 0, 3)), scores("2", 3)) is None
    unknown = completion(size=3)
    assert with_scores(unknown, scores("2", 3)) is None
    empty = with_scores(completion(("1", 0, 0)), scores("2", 0))
    assert empty is not None
    assert empty.log_probs == []


def test_plain_sampling_is_not_scored(fake, fake_engine):
    check(ask(fake_engine, {"max_new_tokens": 4}), LOG_PROB, "model")
    assert len(fake.payloads()) == len(PROMPTS)


def test_servers_are_not_probed_without_log_probs(scaling_fake, scaling_engine):
    for params in (WARM, MASKED):
        for answer in scaling_engine.generate(
            input_ids=PROMPTS, sampling_params=params
        ):
            assert answer.log_probs is None
            assert answer.logprobs_mode is None
    assert len(scaling_fake.payloads()) == 2 * len(PROMPTS)


def test_a_server_that_ignores_the_temperature_is_probed_once(fake, fake_engine):
    check(ask(fake_engine, WARM), LOG_PROB, "model")
    check(ask(fake_engine, WARM), LOG_PROB, "model")
    assert scorings(fake) == []
    probe, *others = fake.payloads()
    assert probe["sampling_params"][0]["temperature"] == 1e4
    assert len(others) == 2 * len(PROMPTS), "It is asked once."


def test_responses_of_a_server_that_scales_are_scored(scaling_fake, scaling_engine):
    check(ask(scaling_engine, WARM), LOG_PROB, "model")
    assert sorted(scorings(scaling_fake)) == [
        [5, 5, 5, 5, 5],
        [6, 7, 6, 7, 6, 7],
        [8, 9, 10, 8, 9, 10, 8],
    ]
    for payload in scaling_fake.payloads():
        if payload["sampling_params"][0]["max_new_tokens"] == 0:
            (ids,), (start,) = payload["input_ids"], payload["logprob_start_len"]
            assert start == len(ids) - 5, "From the last token of the prompt on"


def test_masked_responses_are_scored_by_every_server(
    fake, fake_engine, scaling_fake, scaling_engine
):
    for server, engine in ((fake, fake_engine), (scaling_fake, scaling_engine)):
        check(ask(engine, MASKED), LOG_PROB, "model")
        assert len(scorings(server)) == 3
        temperatures = [
            params.get("temperature")
            for payload in server.payloads()
            for params in payload["sampling_params"]
        ]
        assert 1e4 not in temperatures, "What it means at a temperature is not needed."


def test_streams_are_scored_too(scaling_fake, scaling_engine):
    answers = dict(
        scaling_engine.generate_iter(
            input_ids=PROMPTS,
            sampling_params=WARM,
            return_logprobs=True,
            top_logprobs=2,
        )
    )
    check([answers[index] for index in range(3)], LOG_PROB, "model")


def test_prompt_log_probs_beside_scoring(scaling_engine):
    (answer,) = scaling_engine.generate(
        input_ids=PROMPTS[2],
        sampling_params=WARM,
        return_logprobs=True,
        return_prompt_logprobs=True,
    )
    assert answer.prompt_log_probs[1:] == [LOG_PROB] * 2
    assert answer.log_probs == [LOG_PROB] * 4


def test_sampling_mode(fake_engine, scaling_engine):
    for engine in (fake_engine, scaling_engine):
        masked = ask(engine, MASKED, logprobs_mode="sampling")
        check(masked, SAMPLING_LOG_PROB, "sampling")
        check(
            ask(engine, {"max_new_tokens": 4}, logprobs_mode="sampling"),
            LOG_PROB,
            "sampling",
        )
    warm = ask(scaling_engine, WARM, logprobs_mode="sampling")
    check(warm, SAMPLING_LOG_PROB, "sampling")
    with pytest.raises(UnsupportedByServerError, match="SGLANG_RETURN_ORIGINAL_LOGP"):
        ask(fake_engine, WARM, logprobs_mode="sampling")


def test_servers_with_different_log_probs(fake, scaling_fake):
    """One that scales is enough to have every response scored."""
    with AsyncSGLang.connect(urls=[fake.url, scaling_fake.url]) as engine:
        check(ask(engine, WARM), LOG_PROB, "model")
        assert len(scorings(fake)) + len(scorings(scaling_fake)) == 3
        with pytest.raises(UnsupportedByServerError, match="they differ"):
            ask(engine, WARM, logprobs_mode="sampling")


def test_a_failed_probe(fake, fake_engine):
    answer = fake.routes["/generate"]

    def refuse(content):
        if not isinstance(content["sampling_params"], list):
            content = {**content, "input_ids": None}
        return answer(content)

    fake.routes["/generate"] = refuse
    with pytest.raises(UnsupportedByServerError, match="try again"):
        ask(fake_engine, WARM, logprobs_mode="sampling")
    fake.routes["/generate"] = answer
    with pytest.raises(UnsupportedByServerError, match="SGLANG_RETURN_ORIGINAL"):
        ask(fake_engine, WARM, logprobs_mode="sampling")


def test_parameters_that_the_server_prefers(fake):
    """They hold for requests that do not give them."""
    describe = fake.routes["/model_info"]

    def preferring(content):
        response = describe(content)
        body = (
            response.body[:-1] + b',"preferred_sampling_params":{"min_new_tokens":2}}'
        )
        return type(response)(body=body, content_type="application/json")

    fake.routes["/model_info"] = preferring
    with AsyncSGLang.connect(fake.url) as engine:
        assert engine.capabilities.default_sampling_params == {"min_new_tokens": 2}
        check(ask(engine, {"max_new_tokens": 4}), LOG_PROB, "model")
    assert len(scorings(fake)) == 3


def test_a_response_is_scored_with_its_own_adapter(tiny_model_path):
    """Also when another adapter has its name by then."""
    with FakeServer(tiny_model_path, enable_lora=True) as fake:
        fake.adapters = ["style@1#1"]
        with AsyncSGLang.connect(fake.url) as engine:
            answer = fake.routes["/generate"]

            def replace_adapter(content):
                fake.adapters = ["style@1#1", "style@2#2"]
                return answer(content)

            fake.routes["/generate"] = replace_adapter
            (found,) = engine.generate(
                input_ids=[6, 7],
                sampling_params=MASKED,
                return_logprobs=True,
                adapter="style",
            )
            assert found.adapter_version == "1"
            assert found.log_probs == [LOG_PROB] * 4
        used = [payload["lora_path"] for payload in fake.payloads()]
        assert used == [["style@1#1"]] * 2


def test_weights_that_were_replaced_before_scoring(fake, fake_engine):
    """The log-probs are lost, so the response is generated again."""
    answer = fake.routes["/generate"]
    asked = []

    def update_once(content):
        scored = content.get("logprob_start_len") == 1
        asked.append(scored)
        if scored and asked.count(True) == 1:
            fake.weight_version = "1"
        return answer(content)

    fake.routes["/generate"] = update_once
    (found,) = fake_engine.generate(
        input_ids=[6, 7], sampling_params=MASKED, return_logprobs=True
    )
    assert found.log_probs == [LOG_PROB] * 4
    assert found.versions == (VersionSpan(version="1", start=0, end=4),)
    assert asked == [False, True, False, True]


def test_a_failed_scoring_is_an_error(fake, fake_engine):
    answer = fake.routes["/generate"]

    def break_scoring(content):
        if content.get("logprob_start_len") == 1:
            content = {**content, "input_ids": [fake_engine.capabilities.vocab_size]}
        return answer(content)

    fake.routes["/generate"] = break_scoring
    with pytest.raises(ServerUnavailableError):
        fake_engine.generate(
            input_ids=[6, 7], sampling_params=MASKED, return_logprobs=True
        )


def test_a_scored_response_fits_into_a_prompt(fake, fake_engine):
    limits = fake_engine.capabilities
    prompt = [5] * (limits.max_prompt - 3)
    params = {"ignore_eos": True, "max_new_tokens": 50, "logit_bias": {"5": 1.0}}
    (answer,) = fake_engine.generate(
        input_ids=prompt, sampling_params=params, return_logprobs=True
    )
    assert len(answer.token_ids) == len(answer.log_probs) == 3
    prompt = [5] * limits.max_prompt
    assert len(fake_engine.generate(input_ids=prompt, sampling_params=params)) == 1
    with pytest.raises(ConfigurationError, match="no room for scoring"):
        fake_engine.generate(
            input_ids=prompt, sampling_params=params, return_logprobs=True
        )


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("raw_logprobs", "vLLM's 'raw_logprobs' is 'model'"),
        ("processed_logprobs", "is 'behaviour' here"),
        ("behavior", "written 'behaviour' here"),
        (None, "'sampling' or 'behaviour'"),
        (["model"], "'sampling' or 'behaviour'"),
    ],
)
def test_unknown_modes(fake_engine, mode, words):
    with pytest.raises(ConfigurationError, match=words):
        ask(fake_engine, MASKED, logprobs_mode=mode)
