"""Going on from the tokens of an unfinished response."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchrl_sglang.requests.plan import plan_request
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.resume import ended, join_completions, resume_request
from torchrl_sglang.types import Completion, VersionSpan


@pytest.mark.parametrize(
    ("params", "rest"),
    [
        ({"max_new_tokens": 10}, {"max_new_tokens": 7}),
        ({"max_new_tokens": None}, {"max_new_tokens": None}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        (
            {"max_new_tokens": 10, "min_new_tokens": 5},
            {"max_new_tokens": 7, "min_new_tokens": 2},
        ),
        ({"min_new_tokens": 2}, {"min_new_tokens": 0}),
        ({"max_new_tokens": 3}, None),
        ({"max_new_tokens": 2}, None),
    ],
)
def test_a_response_goes_on_behind_its_tokens(params, rest, capabilities):
    request = GenerateRequest(
        input_ids=(5, 6),
        sampling_params=params,
        return_logprobs=True,
        return_prompt_logprobs=True,
        adapter="style",
    )
    begun = Completion(token_ids=[7, 8, 9], finish_reason="abort")
    resumed = resume_request(request, begun, capabilities)
    if rest is None:
        assert resumed is None
        return
    assert resumed.input_ids == [5, 6, 7, 8, 9]
    assert resumed.sampling_params == rest
    assert (resumed.return_logprobs, resumed.return_prompt_logprobs) == (True, False)
    assert resumed.adapter == "style"
    assert request.sampling_params == params


def test_the_context_ends_a_response(capabilities):
    request = GenerateRequest(input_ids=[5] * 50, sampling_params={})
    for length, goes_on in ((7, True), (8, False)):
        begun = Completion(token_ids=[6] * length, finish_reason="abort")
        resumed = resume_request(request, begun, capabilities)
        assert (resumed is not None) is goes_on


def test_join_completions():
    first = Completion(
        token_ids=[0, 1, 2],
        log_probs=[0.0, -1.0, -2.0],
        top_token_ids=[[0], [1], [2]],
        top_log_probs=[[-0.5]] * 3,
        finish_reason="length",
        cached_tokens=5,
        prompt_log_probs=[0.0],
        versions=(
            VersionSpan(version="1", start=0, end=2),
            VersionSpan(version="2", start=2, end=3),
        ),
    )
    second = Completion(
        token_ids=[3],
        log_probs=[-9.0],
        top_token_ids=[[1]],
        top_log_probs=[[-1.0]],
        finish_reason="stop",
        matched_stop=3,
        cached_tokens=8,
        versions=(VersionSpan(version="2", start=0, end=1),),
    )
    whole = join_completions(first, second)
    assert whole.token_ids == [0, 1, 2, 3]
    assert whole.log_probs == [0.0, -1.0, -2.0, -9.0]
    assert whole.prompt_log_probs == [0.0]
    assert (whole.finish_reason, whole.matched_stop) == ("stop", 3)
    assert whole.cached_tokens == 5
    assert [(s.version, s.start, s.end) for s in whole.versions] == [
        ("1", 0, 2),
        ("2", 2, 4),
    ]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "abort"),
        ({"max_new_tokens": 4}, "abort"),
        ({"max_new_tokens": 3}, "length"),
        ({"stop_token_ids": [2]}, "stop"),
        ({"stop_token_ids": [1]}, "abort"),
        ({"stop_token_ids": [2], "max_new_tokens": 3}, "stop"),
    ],
)
def test_an_aborted_response_may_have_ended(params, reason):
    aborted = Completion(token_ids=[0, 1, 2], finish_reason="abort")
    assert ended(aborted, params, {99}).finish_reason == reason
    assert ended(aborted, {**params, "ignore_eos": True}, {2}).finish_reason in (
        "abort",
        "length",
    )
    whole = ended(aborted, params, {2})
    assert (whole.finish_reason, whole.matched_stop) == ("stop", 2)


@pytest.mark.parametrize(
    ("params", "resumable", "counted"),
    [
        ({}, True, False),
        ({"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.0}}, True, False),
        ({"min_new_tokens": 5}, True, True),
        ({"min_new_tokens": 0}, True, False),
        ({"frequency_penalty": 0.5}, False, True),
        ({"presence_penalty": 0.0, "repetition_penalty": 1.0}, True, False),
        ({"json_schema": "{}"}, False, False),
        ({"regex": ""}, True, False),
    ],
)
def test_what_can_go_on(params, resumable, counted, capabilities):
    request = GenerateRequest(input_ids=[5], sampling_params=params)
    plan = plan_request(request, replace(capabilities, has_grammar=True))
    assert plan.resumable == resumable
    assert plan.survives_retraction != counted


def test_required_tokens_of_the_server_cannot_be_lowered(capabilities):
    """The rest of a response needs fewer, which a request has to say itself."""
    capabilities = replace(capabilities, default_sampling_params={"min_new_tokens": 2})
    for params, resumable in (({}, False), ({"min_new_tokens": 3}, True)):
        request = GenerateRequest(input_ids=[5], sampling_params=params)
        assert plan_request(request, capabilities).resumable is resumable
