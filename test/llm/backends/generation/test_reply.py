from __future__ import annotations

import copy
import dataclasses
import math
import re

import msgspec
import numpy as np
import pytest
import torch

from torchrl_sglang.backends.client.http import HttpResponse
from torchrl_sglang.backends.generation.reply import decode_reply, parse_completion
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    NotFiniteError,
    RequestRefusedError,
    ServerUnavailableError,
    UnsupportedByServerError,
)
from torchrl_sglang.requests.plan import check_prompt, plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS, check_sampling_params
from torchrl_sglang.types import VersionSpan

GRAMMARS = {"regex": "a+", "json_schema": "{}", "ebnf": "root", "structural_tag": "{}"}


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], ["is empty", "at least one token", "bos"]),
        ([5, 300], ["token id 300", "outside the vocabulary", "[0, 300)"]),
        ([5, -1], ["token id -1", "outside the vocabulary"]),
        ([2**70], [str(2**70)]),
        ([5, 1.5], ["1.5", "float", "integers"]),
        ([5, 6.0], ["6.0", "float"]),
        ([5, True], ["True", "bool"]),
        ([5, "6"], ["'6'", "str"]),
        ([5, None], ["None"]),
        ([5, math.nan], ["nan"]),
        ([5, np.int64(6)], ["int64", "tolist()"]),
        ([5, torch.tensor(6)], ["tensor(6)", "tolist()"]),
        ([[5]], ["[5]", "list"]),
        ("abc", ["a str", "list of token ids"]),
        (5, ["a int", "list of token ids"]),
        (None, ["NoneType"]),
        ([5] * 58, ["58 tokens", "no room", "57 prompt tokens", "context_length"]),
    ],
)
def test_bad_prompt(ids, words, capabilities):
    with pytest.raises(ConfigurationError) as caught:
        check_prompt(ids, capabilities, "Prompt 3")
    assert all(word in str(caught.value) for word in ["Prompt 3", *words])


@pytest.mark.parametrize("ids", [[0], [299], (5, 6), [7] * 57])
def test_good_prompt(ids, capabilities):
    check_prompt(ids, capabilities)


def test_a_prompt_leaves_context_for_a_response(capabilities):
    roomy = dataclasses.replace(capabilities, max_prompt=1000)
    check_prompt([5] * 63, roomy)
    with pytest.raises(ConfigurationError, match="no room"):
        check_prompt([5] * 64, roomy)


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("frequency_penalty", [-2, -2.0, 0, 2.0], [-2.01, 2.01, math.nan]),
        ("presence_penalty", [-2, 2.0], [-2.01, 2.01]),
        ("repetition_penalty", [0.01, 1, 2.0], [0, 0.0, -0.1, 2.01]),
        ("temperature", [0, 0.0, 1, 1e9], [-0.01, math.inf, math.nan]),
        ("top_p", [0.01, 1, 1.0], [0, 0.0, -0.1, 1.01]),
        ("min_p", [0, 0.5, 1.0], [-0.01, 1.01]),
        ("top_k", [-1, 1, 300, 2**30], [0, -2, 2**30 + 1, 2**40]),
        ("max_new_tokens", [0, 1, 10**6, 2**70], [-1]),
        ("min_new_tokens", [0, 1], [-1]),
        ("sampling_seed", [-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
    ],
)
def test_limits(name, inside, outside, capabilities):
    capabilities = dataclasses.replace(capabilities, uses_seeds=True)
    for value in inside:
        assert check_sampling_params({name: value}, capabilities) == {name: value}
    for value in outside:
        with pytest.raises(ConfigurationError, match=re.escape(f"{name}=")) as caught:
            check_sampling_params({name: value}, capabilities)
        assert f"{value}".removesuffix(".0") in str(caught.value)


GOOD_VALUES = {
    "ebnf": "root ::= 'a'",
    "ignore_eos": True,
    "json_schema": "{}",
    "logit_bias": {"5": 1.0},
    "no_stop_trim": False,
    "regex": "a+",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "stop": ["a"],
    "stop_regex": ["a+"],
    "stop_token_ids": [5],
    "structural_tag": "{}",
}


@pytest.mark.parametrize("name", sorted(SAMPLING_PARAMETERS))
def test_types(name, capabilities):
    able = dataclasses.replace(capabilities, has_grammar=True, uses_seeds=True)
    good = GOOD_VALUES.get(name, 1)
    assert check_sampling_params({name: good}, able) == {name: good}
    assert check_sampling_params({name: None}, able) == {}
    wrong = "1" if not isinstance(good, (str, list)) else 1
    for value in (wrong, object()) + (() if isinstance(good, bool) else (True,)):
        with pytest.raises(ConfigurationError, match=f"{name}=.*must be"):
            check_sampling_params({name: value}, able)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temprature": 1.0}, ["'temprature'", "Did you mean 'temperature'?"]),
        ({"max_toks": 5}, ["'max_toks'", "Did you mean 'max_new_tokens'?"]),
        ({"max_completion_tokens": 5}, ["Did you mean 'max_new_tokens'?"]),
        ({"eos_token_id": 5}, ["Did you mean 'stop_token_ids'?"]),
        ({"max_tokens": 5, "max_new_tokens": 5}, ["given twice", "'max_new_tokens'"]),
        ({"wibble": 1}, ["'wibble'", "The valid ones are", "temperature, top_k"]),
        ({5: 1}, ["5 is not"]),
        ({"n": 2}, ["n=2", "num_samples"]),
        ({"stop": ""}, ["stop holds ''", "not empty"]),
        ({"stop": ["a", 1]}, ["stop holds 1"]),
        ({"stop_regex": "(["}, ["stop_regex holds '(['", "regular expression"]),
        ({"stop_regex": [1]}, ["stop_regex holds 1"]),
        ({"stop_token_ids": [5, 300]}, ["stop_token_ids", "300", "vocabulary"]),
        ({"stop_token_ids": [5, "a"]}, ["stop_token_ids", "'a'"]),
        ({"stop_token_ids": [[5]]}, ["stop_token_ids", "[5]"]),
        ({"logit_bias": {300: 1.0}}, ["logit_bias", "300"]),
        ({"logit_bias": {"a": 1.0}}, ["logit_bias", "'a'"]),
        ({"logit_bias": {None: 1.0}}, ["logit_bias", "None"]),
        ({"logit_bias": {5: None}}, ["token 5", "None"]),
        ({"logit_bias": {5: "1"}}, ["token 5", "'1'"]),
        ({"logit_bias": {5: -math.inf}}, ["token 5", "-inf", "-1e9"]),
        ({"logit_bias": {5: math.nan}}, ["token 5", "nan"]),
        ({"logit_bias": {5: 1e39}}, ["token 5", "1e+39"]),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, ["min_new_tokens=3", "=2"]),
        (
            {"ignore_eos": True, "stop_token_ids": [5]},
            ["ignore_eos=True", "stop_token_ids=[5]", "only one"],
        ),
    ],
)
def test_bad_sampling_params(params, words, capabilities):
    with pytest.raises(ConfigurationError) as caught:
        check_sampling_params(params, capabilities)
    assert all(word in str(caught.value) for word in words)


def test_sampling_params_that_are_rewritten(capabilities):
    given = {
        "stop": "a",
        "stop_token_ids": {7, 5},
        "logit_bias": {5: 1, "6": -2.5},
        "temperature": np.float64(0.5),
        "top_p": None,
    }
    kept = copy.deepcopy(given)
    checked = check_sampling_params(given, capabilities)
    assert checked == {
        "stop": ["a"],
        "stop_token_ids": [5, 7],
        "logit_bias": {"5": 1.0, "6": -2.5},
        "temperature": 0.5,
    }
    assert given == kept
    msgspec.json.encode(checked)


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_need_a_backend(name, capabilities):
    with pytest.raises(UnsupportedByServerError, match="grammar_backend='xgrammar'"):
        check_sampling_params({name: GRAMMARS[name]}, capabilities)


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
def test_stop_texts_need_a_tokenizer(name, capabilities):
    without = dataclasses.replace(capabilities, has_tokenizer=False)
    with pytest.raises(UnsupportedByServerError, match="stop_token_ids"):
        check_sampling_params({name: "a"}, without)
    check_sampling_params({"stop_token_ids": [5]}, without)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, {}),
        ({"return_logprobs": True}, {"return_logprob": True}),
        (
            {"return_prompt_logprobs": True},
            {"return_logprob": True, "logprob_start_len": 0},
        ),
        ({"top_logprobs": 2}, {"return_logprob": True, "top_logprobs_num": 2}),
    ],
)
def test_payload(options, sent, capabilities):
    request = GenerateRequest(
        input_ids=(5, 6),
        sampling_params={"temperature": 0.0, "max_new_tokens": 3},
        **options,
    )
    payload = plan_request(request, capabilities).payload(cache_key="7", rid="x")
    assert payload == {
        "input_ids": [5, 6],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 3},
        "return_logprob": False,
        "logprob_start_len": -1,
        "extra_key": "7",
        "top_logprobs_num": 0,
        "rid": "x",
        **sent,
    }


def test_an_adapter_is_named_where_there_is_one(capabilities):
    plan = plan_request(GenerateRequest(input_ids=[5]), capabilities)
    for adapter, sent in (("a", {"lora_path": "a"}), (None, {})):
        payload = plan.payload(cache_key="7", rid="x", adapter=adapter)
        assert {k: v for k, v in payload.items() if k == "lora_path"} == sent


@pytest.mark.parametrize(
    ("length", "asked", "sent"),
    [
        (10, {}, {"max_new_tokens": 54}),
        (10, {"max_new_tokens": 54}, {"max_new_tokens": 54}),
        (10, {"max_new_tokens": 55}, {"max_new_tokens": 54}),
        (10, {"max_new_tokens": 2**70}, {"max_new_tokens": 54}),
        (57, {"max_new_tokens": 100}, {"max_new_tokens": 7}),
        (
            57,
            {"max_new_tokens": 100, "min_new_tokens": 50},
            {"max_new_tokens": 7, "min_new_tokens": 7},
        ),
        (57, {"min_new_tokens": 5}, {"max_new_tokens": 7, "min_new_tokens": 5}),
    ],
)
def test_responses_are_limited_by_the_context(length, asked, sent, capabilities):
    request = GenerateRequest(input_ids=[5] * length, sampling_params=asked)
    payload = plan_request(request, capabilities).payload(cache_key="", rid="x")
    assert payload["sampling_params"] == sent


REPLY = {
    # A reply of SGLang 0.5.23, without unused fields.
    "text": "(/",
    "output_ids": [7, 14],
    "meta_info": {
        "id": "77507b92a1d542e58858485c6bbeb007",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "weight_version": "default",
        "input_token_logprobs": [[None, 5, None], [-4.8, 17, None], [-5.5, 99, None]],
        "output_token_logprobs": [[-5.9, 7, None], [-5.1, 14, None]],
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_versions": [{"version": "default", "start": 0, "end": 2}],
    },
}
REQUEST = GenerateRequest(
    input_ids=[5, 17, 99],
    sampling_params={"max_new_tokens": 2},
    return_logprobs=True,
    return_prompt_logprobs=True,
)


@pytest.fixture
def parse(capabilities):

    def parse_reply(reply, request=REQUEST):
        body = msgspec.json.encode(reply)
        answer = HttpResponse(url="http://one:1/generate", status=200, body=body)
        plan = plan_request(request, capabilities)
        return parse_completion(decode_reply(answer, plan), plan, server="http://one:1")

    return parse_reply


def changed(*path_and_value):
    """A reply with one thing changed; an Ellipsis removes it."""
    *path, last, value = path_and_value
    reply = copy.deepcopy(REPLY)
    part = reply
    for key in path:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return reply


def test_completion(parse):
    completion = parse(REPLY)
    assert math.isnan(completion.prompt_log_probs[0])
    assert completion.prompt_log_probs[1:] == [-4.8, -5.5]
    assert completion.log_probs == [-5.9, -5.1]
    assert completion.token_ids == [7, 14]
    assert completion.finish_reason == "length"
    assert completion.matched_stop is None
    assert completion.cached_tokens == 1
    assert completion.versions == (VersionSpan(version="default", start=0, end=2),)
    assert completion.text == "(/"


def test_log_probs_that_were_not_requested(parse):
    plain = GenerateRequest(input_ids=[5, 17, 99], sampling_params={})
    completion = parse(REPLY, plain)
    assert (completion.log_probs, completion.prompt_log_probs) == (None, None)
    parse(changed("meta_info", "output_token_logprobs", ...), plain)


def test_stop(parse):
    reason = {"type": "stop", "matched": 14}
    completion = parse(changed("meta_info", "finish_reason", reason))
    assert (completion.finish_reason, completion.matched_stop) == ("stop", 14)


@pytest.mark.parametrize(
    ("reply", "versions"),
    [
        (changed("meta_info", "weight_versions", ...), [("default", 0, 2)]),
        (
            changed(
                "meta_info",
                "weight_versions",
                [
                    {"version": "1", "start": 0, "end": 1},
                    {"version": "2", "start": 1, "end": 2},
                ],
            ),
            [("1", 0, 1), ("2", 1, 2)],
        ),
    ],
)
def test_versions(parse, reply, versions):
    found = [(span.version, span.start, span.end) for span in parse(reply).versions]
    assert found == versions


def test_no_version_is_invented(parse):
    reply = changed("meta_info", "weight_versions", ...)
    del reply["meta_info"]["weight_version"]
    assert parse(reply).versions == ()


def test_last_vocabulary_id_is_written_as_zero(parse):
    reply = changed("output_ids", [7, 299])
    reply["meta_info"]["output_token_logprobs"][1] = [-5.1, 0, None]
    assert parse(reply).log_probs == [-5.9, -5.1]
    reply["output_ids"] = [7, 298]
    with pytest.raises(ServerUnavailableError, match="other tokens"):
        parse(reply)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "malformed"),
        ("text", "malformed"),
        ([], "malformed"),
        ({}, "output_ids"),
        (changed("output_ids", ...), "output_ids"),
        (changed("output_ids", None), "malformed"),
        (changed("output_ids", 7), "malformed"),
        (changed("meta_info", None), "malformed"),
        (changed("meta_info", []), "malformed"),
        (changed("meta_info", "finish_reason", None), "malformed"),
        (changed("meta_info", "finish_reason", "stop"), "malformed"),
        (changed("meta_info", "finish_reason", {}), "type"),
        (changed("meta_info", "finish_reason", {"type": "tired"}), "tired"),
        (changed("output_ids", [7]), "sent 1 tokens .* counts 2"),
        (changed("output_ids", [7, 14, 15]), "sent 3 tokens .* counts 2"),
        (changed("meta_info", "output_token_logprobs", ...), "2 tokens and sent none"),
        (changed("meta_info", "output_token_logprobs", None), "sent none"),
        (changed("meta_info", "output_token_logprobs", [[-1, 7, None]]), "sent 1"),
        (changed("meta_info", "output_token_logprobs", [1, 2]), "malformed"),
        (changed("meta_info", "output_token_logprobs", [[], []]), "malformed"),
        (changed("meta_info", "input_token_logprobs", ...), "3 tokens and sent none"),
        (changed("meta_info", "input_token_logprobs", []), "3 tokens and sent 0"),
        (
            changed("meta_info", "output_token_logprobs", 1, [-5.1, 15, None]),
            "output_token_logprobs of other tokens",
        ),
        (
            changed("meta_info", "input_token_logprobs", 1, [-5.1, 15, None]),
            "input_token_logprobs of other tokens",
        ),
        (changed("meta_info", "weight_versions", [{"version": "1"}]), "malformed"),
        (changed("meta_info", "weight_versions", 5), "malformed"),
        (changed("meta_info", "cached_tokens", "many"), "malformed"),
    ],
)
def test_malformed_replies(parse, reply, words):
    with pytest.raises(ServerUnavailableError, match=words) as caught:
        parse(reply)
    assert "http://one:1" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "place", "token"),
    [("output_token_logprobs", 0, 7), ("input_token_logprobs", 2, 99)],
)
def test_log_probs_of_a_model_whose_logits_are_nan(parse, name, place, token):
    with pytest.raises(NotFiniteError, match=f"position {place} of {name} unset"):
        parse(changed("meta_info", name, place, [None, token, None]))


@pytest.mark.parametrize("body", [b"[" * 10_000, b'{"x": ' + b"[" * 10_000, b"\xff"])
def test_replies_that_are_not_json(body, capabilities):
    plan = plan_request(REQUEST, capabilities)
    with pytest.raises(ServerUnavailableError, match="http://one:1 .*not JSON"):
        decode_reply(HttpResponse(url="http://one:1", status=200, body=body), plan)


@pytest.mark.parametrize(
    ("reason", "error", "words"),
    [
        (
            {"type": "stop", "matched": "NaN happened"},
            NotFiniteError,
            "not numbers .*weights",
        ),
        ({"type": "abort"}, GenerationAbortedError, "after 2 tokens"),
        (
            {"type": "abort", "message": "Paused", "status_code": None},
            GenerationAbortedError,
            "Paused",
        ),
        (
            {"type": "abort", "message": "Broken", "status_code": 503},
            ServerUnavailableError,
            "HTTP 503.*Broken",
        ),
        (
            {"type": "abort", "message": "Too long", "status_code": 400},
            RequestRefusedError,
            "HTTP 400.*Too long",
        ),
        (
            {"type": "abort", "message": "Aborted by AbortReq.", "status_code": 400},
            GenerationAbortedError,
            "after 0 tokens",
        ),
    ],
)
def test_aborted_responses(parse, reason, error, words):
    with pytest.raises(error, match=words) as caught:
        parse(changed("meta_info", "finish_reason", reason))
    if error is RequestRefusedError:
        assert caught.value.status == 400
